"""Tests of chatrt.params: each number's range, and the sentence that names it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from chatrt.errors import InvalidValue
from chatrt.params import MAX_STOP_STRINGS, SamplingParams

ENDS: dict[str, tuple[float, ...]] = {
    "temperature": (0.0, 2.0),
    "top_k": (0, 2**31 - 1),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (0, 2**63 - 1),
    "max_output_tokens": (1, 2**31 - 1),
    "top_logprobs": (0, 20),
}


def params(name: str, value: object) -> SamplingParams:
    given: dict[str, Any] = {name: value}
    return SamplingParams(**given)


@pytest.mark.parametrize(("name", "ends"), ENDS.items())
def test_both_ends_of_a_range_are_allowed(name: str, ends: tuple[float, ...]) -> None:
    for end in ends:
        assert getattr(params(name, end), name) == end


@pytest.mark.parametrize(
    ("name", "value", "span"),
    [
        ("temperature", 2.1, "[0.0, 2.0]"),
        ("top_k", -1, "[0, 2147483647]"),
        ("top_p", 0.0, "(0.0, 1.0]"),
        ("min_p", 1.5, "[0.0, 1.0]"),
        ("repetition_penalty", 0.0, "(0.0, 10.0]"),
        ("presence_penalty", -2.5, "[-2.0, 2.0]"),
        ("frequency_penalty", 3.0, "[-2.0, 2.0]"),
        ("seed", -1, "[0, 9223372036854775807]"),
        ("max_output_tokens", 0, "[1, 2147483647]"),
        ("top_logprobs", 21, "[0, 20]"),
    ],
)
def test_a_number_out_of_range_is_named_with_its_range(name: str, value: float, span: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        params(name, value)
    assert caught.value.message == f"{name} is {value}, it must be in {span}"
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidValue, match=name):
        params(name, value)


def test_every_bias_is_checked() -> None:
    assert params("logit_bias", {1: -100.0, 2: 100.0}).logit_bias[2] == 100.0
    with pytest.raises(InvalidValue, match=r"logit_bias is 100\.5"):
        params("logit_bias", {1: 0.0, 2: 100.5})


def test_stop_strings_are_few_and_not_empty() -> None:
    assert len(params("stop", ("x",) * MAX_STOP_STRINGS).stop) == MAX_STOP_STRINGS
    with pytest.raises(InvalidValue, match=f"17 strings, at most {MAX_STOP_STRINGS}"):
        params("stop", ("x",) * (MAX_STOP_STRINGS + 1))
    with pytest.raises(InvalidValue, match="empty string"):
        params("stop", ("x", ""))


def test_the_defaults_filter_nothing_and_only_temperature_zero_is_greedy() -> None:
    off = SamplingParams()
    assert (off.top_k, off.top_p, off.min_p, off.repetition_penalty) == (0, 1.0, 0.0, 1.0)
    assert not off.greedy
    assert params("temperature", 0.0).greedy
