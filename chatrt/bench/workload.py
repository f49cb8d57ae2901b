"""Conversations of a run: how many, how long, which words, when, and what goes wrong in them.

Knows: lengths in words (about one token each), think times, which turns are forks, typed ahead,
cancelled or left, when sessions arrive, real texts in place of synthetic ones.
Does not know: servers, tokens, clocks.
Invariant: the same workload and seed give the same texts, and a session's do not depend on how many
sessions there are, on pauses, nor on the rates of anything but forks. No two sessions begin alike
behind what all of them share, so a first turn finds no other prefix than that and the template's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from chatrt.bench.lengths import Length

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chatrt.bench.prompts import Conversation

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


_NUM_TURNS = Length(4, 4)
_SYSTEM_TOKENS = Length(24, 24)
_INPUT_TOKENS = Length(48, 48)
_THINK_MS = Length(0, 0)
_OUTPUT_TOKENS = Length(32, 32)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked for. Lengths count words, which are about one token each.

    Each session has a system message of its own (behind `prefix_tokens` words that all share),
    `num_turns` turns with `think_ms` before all but the first and, if `forks`, one more turn that
    continues behind the first answer. `output_tokens` are tokens.

    Rates are shares: of turns that the client cancels, of sessions whose person leaves in
    mid-answer, of turns behind which an extra turn continues an earlier answer, of follow-ups that
    are typed ahead. `rate_per_s` sessions arrive a second, as a Poisson process (an open loop);
    None: all are there at once, and each next turn follows the answer (a closed loop). If
    `restarts`, each session has one more follow-up for when the server was started again.
    """

    num_sessions: int = 8
    num_turns: Length = _NUM_TURNS
    system_tokens: Length = _SYSTEM_TOKENS
    input_tokens: Length = _INPUT_TOKENS
    think_ms: Length = _THINK_MS
    forks: bool = True
    output_tokens: Length = _OUTPUT_TOKENS
    prefix_tokens: int = 0
    cancel_rate: float = 0.0
    abandon_rate: float = 0.0
    fork_rate: float = 0.0
    typed_ahead_rate: float = 0.0
    rate_per_s: float | None = None
    restarts: bool = False

    def in_words(self, prompts: str | None = None) -> str:
        """`8 conversations of 4 turns at once, messages of 48 words, …`; `prompts` names texts."""
        people = "conversation" if self.num_sessions == 1 else "conversations"
        turns = "turn" if self.num_turns.most == 1 else "turns"
        when = "" if self.num_sessions == 1 else " at once"
        if self.rate_per_s is not None:
            when = f" arriving at {self.rate_per_s:g} a second (TTFT from when a turn was due)"
        facts = [
            f"{self.num_sessions} {people} of {self.num_turns} {turns}{when}",
            f"messages {f'of {self.input_tokens} words' if prompts is None else f'from {prompts}'}",
            f"answers of {self.output_tokens} tokens",
        ]
        if self.think_ms.most:
            facts.append(f"pauses of {self.think_ms} ms")
        rates = {
            "extra branches": self.fork_rate,
            "cancelled": self.cancel_rate,
            "abandoned": self.abandon_rate,
            "typed ahead": self.typed_ahead_rate,
        }
        facts += [f"{name} {rate:g}" for name, rate in rates.items() if rate]
        return ", ".join(facts)


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One message of the person, due `think_ms` after the answer that ended before it.

    `follows` is the index of the turn in its session whose answer it continues, None for the first.
    Behind `cancel_after` text deltas the client cancels, behind `leave_after` the person is gone.
    """

    text: str
    think_ms: int
    follows: int | None = None
    is_fork: bool = False
    max_output_tokens: int = 32
    typed_ahead: bool = False
    cancel_after: int | None = None
    leave_after: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """One conversation, its turns in the order in which they are sent.

    It arrives `arrives_ms` after the start of the run. `after_restart` continues the last answer
    that is no fork, on a server that was started again.
    """

    system: str
    turns: tuple[PlannedTurn, ...]
    arrives_ms: float = 0.0
    after_restart: PlannedTurn | None = None

    @property
    def num_turns(self) -> int:
        """Turns, forks and the one after a restart included."""
        return len(self.turns) + (self.after_restart is not None)

    @property
    def leaves(self) -> bool:
        """Whether its person leaves in mid-answer; that turn is its last."""
        return self.turns[-1].leave_after is not None


def generate(
    workload: Workload, seed: int, conversations: Sequence[Conversation] = ()
) -> tuple[PlannedSession, ...]:
    """The sessions of a run; with `conversations`, what their persons say, in turns."""
    arrivals = _arrivals(workload, seed)
    return tuple(
        replace(generate_session(workload, seed, index, conversations), arrives_ms=next(arrivals))
        for index in range(workload.num_sessions)
    )


def warm_up_session(
    workload: Workload, seed: int, conversations: Sequence[Conversation] = ()
) -> PlannedSession:
    """One more session, without pauses, in which no turn is cancelled, left, typed ahead or aside.

    A fork behind its first answer it has like the others.
    """
    calm = replace(
        workload,
        cancel_rate=0.0,
        abandon_rate=0.0,
        fork_rate=0.0,
        typed_ahead_rate=0.0,
        restarts=False,
    )
    drawn = generate_session(calm, seed, workload.num_sessions, conversations)
    return replace(drawn, turns=tuple(replace(turn, think_ms=0) for turn in drawn.turns))


def generate_session(
    workload: Workload, seed: int, index: int, conversations: Sequence[Conversation] = ()
) -> PlannedSession:
    """The session with this index, which may lie beyond `num_sessions` (a warm-up's does)."""
    random, aside = Random(f"{seed}/{index}"), Random(f"{seed}/{index}/aside")
    shape, aside_shape = Random(f"{seed}/{index}/shape"), Random(f"{seed}/{index}/aside/shape")
    pauses = Random(f"{seed}/{index}/pauses")
    own = f"{index}: {sentence(random, workload.system_tokens.draw(random))}"
    # Shared by all sessions, so in front: only what lies before a difference can be shared.
    shared = sentence(Random(f"{seed}/shared"), workload.prefix_tokens)
    system = f"{shared} {own}" if workload.prefix_tokens else own
    num_turns = workload.num_turns.draw(shape)
    said, other = _sentences(workload, random), _sentences(workload, aside)
    if conversations:
        texts = conversations[index % len(conversations)].texts
        num_turns = min(num_turns, len(texts))
        said = iter(texts)
        other = itertools.cycle(conversations[(index + 1) % len(conversations)].texts)
    main = _Person(workload, said, pauses, shape)
    return _session(system, num_turns, main, _Person(workload, other, pauses, aside_shape))


def sentence(random: Random, num_words: int) -> str:
    """So many everyday words in no order; most vocabularies hold each as one token."""
    return " ".join(random.choices(_WORDS, k=num_words)).capitalize() + "."


def _sentences(workload: Workload, random: Random) -> Iterator[str]:
    while True:
        yield sentence(random, workload.input_tokens.draw(random))


def _arrivals(workload: Workload, seed: int) -> Iterator[float]:
    """When the sessions arrive, in ms: a Poisson process has exponential times between them."""
    random, at_ms = Random(f"{seed}/arrivals"), 0.0
    while True:
        if workload.rate_per_s is not None:
            at_ms += random.expovariate(workload.rate_per_s) * 1e3
        yield at_ms


@dataclass(frozen=True, slots=True)
class _Person:
    """What somebody says and does: pauses are drawn from `pauses`, all else from `shape`.

    Each turn takes the same draws, whatever the rates are: a rate decides about its own thing only.
    """

    workload: Workload
    texts: Iterator[str]
    pauses: Random
    shape: Random

    def happens(self, rate: float) -> bool:
        """Whether something does that happens at this rate."""
        return self.shape.random() < rate

    def turn(self, follows: int | None, *, is_fork: bool = False) -> PlannedTurn:
        """The next turn, which continues the answer of the one at the index `follows`."""
        workload = self.workload
        text = next(self.texts)
        think_ms = workload.think_ms.draw(self.pauses)
        num_tokens = workload.output_tokens.draw(self.shape)
        cancels, types = self.happens(workload.cancel_rate), self.happens(workload.typed_ahead_rate)
        part = self.part_of(num_tokens)
        return PlannedTurn(
            text,
            0 if follows is None else think_ms,
            follows,
            is_fork=is_fork,
            max_output_tokens=num_tokens,
            typed_ahead=types and follows is not None,
            cancel_after=part if cancels else None,
        )

    def part_of(self, num_tokens: int) -> int:
        """A number of deltas that an answer of so many tokens usually has: up to half of them."""
        return self.shape.randint(1, max(1, num_tokens // 2))


def _session(system: str, num_turns: int, main: _Person, aside: _Person) -> PlannedSession:
    """A line of `num_turns` turns, cut where the person leaves, and what is said `aside` of it."""
    workload = main.workload
    leaves, leaves_at = main.happens(workload.abandon_rate), main.shape.randrange(num_turns)
    turns: list[PlannedTurn] = []
    line: list[int] = []
    for number in range(num_turns):
        turn = main.turn(line[-1] if line else None)
        part, forks = main.part_of(turn.max_output_tokens), main.happens(workload.fork_rate)
        line.append(len(turns))
        if leaves and number == leaves_at:
            turns.append(replace(turn, cancel_after=None, leave_after=part))
            return PlannedSession(system, tuple(turns))
        turns.append(turn)
        if forks and number:
            turns.append(aside.turn(line[aside.shape.randrange(number)], is_fork=True))
    if workload.forks:
        turns.append(aside.turn(0, is_fork=True))
    after_restart = aside.turn(line[-1]) if workload.restarts else None
    return PlannedSession(system, tuple(turns), after_restart=after_restart)
