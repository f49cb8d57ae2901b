"""Times that follow what is measured: slowly, in order, each part by its own evidence."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatrt.step_times import DraftCost, StepCosts, StepTimes, further_draft_ms

COSTS = StepCosts(((1, 4.0), (5, 5.0), (8, 6.5)), {"head": DraftCost(0.1, 0.2, 0.05)})


def test_a_pass_is_linear_between_what_was_measured_and_by_the_last_slope_behind_it() -> None:
    for rows, ms in [(0, 4.0), (1, 4.0), (3, 4.5), (5, 5.0), (6, 5.5), (8, 6.5), (10, 7.5)]:
        assert COSTS.pass_ms(rows) == pytest.approx(ms)
        assert StepTimes(COSTS).pass_ms(rows) == pytest.approx(ms)


def test_a_single_measurement_holds_for_any_number_of_rows() -> None:
    costs = StepCosts(((1, 4.0),), {})
    assert costs.pass_ms(7) == StepTimes(costs).pass_ms(7) == 4.0


def test_a_table_that_falls_somewhere_is_put_in_order() -> None:
    times = StepTimes(StepCosts(((1, 4.0), (2, 3.0), (4, 5.0)), {}))
    assert times.up_to(4)[:5] == [4.0, 4.0, 4.0, 4.5, 5.0]


def test_a_machine_that_slows_down_is_followed_at_all_rows() -> None:
    times = StepTimes(COSTS)
    for _ in range(400):
        times.observe_pass(1, 8.0)
    assert times.pass_ms(1) == pytest.approx(8.0, rel=0.01)
    assert times.pass_ms(8) > 10.0


def test_wrong_proportions_are_put_right_by_passes_of_different_rows() -> None:
    times, chance = StepTimes(COSTS), random.Random(0)
    for _ in range(1500):
        for rows, ms in [(1, 4.0), (5, 8.0)]:
            times.observe_pass(rows, ms * chance.uniform(0.95, 1.05))
    assert times.pass_ms(1) == pytest.approx(4.0, rel=0.05)
    assert times.pass_ms(5) == pytest.approx(8.0, rel=0.05)


def test_parts_of_a_draft_are_told_apart_by_proposals_of_different_lengths() -> None:
    times, chance = StepTimes(COSTS), random.Random(0)
    for _ in range(3000):
        num_steps, num_sessions = chance.randint(1, 6), chance.randint(1, 4)
        ms = 0.3 + num_steps * (0.12 + 0.04 * (num_sessions - 1))
        times.observe_drafts("head", num_steps=num_steps, num_sessions=num_sessions, time_ms=ms)
    cost = times.drafts["head"]
    assert cost.fixed_ms == pytest.approx(0.3, rel=0.05)
    assert cost.step_ms == pytest.approx(0.12, rel=0.05)
    assert cost.row_ms == pytest.approx(0.04, rel=0.05)


def test_a_free_draft_stays_free_and_an_unknown_source_unknown() -> None:
    times = StepTimes(StepCosts(((1, 4.0),), {"free": DraftCost(0.0, 0.0, 0.0)}))
    for source in ("free", "unheard-of"):
        times.observe_drafts(source, num_steps=3, num_sessions=2, time_ms=1.0)
    assert times.drafts == {"free": DraftCost(0.0, 0.0, 0.0)}


def test_further_drafts_cost_a_step_where_the_chain_grows_and_a_row_beside_another() -> None:
    cost = COSTS.drafts["head"]
    assert further_draft_ms(cost, 1, 0) == pytest.approx(0.3)
    assert further_draft_ms(cost, 3, 2) == 0.2
    assert further_draft_ms(cost, 2, 2) == 0.05


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 1e6)), max_size=100))
def test_more_rows_never_take_less_and_no_measurement_moves_a_time_by_1_percent(
    passes: list[tuple[int, float]],
) -> None:
    times = StepTimes(COSTS)
    for rows, ms in passes:
        before = times.pass_ms(rows)
        times.observe_pass(rows, ms)
        by_rows = times.up_to(40)
        assert by_rows == sorted(by_rows)
        assert abs(times.pass_ms(rows) / before - 1) < 0.01
