"""What is measured before service: a cost model, and passes by their rows; any pool's size."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt.batch import BatchBuilder
from chatrt.cost_model import StepLoad
from chatrt.engine.costs import measure_costs, measure_rows
from chatrt.models.decoder import Logits
from chatrt.testing.engine import PAGE_SIZE, tiny_target
from chatrt.testing.tokenizer import tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from chatrt.batch import Batch
    from chatrt.engine import Target
    from chatrt.kvcache import KVCache


class _Clock:
    """Stands still but for what the fake forward takes."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def priced(target: Target, clock: _Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 ms a forward, 2 ms a sequence, 0.5 ms a further row; 0.01 ms a position of context.

    A row takes 0.003 ms more for each position before it.
    """

    def forward(batch: Batch, _kv: object, *, feature_rows: torch.Tensor | None) -> Logits:
        num_rows, num_sequences = batch.num_rows, batch.num_sequences
        assert (feature_rows is not None) == (num_rows > num_sequences)
        context = int(batch.meta.kv_len.sum()) - num_rows
        attended = int(batch.meta.positions.sum())
        ms = 5 + 2 * num_sequences + 0.5 * (num_rows - num_sequences)
        clock.now_ns += round((ms + 0.01 * context + 0.003 * attended) * 1e6)
        return Logits(torch.zeros(1, 1))

    monkeypatch.setattr(target.decoder, "forward", forward)


def test_the_coefficients_are_those_of_the_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, clock = tiny_target(tiny_tokenizer(tmp_path)), _Clock()
    priced(target, clock, monkeypatch)
    costs = measure_costs(target, page_size=PAGE_SIZE, max_context=256, clock=clock)
    assert costs.rows == (1, 2, 4, 8, 16, 32, 64)
    assert costs.rows_ms == pytest.approx([6.5 + 0.5 * count for count in costs.rows])
    assert costs.logits_ms == pytest.approx(1.5)
    assert costs.context_ms == pytest.approx(0.01)
    assert costs.attended_ms == pytest.approx(0.003)
    load = StepLoad()
    load.add_decode(1, 30)
    load.add_decode(1, 50)
    assert costs.step_ms(load) == pytest.approx(5 + 2 * 2 + 0.8 + 0.24)
    load.add_chunk(4, 20)
    expected = 5 + 2 * 3 + 0.5 * 3 + 1.0 + 0.003 * (80 + 20 + 21 + 22 + 23)
    assert costs.step_ms(load) == pytest.approx(expected)


def test_fewer_sequences_than_are_usually_measured_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, clock = tiny_target(tiny_tokenizer(tmp_path)), _Clock()
    device = torch.device("cpu")
    narrow = replace(target, batches=BatchBuilder(64, 3, 16, PAGE_SIZE, device))
    priced(narrow, clock, monkeypatch)
    costs = measure_costs(narrow, page_size=PAGE_SIZE, max_context=256, clock=clock)
    assert costs.logits_ms == pytest.approx(1.5)


def test_a_chunk_that_was_disturbed_does_not_make_longer_ones_look_cheaper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, clock = tiny_target(tiny_tokenizer(tmp_path)), _Clock()
    priced(target, clock, monkeypatch)
    undisturbed = target.decoder.forward

    def forward(batch: Batch, kv: KVCache, *, feature_rows: torch.Tensor | None) -> Logits:
        clock.now_ns += 10_000_000 if batch.num_rows == 8 else 0
        return undisturbed(batch, kv, feature_rows=feature_rows)

    monkeypatch.setattr(target.decoder, "forward", forward)
    costs = measure_costs(target, page_size=PAGE_SIZE, max_context=256, clock=clock)
    assert list(costs.rows_ms) == sorted(costs.rows_ms)


@pytest.mark.parametrize(("max_rows", "most"), [(1, 1), (3, 2), (16, 16)])
def test_chunks_are_measured_up_to_the_rows_of_a_step(
    tmp_path: Path, max_rows: int, most: int
) -> None:
    ticks = itertools.count(0, 1_000)
    target = tiny_target(tiny_tokenizer(tmp_path), max_rows=max_rows)
    costs = measure_costs(target, page_size=PAGE_SIZE, max_context=256, clock=lambda: next(ticks))
    assert costs.rows[-1] == most


def test_a_pool_of_a_single_page_is_measured_too(tmp_path: Path) -> None:
    ticks = itertools.count(0, 1_000_000)
    target = tiny_target(tiny_tokenizer(tmp_path), num_pages=1)
    costs = measure_costs(target, page_size=PAGE_SIZE, max_context=16, clock=lambda: next(ticks))
    assert set(costs.rows_ms) == {1.0}  # each forward took one tick, so nothing grows
    assert (costs.logits_ms, costs.context_ms, costs.attended_ms) == (0.0, 0.0, 0.0)


def _counted(
    target: Target, clock: _Clock, monkeypatch: pytest.MonkeyPatch, ms: Callable[[int, int], float]
) -> list[int]:
    """Rows of all forwards from now on; the n-th of them takes `ms(n, rows)`."""
    seen: list[int] = []

    def forward(batch: Batch, _kv: object, *, feature_rows: torch.Tensor | None) -> Logits:
        assert (feature_rows is not None) == (batch.num_rows > 1)
        seen.append(batch.num_rows)
        assert len(batch.logit_ranges) == batch.num_sequences == 1
        assert len(batch.logit_ranges[0]) == batch.num_rows
        clock.now_ns += int(ms(len(seen), batch.num_rows) * 1e6)
        return Logits(torch.zeros(1, 1))

    monkeypatch.setattr(target.decoder, "forward", forward)
    return seen


def test_passes_of_one_sequence_are_measured_by_their_rows_each_behind_a_single_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, clock = tiny_target(tiny_tokenizer(tmp_path)), _Clock()
    seen = _counted(target, clock, monkeypatch, lambda _n, rows: 2 + 0.25 * rows)
    measured = measure_rows(target, page_size=PAGE_SIZE, max_context=256, clock=clock)
    rows = [1, 2, 3, 4, 5, 6, 8, 16]
    assert [count for count, _ in measured] == rows
    assert [ms for _, ms in measured] == pytest.approx([2 + 0.25 * count for count in rows])
    assert seen[::2] == [1] * (len(seen) // 2)
    assert seen[1::2] == rows * 5


def test_a_disturbance_of_a_whole_round_or_of_one_number_of_rows_is_not_the_passes_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, clock = tiny_target(tiny_tokenizer(tmp_path)), _Clock()

    def ms(n: int, rows: int) -> float:
        return 2 + 0.25 * rows + (5 if n <= 16 else 0) + (4 if rows == 5 else 0)

    _counted(target, clock, monkeypatch, ms)
    measured = dict(measure_rows(target, page_size=PAGE_SIZE, max_context=256, clock=clock))
    assert measured[1] == pytest.approx(2.25)
    assert measured[5] == measured[6] == pytest.approx(3.5)


@pytest.mark.parametrize(("step_ms", "num_rounds"), [(1.0, 5), (5.0, 3), (15.0, 2), (50.0, 1)])
def test_a_slower_model_is_measured_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_ms: float, num_rounds: int
) -> None:
    target, clock = tiny_target(tiny_tokenizer(tmp_path)), _Clock()
    seen = _counted(target, clock, monkeypatch, lambda _n, _rows: step_ms)
    measure_rows(target, page_size=PAGE_SIZE, max_context=256, clock=clock)
    assert len(seen) == 16 * num_rounds
    assert clock.now_ns <= max(2 * 0.25e9, 16 * step_ms * 1e6)


@pytest.mark.parametrize(
    ("max_rows", "num_pages", "max_context", "most"),
    [(7, 64, 256, 6), (64, 1, 256, 16), (64, 64, 3, 3)],
)
def test_rows_are_measured_up_to_what_batches_pages_and_context_hold(
    tmp_path: Path, max_rows: int, num_pages: int, max_context: int, most: int
) -> None:
    ticks = itertools.count(0, 1_000)
    target = tiny_target(tiny_tokenizer(tmp_path), num_pages=num_pages, max_rows=max_rows)
    measured = measure_rows(
        target, page_size=PAGE_SIZE, max_context=max_context, clock=lambda: next(ticks)
    )
    assert [count for count, _ in measured][-1] == most
    assert [ms for _, ms in measured] == pytest.approx([0.001] * len(measured))
