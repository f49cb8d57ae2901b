"""What the engine does at this moment, and what its last steps took.

Knows: running turns, the queue's length, pages as numbers, nanoseconds.
Does not know: conversations, keys, who asks.
Invariant: nothing here changes a turn.
Cost: a step is noted in less than a microsecond. A snapshot is taken between two steps and copies
numbers, 2 µs for each turn beside what the pool's figures take.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.scheduler import Phase, Work
from chatrt.turn import TurnKind

if TYPE_CHECKING:
    from chatrt.engine.engine import Engine
    from chatrt.engine.live import LiveTurn
    from chatrt.reclaim import PoolFigures

MOST_STEPS = 1024
PREPARED = "prepared"  # the phase of what nobody asked for yet
_AHEAD = {TurnKind.TYPED_AHEAD: "typed ahead", TurnKind.PREPARED: PREPARED}
_HELD_UP = {Phase.RESTORING: "restoring", Phase.PAUSED: "paused"}


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step that did something: when it ended, and how long it took."""

    end_ns: int
    time_ns: int


class StepLog:
    """The last steps, the oldest first; belongs to the engine's thread.

    `num_steps` counts all of them since the start, `step_ns` is their time together.
    """

    def __init__(self, most: int = MOST_STEPS) -> None:
        self.num_steps = 0
        self.step_ns = 0
        self._steps: deque[StepTime] = deque(maxlen=most)

    def add(self, start_ns: int, end_ns: int) -> None:
        """A step did something meanwhile."""
        self.num_steps += 1
        self.step_ns += end_ns - start_ns
        self._steps.append(StepTime(end_ns, end_ns - start_ns))

    def last(self) -> tuple[StepTime, ...]:
        """A copy that other threads may read."""
        return tuple(self._steps)


@dataclass(frozen=True, slots=True)
class TurnSnapshot:
    """A running turn. `num_passes` counts the target's passes that gave `num_emitted` tokens."""

    response_id: str
    phase: str
    prefix: str
    cached_tokens: int
    computed_tokens: int
    drafted: int
    accepted: int
    num_passes: int
    num_emitted: int


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The running turns in the order in which they began, the pages.

    `num_waiting` turns are in the queue that somebody waits for.
    """

    turns: tuple[TurnSnapshot, ...]
    num_waiting: int
    pool: PoolFigures


def take_snapshot(engine: Engine) -> EngineSnapshot:
    """The engine between two steps; on its own thread only."""
    turns = tuple(_turn_snapshot(turn) for turn in engine.turns)
    return EngineSnapshot(turns, engine.admission.num_answers, engine.sessions.figures())


def _turn_snapshot(turn: LiveTurn) -> TurnSnapshot:
    counter = turn.counter
    return TurnSnapshot(
        response_id=turn.request.response_id,
        phase=_phase(turn),
        prefix=turn.kv.prefix,
        cached_tokens=turn.kv.reused_tokens,
        computed_tokens=turn.num_computed_tokens,
        drafted=sum(counter.drafted_by.values()),
        accepted=counter.accepted,
        num_passes=sum(counter.depths),
        num_emitted=counter.emitted,
    )


def _phase(turn: LiveTurn) -> str:
    """One word, as `chatrt.wire.live` lists them."""
    entry = turn.entry
    ahead = _AHEAD.get(turn.request.kind) or _HELD_UP.get(entry.phase)
    return ahead or ("decode" if entry.work is Work.DECODE else "prefill")
