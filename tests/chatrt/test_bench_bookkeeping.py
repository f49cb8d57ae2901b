"""Tests of chatrt.bench.bookkeeping: the bars of the design, with room for a busy machine."""

from __future__ import annotations

import itertools
import os

import pytest

from chatrt.bench.bookkeeping import BookkeepingFigures, measure


@pytest.mark.parametrize(("num_sessions", "bar_us"), [(1, 100.0), (64, 1000.0)])
def test_the_bookkeeping_of_a_step_stays_under_its_bar(num_sessions: int, bar_us: float) -> None:
    scale = float(os.environ.get("CHATRT_TEST_TIME_SCALE", "1"))
    assert measure(num_sessions, steps=60).total_us <= bar_us * scale


def test_the_figures_are_medians_of_the_clock_that_is_passed() -> None:
    ticks = itertools.count(step=2000)
    figures = measure(2, steps=5, clock_ns=lambda: next(ticks))
    assert figures == BookkeepingFigures(plan_us=2.0, commit_us=2.0, total_us=4.0)
