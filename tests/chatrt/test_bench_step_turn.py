"""The overhead of a step: what a real turn takes beside its forwards."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from chatrt.bench.step_turn import SAMPLINGS, turn_overhead_ms
from chatrt.errors import OutOfPages
from chatrt.testing.engine import run_turn, tiny_engine, turn_request
from chatrt.testing.tokenizer import tiny_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.params import SamplingParams


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_the_overhead_is_a_step_without_its_forward(
    sampling: SamplingParams, tmp_path: Path
) -> None:
    engine = tiny_engine(tiny_tokenizer(tmp_path))
    target = engine._target
    forward, ticks = target.decoder.forward, itertools.count(0, 1_000_000)
    # two readings around the step, two around the forward: 3 ms in all, 1 of them the forward's
    overheads_ms = turn_overhead_ms(
        engine, target, sampling, num_steps=6, max_context=256, clock=lambda: next(ticks)
    )
    assert overheads_ms == [2.0] * 6
    assert target.decoder.forward == forward
    # forgotten: the id is free again, and nothing holds a page
    assert run_turn(engine, turn_request("bench-step", [1, 2])).error is None


def test_a_context_that_ends_early_gives_fewer_steps(tmp_path: Path) -> None:
    engine = tiny_engine(tiny_tokenizer(tmp_path), max_context=20)
    target, greedy = engine._target, SAMPLINGS["greedy"]
    overheads_ms = turn_overhead_ms(engine, target, greedy, num_steps=50, max_context=20)
    assert len(overheads_ms) == 20 - 10 - 1 - 3 - 1


def test_a_turn_that_fails_says_why(tmp_path: Path) -> None:
    engine = tiny_engine(tiny_tokenizer(tmp_path), num_pages=1)
    with pytest.raises(OutOfPages):
        turn_overhead_ms(engine, engine._target, SAMPLINGS["greedy"], num_steps=50, max_context=256)
