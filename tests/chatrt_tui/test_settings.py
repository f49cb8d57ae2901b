from __future__ import annotations

import pytest

from chatrt.errors import InvalidValue
from chatrt_tui.settings import TurnSettings, read_number


def test_what_is_not_set_is_not_sent() -> None:
    assert TurnSettings().sampling() == {}
    assert TurnSettings().options() == {}
    assert TurnSettings().summary() == ""


def test_what_is_set_is_sent_and_told() -> None:
    settings = TurnSettings(
        temperature=0.0, top_k=40, max_output_tokens=100, system="be brief", speculation=False
    )
    assert settings.sampling() == {"temperature": 0.0, "top_k": 40, "max_output_tokens": 100}
    assert settings.options() == {"speculation": {"enabled": False}}
    assert settings.summary() == "temperature 0 · top-k 40 · max 100 · system prompt · no drafts"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.7", 0.7),
        ("temperature", " 2 ", 2.0),
        ("temperature", "", None),
        ("top_k", "40", 40),
        ("seed", "9223372036854775807", 2**63 - 1),
    ],
)
def test_a_number_is_read_as_a_person_writes_it(name: str, text: str, value: float | None) -> None:
    assert read_number(name, text) == value
    assert getattr(TurnSettings().with_number(name, text), name) == value


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("temperature", "3", r"temperature is 3.0, it must be in \[0.0, 2.0\]"),
        ("temperature", "nan", "temperature is nan"),
        ("temperature", "warm", "'warm' is not a number"),
        ("top_p", "0", r"it must be in \(0.0, 1.0\]"),
        ("top_k", "1.5", "'1.5' is not a whole number"),
        ("top_k", "-1", "top_k is -1"),
        ("min_p", "1.1", "min_p is 1.1"),
        ("max_output_tokens", "0", "max_output_tokens is 0"),
        ("seed", "-4", "seed is -4"),
    ],
)
def test_a_wrong_number_is_told_with_its_range(name: str, text: str, told: str) -> None:
    with pytest.raises(InvalidValue, match=told):
        read_number(name, text)
