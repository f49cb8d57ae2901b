"""A turn's stamps: the stages of TTFT are consecutive and add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatrt.prefix import num_common_tokens
from chatrt.turn import SpeculationFigures, Stamps


@given(st.lists(st.integers(1, 10**12), min_size=8, max_size=8))
def test_the_stages_add_up_to_ttft_with_nothing_left_over(values: list[int]) -> None:
    stamps = Stamps(*sorted(values))
    ttft_ms = (stamps.sent_ns - stamps.received_ns) / 1e6
    assert sum(stamps.stages_ms().values()) == pytest.approx(ttft_ms, abs=1e-6)


def test_a_stage_that_was_not_reached_is_zero() -> None:
    stages = Stamps(received_ns=10, tokenized_ns=2_000_010).stages_ms()
    assert stages["tokenize_ms"] == 2.0
    assert set(stages.values()) == {2.0, 0.0}


def test_mean_accepted_length_counts_the_bonus_token() -> None:
    assert (
        SpeculationFigures(steps=4, drafted=8, accepted=6, emitted=10).mean_accepted_length == 2.5
    )
    assert SpeculationFigures().mean_accepted_length == 0.0


ids = st.lists(st.integers(0, 2), max_size=8)


@given(a=ids, b=ids)
def test_a_common_prefix_is_common_and_the_longest(a: list[int], b: list[int]) -> None:
    length = num_common_tokens(a, b)
    assert a[:length] == b[:length]
    assert length in (len(a), len(b)) or a[length] != b[length]
