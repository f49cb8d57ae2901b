from __future__ import annotations

from random import Random

import pytest

from chatrt.bench.lengths import Length, Lognormal
from chatrt.errors import InvalidValue


@pytest.mark.parametrize(
    ("text", "expected"), [("64", Length(64, 64)), ("32-128", Length(32, 128)), ("1", Length(1, 1))]
)
def test_a_length_is_a_number_or_a_range(text: str, expected: Length) -> None:
    assert Length.parse(text, param="--input-tokens") == expected


@pytest.mark.parametrize("text", ["", "x", "3-", "-3", "0", "9-3", "1.5"])
def test_what_is_no_length_is_refused_with_its_name_and_value(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"^--input-tokens is "):
        Length.parse(text, param="--input-tokens")


def test_a_range_includes_both_its_ends() -> None:
    random = Random(0)
    assert {Length(2, 4).draw(random) for _ in range(100)} == {2, 3, 4}


def test_a_median_and_a_sigma_are_lognormal() -> None:
    length = Length.parse("48~0.5", param="-n")
    assert length == Lognormal(11, 215, 48, 0.5)
    drawn = sorted(length.draw(random) for random in [Random(0)] for _ in range(2001))
    assert abs(drawn[1000] - 48) <= 3
    # e^0.5 is 1.65: two thirds lie within the median divided and multiplied by it
    within = sum(48 / 1.65 <= each <= 48 * 1.65 for each in drawn) / len(drawn)
    assert 0.64 < within < 0.73


def test_a_lognormal_number_stays_within_three_sigma() -> None:
    random, wide = Random(0), Length.parse("4~2", param="-n")
    drawn = {wide.draw(random) for _ in range(5000)}
    assert (wide.least, wide.most) == (1, 1614)
    assert min(drawn) == 1
    assert 1000 < max(drawn) <= 1614


def test_a_lognormal_number_is_never_below_what_makes_sense() -> None:
    assert Length.parse("3~1", param="--think-ms", at_least=0).least == 0
    assert Length.parse("3~1", param="-n").least == 1


@pytest.mark.parametrize("text", ["48~0", "48~2.1", "0~0.5", "48~", "~0.5", "48~-1", "4-8~1"])
def test_what_cannot_be_lognormal_is_refused_with_its_value(text: str) -> None:
    with pytest.raises(InvalidValue, match=rf"^--think-ms is '{text}', it"):
        Length.parse(text, param="--think-ms", at_least=0)


@pytest.mark.parametrize("text", ["64", "32-128", "48~0.5"])
def test_a_length_reads_as_it_was_written(text: str) -> None:
    assert str(Length.parse(text, param="-n")) == text
