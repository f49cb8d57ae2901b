"""Tests of chatrt.gap_budget: what a step may take, and how predictions follow what it took."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatrt.cost_model import LinearCostModel, StepLoad
from chatrt.gap_budget import GapBudget, Pace

STEP_MS = LinearCostModel(fixed_ms=4.0, decode_row_ms=1.0, prefill_row_ms=1.0)
DECODES = StepLoad(decode_rows=2)


def test_a_machine_that_became_half_as_fast_is_believed_within_four_steps() -> None:
    pace = Pace()
    for _ in range(4):
        pace.observe(2.0, is_full=True)
    assert pace.factor == pytest.approx(2.0, rel=0.15)


def test_a_machine_that_is_fast_again_is_believed_slowly() -> None:
    pace = Pace()
    for _ in range(10):
        pace.observe(2.0, is_full=True)
    for _ in range(10):
        pace.observe(1.0, is_full=True)
    assert pace.factor > 1.4
    for _ in range(50):
        pace.observe(1.0, is_full=True)
    assert pace.factor == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("odd", [0.0, 0.1, 3.0, 1e9])
def test_a_single_odd_step_changes_no_prediction(odd: float) -> None:
    pace = Pace()
    for ratio in (1.0, 1.0, odd, 1.0, 1.0):
        pace.observe(ratio, is_full=True)
    assert pace.factor == 1.0
    assert pace.margin <= 1.2


@pytest.mark.parametrize("spread", [0.02, 0.06, 0.12])
def test_the_margin_covers_nearly_all_steps_and_not_more(spread: float) -> None:
    pace, chance = Pace(), Random(0)
    num_over = 0
    for step in range(8000):
        ratio = chance.lognormvariate(0.0, spread)
        if step >= 2000:
            num_over += ratio > pace.factor * pace.margin
        pace.observe(ratio, is_full=True)
    assert num_over / 6000 <= 0.008
    if spread > 0.02:  # below, the least margin is more than is needed
        assert num_over / 6000 >= 0.001


def test_what_no_margin_can_cover_does_not_raise_it() -> None:
    pace = Pace()
    for _ in range(300):
        for ratio in (1.0, 1.0, 5.0, 1.0):
            pace.observe(ratio, is_full=True)
    assert pace.margin == pytest.approx(1.2 - 900 * 0.03 / 250, abs=0.01)


def test_steps_that_no_budget_bounded_say_nothing_about_the_margin() -> None:
    pace = Pace()
    for _ in range(300):
        pace.observe(1.0, is_full=False)
    assert pace.margin == 1.2


@given(st.lists(st.floats(0.0, 1e6), max_size=200))
def test_factor_and_margin_stay_within_bounds_whatever_is_measured(ratios: list[float]) -> None:
    pace = Pace()
    for ratio in ratios:
        pace.observe(ratio, is_full=True)
    assert 1 / 16 <= pace.factor <= 16
    assert 1.05 <= pace.margin <= 1.4


def test_a_model_that_predicts_nothing_is_left_alone() -> None:
    budget = GapBudget(LinearCostModel(0.0, 0.0, 0.0), 20.0)
    budget.observe(DECODES, 5.0)
    assert budget.pace.factor == 1.0
    assert budget.rows_within(DECODES, 0, 500, budget.prompt_ms(DECODES, 0)) == 500


def test_predictions_follow_what_steps_took() -> None:
    budget = GapBudget(STEP_MS, 20.0)
    for _ in range(20):
        budget.observe(DECODES, 9.0)
    assert budget.step_ms(DECODES) == pytest.approx(9.0, rel=0.15)


def test_without_a_limit_a_prompt_may_hold_streams_up() -> None:
    budget = GapBudget(STEP_MS, None)
    assert budget.prompt_ms(DECODES, 0) is None
    assert budget.drafting_ms() is None
    assert budget.rows_within(DECODES, 0, 500, None) == 500
    assert budget.ahead_ms(DECODES, 0) == pytest.approx(1.25 * 6.0)


def test_the_margin_is_kept_from_a_streams_budget() -> None:
    budget = GapBudget(STEP_MS, 24.0)
    assert budget.prompt_ms(DECODES, 0) == pytest.approx(20.0)
    assert budget.drafting_ms() == pytest.approx(8.0)


def test_decodes_that_use_the_budget_up_may_be_stretched_by_half() -> None:
    assert GapBudget(STEP_MS, 5.0).prompt_ms(DECODES, 0) == pytest.approx(9.0)


@given(most=st.integers(1, 600), limit_ms=st.floats(0.0, 700.0), start=st.integers(0, 100))
def test_the_longest_chunk_that_fits_is_found(most: int, limit_ms: float, start: int) -> None:
    costs = LinearCostModel(4.0, 1.0, 1.0, context_ms=0.1)
    found = GapBudget(costs, None).rows_within(DECODES, start, most, limit_ms)
    fitting = [
        rows
        for rows in range(1, most + 1)
        if costs.step_ms(DECODES.with_chunk(rows, start)) <= limit_ms
    ]
    assert found == (fitting[-1] if fitting else 0)
