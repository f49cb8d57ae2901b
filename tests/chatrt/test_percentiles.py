"""Nearest-rank percentiles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatrt.percentiles import percentile


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2.0), (0.75, 3.0), (0.99, 4.0), (0.0, 1.0)])
def test_percentiles_are_values_that_were_measured(share: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], share) == expected


def test_nothing_measured_has_no_percentile() -> None:
    assert percentile([], 0.5) is None


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_at_least_that_share_does_not_exceed_it(values: list[float], share: float) -> None:
    found = percentile(sorted(values), share)
    assert found is not None
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
