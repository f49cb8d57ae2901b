"""How the next turns are to be answered: what a person can set in mid-chat.

Knows: names, how each is written and read, which differ from what the server would take.
Does not know: widgets; ranges, which `SamplingParams` has.
Invariant: what is None or the default is not sent, so that the model's own recommendation holds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from chatrt.errors import InvalidValue
from chatrt.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Field:
    """A number that can be set: what people call it, and what it does."""

    name: str
    label: str
    kind: type[int] | type[float]
    hint: str


NUMBERS = (
    Field("temperature", "Temperature", float, "0 is the likeliest word, up to 2"),
    Field("top_p", "Top-p", float, "above 0, up to 1"),
    Field("top_k", "Top-k", int, "0 is off"),
    Field("min_p", "Min-p", float, "0 is off, up to 1"),
    Field("max_output_tokens", "Max tokens", int, "longest answer"),
    Field("seed", "Seed", int, "drawn for each turn if empty"),
)
_SHORT = {"max_output_tokens": "max"}


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """None leaves a number to the model; `speculation` False drafts nothing."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_output_tokens: int | None = None
    seed: int | None = None
    system: str = ""
    speculation: bool = True

    def sampling(self) -> dict[str, Any]:
        """The numbers that are set."""
        named = {field.name: getattr(self, field.name) for field in NUMBERS}
        return {name: value for name, value in named.items() if value is not None}

    def options(self) -> dict[str, Any]:
        """What travels in the `chatrt` object besides."""
        return {} if self.speculation else {"speculation": {"enabled": False}}

    def summary(self) -> str:
        """What is set, in a few words; empty where nothing is."""
        parts = [
            f"{_SHORT.get(name, name).replace('_', '-')} {value:g}"
            if isinstance(value, float)
            else f"{_SHORT.get(name, name).replace('_', '-')} {value}"
            for name, value in self.sampling().items()
        ]
        parts += ["system prompt"] if self.system else []
        parts += [] if self.speculation else ["no drafts"]
        return " · ".join(parts)

    def with_number(self, name: str, text: str) -> TurnSettings:
        """These settings with a number as a person writes it; nothing unsets it.

        Raises:
            InvalidValue: It is no such number, or out of its range; the sentence names the range.
        """
        value: Any = read_number(name, text)
        return replace(self, **{name: value})

    def changed(self, other: TurnSettings) -> list[str]:
        """The names of what differs in `other`."""
        names = [one.name for one in fields(self)]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def read_number(name: str, text: str) -> float | int | None:
    """The number that `text` writes; None for an empty text.

    Raises:
        InvalidValue: As `TurnSettings.with_number`.
    """
    field = next(one for one in NUMBERS if one.name == name)
    bare = text.strip()
    if not bare:
        return None
    try:
        value = field.kind(bare)
    except ValueError:
        kind = "a whole number" if field.kind is int else "a number"
        raise InvalidValue(f"{bare[:20]!r} is not {kind}", param=name) from None
    numbers: dict[str, Any] = {name: value}
    SamplingParams(**numbers)
    return value
