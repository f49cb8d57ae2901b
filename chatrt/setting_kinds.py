"""Kinds of settings: how a text, a TOML value or a flag becomes a checked value.

Knows: what each kind reads and the sentence that says what it allows.
Does not know: any one setting, nor where a value was written. Invariant: a reader either returns
an allowed value or raises ValueError (OverflowError for a number beyond a float).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 1 << (10 * power) for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}b": 10 ** (3 * power) for power, prefix in enumerate("kmgt", start=1)},
}
_DURATION_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: `read` makes its value of what was written and raises ValueError if it cannot.

    `allowed` ends the sentence "it must be …", `doc` says what the setting is for.
    """

    read: Callable[[object], object]
    allowed: str
    doc: str


def text(doc: str) -> Setting:
    """A text that is not empty."""

    def read(value: object) -> str:
        if not isinstance(value, str | Path) or not str(value).strip():
            raise ValueError
        return str(value)

    return Setting(read, "a text that is not empty", doc)


def file(doc: str) -> Setting:
    """The path of a file; `~` is expanded, and the file need not exist."""

    def read(value: object) -> Path:
        if not isinstance(value, str | Path) or not str(value).strip():
            raise ValueError
        return Path(value).expanduser()

    return Setting(read, "the path of a file", doc)


def flag(doc: str) -> Setting:
    """True or false, also in the words of a variable (1, yes, on, …)."""
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}

    def read(value: object) -> bool:
        if isinstance(value, bool):
            return value
        try:
            return words[str(value).strip().lower()]
        except KeyError as error:
            raise ValueError from error

    return Setting(read, "true or false", doc)


def whole(low: int, high: int | None, doc: str) -> Setting:
    """A whole number of `low` to `high`, both included; no upper bound where `high` is None."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        number = int(value)
        if number < low or (high is not None and number > high):
            raise ValueError
        return number

    span = f"of at least {low}" if high is None else f"from {low} to {high}"
    return Setting(read, f"a whole number {span}", doc)


def _real(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def above_zero(doc: str, high: float = math.inf) -> Setting:
    """A finite number above 0 and at most `high`."""

    def read(value: object) -> float:
        number = _real(value)
        if not 0.0 < number <= high:
            raise ValueError
        return number

    span = "" if high == math.inf else f" and at most {high:g}"
    return Setting(read, f"a number above 0{span}", doc)


def one_of(*choices: str, doc: str) -> Setting:
    """One of some words, in any case."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in choices:
            raise ValueError
        return value.lower()

    return Setting(read, "one of " + ", ".join(choices), doc)


def _quantity(value: object, units: Mapping[str, float]) -> float:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].lower() not in units:
            raise ValueError
        return float(match[1]) * units[match[2].lower()]
    number = _real(value)
    if number < 0:
        raise ValueError
    return number


def size(doc: str, low: int = 1) -> Setting:
    """A number of bytes, at least `low` (0 or 1), with units of 1024 (KiB) or 1000 (kB)."""

    def read(value: object) -> int:
        num_bytes = int(_quantity(value, _SIZE_UNITS))
        if num_bytes < low:
            raise ValueError
        return num_bytes

    span = "above 0" if low else "of 0 or more"
    return Setting(read, f'a size in bytes {span}, such as 1048576, "512MiB" or "4GiB"', doc)


def duration(doc: str) -> Setting:
    """Seconds, 0 or more; texts may carry a unit."""

    def read(value: object) -> float:
        return _quantity(value, _DURATION_UNITS)

    return Setting(read, 'a duration in seconds, such as 90, "500ms", "90s", "30m" or "2h"', doc)


def names(doc: str) -> Setting:
    """A list of texts; one text is split at commas."""

    def read(value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            value = value.split(",")
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise ValueError
        return tuple(one.strip() for one in value if one.strip())

    return Setting(read, "a list of texts (in a variable: separated by commas)", doc)
