"""The measured cost model: slopes from a few forwards, whatever the pool's size."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt.batch import BatchBuilder
from chatrt.engine.costs import measure_costs
from chatrt.models.decoder import Logits
from chatrt.testing.engine import PAGE_SIZE, tiny_target
from chatrt.testing.tokenizer import tiny_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.batch import Batch
    from chatrt.engine import Target


class _Clock:
    """Stands still but for what the fake forward takes."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def priced(target: Target, clock: _Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 ms a forward, 2 ms a sequence, 0.5 ms a further row, 0.01 ms a position of context."""

    def forward(batch: Batch, _kv: object) -> Logits:
        num_rows, num_sequences = batch.num_rows, batch.num_sequences
        context = int(batch.meta.kv_len.sum()) - num_rows
        ms = 5 + 2 * num_sequences + 0.5 * (num_rows - num_sequences) + 0.01 * context
        clock.now_ns += int(ms * 1e6)
        return Logits(torch.zeros(1, 1))

    monkeypatch.setattr(target.decoder, "forward", forward)


def test_the_coefficients_are_those_of_the_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, clock = tiny_target(tiny_tokenizer(tmp_path)), _Clock()
    priced(target, clock, monkeypatch)
    costs = measure_costs(target, page_size=PAGE_SIZE, max_context=256, clock=clock)
    assert costs.fixed_ms == pytest.approx(5)
    assert costs.decode_row_ms == pytest.approx(2)
    assert costs.prefill_row_ms == pytest.approx(0.5)
    assert costs.context_ms == pytest.approx(0.01)
    assert costs.step_ms(decode_rows=2, prefill_rows=4, context=100) == pytest.approx(12)


def test_fewer_sequences_than_are_usually_measured_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, clock = tiny_target(tiny_tokenizer(tmp_path)), _Clock()
    device = torch.device("cpu")
    narrow = replace(target, batches=BatchBuilder(64, 2, 16, PAGE_SIZE, device))
    priced(narrow, clock, monkeypatch)
    costs = measure_costs(narrow, page_size=PAGE_SIZE, max_context=256, clock=clock)
    assert costs.decode_row_ms == pytest.approx(2)


def test_a_pool_of_a_single_page_is_measured_too(tmp_path: Path) -> None:
    ticks = itertools.count(0, 1_000_000)
    target = tiny_target(tiny_tokenizer(tmp_path), num_pages=1)
    costs = measure_costs(target, page_size=PAGE_SIZE, max_context=16, clock=lambda: next(ticks))
    assert costs.fixed_ms == 1.0  # each forward took one tick, so nothing grows
    assert costs.prefill_row_ms == 0.0
