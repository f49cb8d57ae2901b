"""What the client's thread tells its program, and how it gathers that into batches.

Knows: the events of a connection and of turns, which of them may wait for others.
Does not know: sockets, widgets. `post` is called where `add` is and must only hand the batch over.
Invariant: the first delta of an answer is posted at once, later ones at most `_BATCHES_PER_S` times
a second; nothing overtakes what was added before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from chatrt.client.messages import DELTA_TYPE, ClientEvent, TurnResult

_BATCHES_PER_S = 30


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """The connection changed; `message` is a sentence for people.

    `lost` is followed by a new attempt after `retry_in_s`; `refused` is final.
    """

    kind: Literal["connecting", "connected", "lost", "refused"]
    message: str
    attempt: int = 0
    retry_in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ConversationMade:
    """The conversation that the first turn opened."""

    turn_id: int
    conversation_id: str


@dataclass(frozen=True, slots=True)
class TurnEvent:
    """One event of a turn's response."""

    turn_id: int
    event: ClientEvent


@dataclass(frozen=True, slots=True)
class TurnInterrupted:
    """The connection was lost in mid-answer; the answer goes on, or ends, when it is back."""

    turn_id: int


@dataclass(frozen=True, slots=True)
class TurnDone:
    """The turn ended, well or not."""

    turn_id: int
    result: TurnResult


ThreadEvent: TypeAlias = ConnectionState | ConversationMade | TurnEvent | TurnInterrupted | TurnDone
Post: TypeAlias = Callable[[Sequence[ThreadEvent]], None]


class Batcher:
    """Gathers events for `post`, which runs in the call or from a timer of the running loop."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._waiting: list[ThreadEvent] = []
        self._timer: asyncio.TimerHandle | None = None
        self._streaming: set[int] = set()

    def add(self, event: ThreadEvent) -> None:
        """Post `event`: at once, or with the next batch if it is a later delta of its turn."""
        self._waiting.append(event)
        if isinstance(event, TurnDone):
            self._streaming.discard(event.turn_id)
        if isinstance(event, TurnEvent) and event.event.type == DELTA_TYPE:
            if event.turn_id in self._streaming:
                if self._timer is None:
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(1 / _BATCHES_PER_S, self.flush)
                return
            self._streaming.add(event.turn_id)
        self.flush()

    def flush(self) -> None:
        """Post what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            batch, self._waiting = self._waiting, []
            self._post(batch)
