"""Synthetic conversations: how many, how long, which words, drawn from a seed.

Knows: lengths in words (about one token each), think times, which turns are forks.
Does not know: servers, tokens, clocks.
Invariant: the same workload and seed give the same texts, and a session's do not depend on how many
sessions there are; no two sessions begin alike, so a first turn finds no prefix but the template's.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Self

from chatrt.errors import InvalidValue

# Everyday words that byte-pair vocabularies hold as one token.
_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "student", "group", "country", "problem", "hand", "part"),
    *("place", "case", "week", "company", "system", "program", "question", "work", "number"),
    *("night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact"),
    *("month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue"),
    *("side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game"),
    *("line", "end", "member", "law", "car", "city", "name", "team", "minute", "idea", "body"),
    *("make", "know", "take", "see", "come", "think", "look", "want", "give", "use", "find"),
    *("tell", "ask", "work", "feel", "try", "leave", "call", "good", "new", "first", "last"),
    *("long", "great", "little", "own", "other", "old", "big", "high", "small", "large"),
    *("next", "early", "young", "important", "few", "public", "bad", "same", "able", "about"),
)


@dataclass(frozen=True, slots=True)
class Length:
    """A whole number drawn evenly from `least` to `most`, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str, *, param: str, at_least: int = 1) -> Self:
        """`64` is always 64, `32-128` anything from 32 to 128.

        Raises:
            InvalidValue: It is neither, or it begins below `at_least`.
        """
        first, dash, last = text.partition("-")
        try:
            least = int(first)
            most = int(last) if dash else least
        except ValueError:
            raise InvalidValue(
                f"{param} is {text!r}, it must be a number like 64 or a range like 32-128",
                param=param,
            ) from None
        if not at_least <= least <= most:
            raise InvalidValue(
                f"{param} is {text!r}, it must rise from at least {at_least}", param=param
            )
        return cls(least, most)

    def draw(self, random: Random) -> int:
        """The next number."""
        return random.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked for. Lengths count words, which are about one token each.

    Each session has a system message of its own, `num_turns` turns with `think_ms` before all but
    the first and, if `forks`, one more turn that continues behind the first answer.
    """

    num_sessions: int = 8
    num_turns: int = 4
    system_tokens: Length = Length(24, 24)
    input_tokens: Length = Length(48, 48)
    think_ms: Length = Length(0, 0)
    forks: bool = True


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One message of the person, sent `think_ms` after the answer before it."""

    text: str
    think_ms: int


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """One conversation; `fork` is sent last and continues behind the first answer."""

    system: str
    turns: tuple[PlannedTurn, ...]
    fork: PlannedTurn | None

    @property
    def num_turns(self) -> int:
        """Turns, the fork included."""
        return len(self.turns) + (self.fork is not None)


def generate(workload: Workload, seed: int) -> tuple[PlannedSession, ...]:
    """The sessions of a run."""
    return tuple(generate_session(workload, seed, index) for index in range(workload.num_sessions))


def generate_session(workload: Workload, seed: int, index: int) -> PlannedSession:
    """The session with this index, which may lie beyond `num_sessions` (a warm-up's does)."""
    random = Random(f"{seed}/{index}")
    system = sentence(random, workload.system_tokens.draw(random))
    turns = tuple(_turn(random, workload, is_first=not turn) for turn in range(workload.num_turns))
    fork = _turn(random, workload, is_first=False) if workload.forks else None
    return PlannedSession(f"{index}: {system}", turns, fork)


def sentence(random: Random, num_words: int) -> str:
    """So many everyday words in no order; most vocabularies hold each as one token."""
    return " ".join(random.choices(_WORDS, k=num_words)).capitalize() + "."


def _turn(random: Random, workload: Workload, *, is_first: bool) -> PlannedTurn:
    text = sentence(random, workload.input_tokens.draw(random))
    think_ms = workload.think_ms.draw(random)
    return PlannedTurn(text, 0 if is_first else think_ms)
