"""User turns that conversations of the training data open with: written by hand, or filled in.

Knows: fixed turns, templates with slots, lists of fillers, remarks around a request.
Does not know: chat templates, tokens, models.
Invariant: what is drawn depends on the caller's generator and on the data files alone.
Cost: some microseconds for each turn.

A slot is `{list}`, an entry of that filler list, or `{number:2..999}`, a number of that range with
both ends. A list that occurs several times in a template gives different entries. Fillers stand as
they are: braces in them are text.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence
    from importlib.resources.abc import Traversable

_SLOT = re.compile(r"\{([^{}]*)\}")
_NUMBER = re.compile(r"number:(\d+)\.\.(\d+)")

_INSTRUCTION_SHARE = 0.12
_OPENER_SHARE = 0.08
_CLOSER_SHARE = 0.12
_LOWER_CASE_SHARE = 0.08
_MIN_REMARK_CHARS = 20  # "hi. Keep it short." helps nobody
_MAX_REMARK_CHARS = 200  # behind a pasted passage a remark would read as part of it
_MAX_COUNTED_TURNS = 4096  # from here on, more combinations make a template no more frequent


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where one value comes from: a filler list, or the numbers of [low, high]."""

    entries: Sequence[str] = ()
    low: int = 0
    high: int = 0

    @property
    def num_values(self) -> int:
        return len(self.entries) or self.high - self.low + 1


class _Template:
    """A text with slots, checked once.

    Raises:
        InvalidValue: A slot has no filler list, or more places than entries, or an empty range.
    """

    def __init__(self, text: str, fillers: Mapping[str, Sequence[str]]) -> None:
        pieces = _SLOT.split(text)
        self._texts = pieces[::2]
        self._slots = [_parse_slot(name, text, fillers) for name in pieces[1::2]]
        for name, places in Counter(pieces[1::2]).items():
            if places > len(fillers.get(name, range(places))):
                message = f"{places} places for the {len(fillers[name])} entries of {{{name}}}"
                raise InvalidValue(f"{message} in the template {text!r}")

    @property
    def num_turns(self) -> int:
        """How many different turns it makes, about."""
        return math.prod(slot.num_values for slot in self._slots)

    def fill(self, rng: random.Random) -> str:
        """The text with a value in each slot; a value that opens it gets a capital letter."""
        text = "".join(self._pieces(rng))
        return text if self._texts[0] else text[:1].upper() + text[1:]

    def _pieces(self, rng: random.Random) -> Iterator[str]:
        used: set[str] = set()
        yield self._texts[0]
        for slot, text in zip(self._slots, self._texts[1:], strict=True):
            if slot.entries:
                value = rng.choice([entry for entry in slot.entries if entry not in used])
                used.add(value)
                yield value
            else:
                yield str(rng.randint(slot.low, slot.high))
            yield text


class SeedTurns:
    """Draws user turns, second turns and system messages.

    `folder` holds `instructions.json`, `templates.json` (`templates` and `fillers`),
    `follow_ups.json`, `systems.json` and `remarks.json` (`openers` and `closers`: what people put
    before and behind a request); the bundled ones without it.

    Raises:
        InvalidValue: A template cannot be filled; the message names the slot and the template.
    """

    def __init__(self, folder: Traversable | None = None) -> None:
        folder = folder or resources.files("chatrt_drafts.training") / "data"
        data = _read(folder, "templates.json")
        fillers = data["fillers"]
        self._instructions: list[str] = _read(folder, "instructions.json")
        self._templates = [_Template(text, fillers) for text in data["templates"]]
        self._follow_ups = [_Template(text, fillers) for text in _read(folder, "follow_ups.json")]
        self._systems: list[str] = _read(folder, "systems.json")
        remarks = _read(folder, "remarks.json")
        self._openers: list[str] = remarks["openers"]
        self._closers: list[str] = remarks["closers"]
        # A template of 50 turns would soon repeat itself if it came as often as one of millions.
        weights = (min(each.num_turns, _MAX_COUNTED_TURNS) ** 0.5 for each in self._templates)
        self._cumulative_weights = list(accumulate(weights))

    def draw(self, rng: random.Random) -> str:
        """A user turn that opens a conversation."""
        if rng.random() < _INSTRUCTION_SHARE:
            text = rng.choice(self._instructions)
        else:
            weights = self._cumulative_weights
            text = rng.choices(self._templates, cum_weights=weights)[0].fill(rng)
        return self._vary(text, rng)

    def draw_follow_up(self, rng: random.Random) -> str:
        """A user turn that makes sense behind most answers."""
        return rng.choice(self._follow_ups).fill(rng)

    def draw_system(self, rng: random.Random) -> str:
        """A system message."""
        return rng.choice(self._systems)

    def _vary(self, text: str, rng: random.Random) -> str:
        """The same turn as somebody else would type it; most often unchanged."""
        short = "\n" not in text and _MIN_REMARK_CHARS <= len(text) <= _MAX_REMARK_CHARS
        if short and rng.random() < _CLOSER_SHARE:
            stop = "" if text[-1] in '.?!:"' else "."
            text = f"{text}{stop} {rng.choice(self._closers)}"
        if short and rng.random() < _LOWER_CASE_SHARE:
            text = text.lower().rstrip(".?!")
        if len(text) >= _MIN_REMARK_CHARS and rng.random() < _OPENER_SHARE:
            text = f"{rng.choice(self._openers)} {text}"
        return text


def _read(folder: Traversable, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def _parse_slot(name: str, text: str, fillers: Mapping[str, Sequence[str]]) -> _Slot:
    number = _NUMBER.fullmatch(name)
    if number is not None:
        low, high = int(number[1]), int(number[2])
        if low > high:
            raise InvalidValue(f"{low} is above {high} in the template {text!r}")
        return _Slot(low=low, high=high)
    if not fillers.get(name):
        raise InvalidValue(f"no filler list is called {name!r}, as in the template {text!r}")
    return _Slot(fillers[name])
