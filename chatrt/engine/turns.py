"""The turns that run, by response and by session, and what is told of each.

Knows: live turns, their entries in the scheduler, the order of a turn's events.
Does not know: pages, tensors, when a turn ends.
Invariant: a turn has one FinishedEvent, its last event. Of what nobody asked for (PREPARED) nothing
is told.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from chatrt.engine.report import finished, refused
from chatrt.turn import FinishReason, StartedEvent, TokensEvent, TurnKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from chatrt.engine.admission import Running
    from chatrt.engine.live import Emitted, LiveTurn
    from chatrt.errors import ChatrtError
    from chatrt.scheduler import Scheduler
    from chatrt.turn import EngineEvent, TurnRequest

# What nobody waits for yet: it holds no seat and no page against an answer. The least wanted first.
AHEAD = (TurnKind.PREPARED, TurnKind.TYPED_AHEAD)


class Turns:
    """Adds turns to a scheduler and takes them out again. `clock` gives nanoseconds."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._turns: dict[str, LiveTurn] = {}
        self._by_session: dict[int, LiveTurn] = {}
        self._events: list[EngineEvent] = []

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[LiveTurn]:
        """The turns in the order in which they began; none may end meanwhile."""
        return iter(self._turns.values())

    @property
    def by_session(self) -> Mapping[int, LiveTurn]:
        """The turns by the ids of their sessions."""
        return self._by_session

    @property
    def by_response(self) -> Mapping[str, LiveTurn]:
        """The turns by the ids of their responses."""
        return self._turns

    def matching(self, matches: Callable[[TurnRequest], bool]) -> list[LiveTurn]:
        """The running turns whose requests match."""
        return [turn for turn in self._turns.values() if matches(turn.request)]

    @property
    def is_busy(self) -> bool:
        """Whether anything runs that somebody asked for."""
        return any(turn.request.kind is not TurnKind.PREPARED for turn in self._turns.values())

    def answers(self) -> list[Running]:
        """What runs and somebody waits for, as admission knows it."""
        return [turn.running for turn in self._turns.values() if turn.request.kind not in AHEAD]

    def least_wanted(self) -> LiveTurn | None:
        """Of the turns that nobody waits for yet the last one, preparations before typing."""
        for kind in AHEAD:
            turns = [turn for turn in self._turns.values() if turn.request.kind is kind]
            if turns:
                return turns[-1]
        return None

    def begin(self, turn: LiveTurn) -> None:
        """A turn is attached to a session: schedule it, and say so."""
        self._turns[turn.request.response_id] = turn
        self._by_session[turn.entry.session.session_id] = turn
        self._scheduler.add(turn.entry)
        if turn.request.kind is not TurnKind.PREPARED:
            self._events.append(StartedEvent(turn.request.response_id, turn.sampler.seed))

    def emit(self, turn: LiveTurn, emitted: Emitted, time_ns: int) -> None:
        """A step added tokens to an answer."""
        self._events.append(
            TokensEvent(
                turn.request.response_id,
                emitted.text,
                emitted.token_ids,
                emitted.logprobs,
                time_ns,
            )
        )

    def end(self, turn: LiveTurn, output_ids: Sequence[int]) -> None:
        """A turn is over, `turn.finish` says why: forget it, and say so."""
        self._leave(turn, output_ids, None)

    def fail(self, turn: LiveTurn, error: ChatrtError) -> None:
        """A turn ends with an error."""
        turn.finish = FinishReason.FAILED
        self._leave(turn, turn.token_ids, error)

    def refuse(
        self, request: TurnRequest, reason: FinishReason, error: ChatrtError | None = None
    ) -> None:
        """A turn ends that never ran."""
        if request.kind is not TurnKind.PREPARED:
            self._events.append(refused(request, reason, error=error, time_ns=self._clock()))

    def take_events(self) -> list[EngineEvent]:
        """Everything that happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _leave(self, turn: LiveTurn, output_ids: Sequence[int], error: ChatrtError | None) -> None:
        self._scheduler.remove(turn.entry)
        del self._turns[turn.request.response_id]
        del self._by_session[turn.entry.session.session_id]
        if turn.request.kind is not TurnKind.PREPARED:
            kv = replace(turn.kv, computed_tokens=turn.num_computed_tokens)
            event = finished(turn, output_ids, kv=kv, error=error, time_ns=self._clock())
            self._events.append(event)
