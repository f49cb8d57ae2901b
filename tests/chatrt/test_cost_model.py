"""Tests of chatrt.cost_model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatrt.cost_model import ForwardCosts, LinearCostModel, StepLoad, looked_back_at

COSTS = ForwardCosts(
    rows=(1, 4, 8), rows_ms=(4.0, 4.0, 6.0), logits_ms=0.5, context_ms=0.01, attended_ms=0.002
)


def load_of(*, decode: int = 0, prefill: int = 0, start: int = 0) -> StepLoad:
    load = StepLoad()
    if decode:
        load.add_decode(decode, start)
    if prefill:
        load.add_chunk(prefill, start)
    return load


def test_each_row_looks_back_at_all_before_it() -> None:
    assert looked_back_at(1, 0) == 0
    assert looked_back_at(3, 10) == 10 + 11 + 12


@pytest.mark.parametrize(
    ("num_rows", "ms"), [(0, 4.0), (1, 4.0), (3, 4.0), (6, 5.0), (8, 6.0), (20, 12.0)]
)
def test_rows_cost_what_the_line_between_their_neighbours_says(num_rows: int, ms: float) -> None:
    load = StepLoad(prefill_rows=num_rows)
    assert COSTS.step_ms(load) == pytest.approx(ms)


def test_a_single_measured_number_of_rows_is_all_that_is_known() -> None:
    costs = ForwardCosts((1,), (4.0,), 0.0, 0.0, 0.0)
    assert costs.step_ms(StepLoad(prefill_rows=9)) == 4.0


def test_logits_of_one_row_are_in_the_rows_and_further_ones_are_added() -> None:
    assert COSTS.step_ms(StepLoad(decode_rows=1)) == 4.0
    assert COSTS.step_ms(StepLoad(decode_rows=3)) == 5.0
    assert COSTS.step_ms(StepLoad(decode_rows=3, prefill_rows=1)) == 5.5


def test_context_is_read_once_and_attended_to_by_each_row() -> None:
    assert COSTS.step_ms(load_of(prefill=2, start=100)) == pytest.approx(4 + 1 + 0.002 * 201)


def test_a_load_with_a_chunk_leaves_the_load_as_it_was() -> None:
    load = load_of(decode=2, start=5)
    both = load_of(decode=2, start=5)
    both.add_chunk(3, 7)
    assert load.with_chunk(3, 7) == both
    assert load == load_of(decode=2, start=5)


def test_the_coefficients_are_told_in_words() -> None:
    assert "4: 4.0 ms" in COSTS.describe()


@given(
    costs=st.sampled_from([COSTS, LinearCostModel(1.0, 0.2, 0.1, 0.001)]),
    parts=st.tuples(*[st.integers(0, 600)] * 4),
    more=st.tuples(*[st.integers(0, 50)] * 4),
)
def test_more_of_anything_never_takes_less(
    costs: ForwardCosts | LinearCostModel,
    parts: tuple[int, int, int, int],
    more: tuple[int, int, int, int],
) -> None:
    grown = (a + b for a, b in zip(parts, more, strict=True))
    assert costs.step_ms(StepLoad(*grown)) >= costs.step_ms(StepLoad(*parts)) - 1e-9
