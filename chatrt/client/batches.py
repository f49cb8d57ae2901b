"""What the client's thread tells its program, and how it gathers that into batches.

Knows: the events of a connection and of turns, ours and others', which of them may wait.
Does not know: sockets, widgets. `post` is called where `add` is and must only hand the batch over.
Invariant: the first delta of an answer is posted at once, later ones with a pause of `pause_s`
between them; nothing overtakes what was added before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from chatrt.client.messages import DELTA_TYPE, ClientEvent, TurnResult

_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """The connection changed; `message` is a sentence for people.

    `lost` is followed by a new attempt after `retry_in_s`; `refused` is final. `nobody`: nothing
    listens there, so that waiting helps only once somebody starts a server.
    """

    kind: Literal["connecting", "connected", "lost", "refused"]
    message: str
    attempt: int = 0
    retry_in_s: float = 0.0
    nobody: bool = False


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


@dataclass(frozen=True, slots=True)
class Watching:
    """From here on turns of others in the conversation are told; `turns` are all there are so far.

    It comes again with each new connection, and those turns that still run are told from their
    start then. Where the server lets the conversation not be watched, it comes all the same.
    """

    conversation_id: str
    turns: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class OtherTurnBegan:
    """Another connection's question is being answered.

    `parent_id` is the response that it named; None for one that follows the conversation's newest,
    or is a first turn in a branch of its own (`begins_branch`).
    """

    conversation_id: str
    response_id: str
    parent_id: str | None
    begins_branch: bool = False


@dataclass(frozen=True, slots=True)
class OtherTurnText:
    """What comes next of that answer."""

    response_id: str
    text: str


@dataclass(frozen=True, slots=True)
class OtherTurnDone:
    """That answer ended; the conversation's `turns` say what was asked (none: unknown)."""

    conversation_id: str
    response_id: str
    result: TurnResult
    turns: Sequence[dict[str, Any]]


ThreadEvent: TypeAlias = (
    ConnectionState
    | ConversationMade
    | TurnEvent
    | TurnInterrupted
    | TurnDone
    | Watching
    | OtherTurnBegan
    | OtherTurnText
    | OtherTurnDone
)
Post: TypeAlias = Callable[[Sequence[ThreadEvent]], None]


class Batcher:
    """Gathers events for `post`, which runs in the call or from a timer of the running loop.

    Any thread may set `pause_s`, which counts from the next pause on.
    """

    def __init__(self, post: Post) -> None:
        self.pause_s = _PAUSE_S
        self._post = post
        self._waiting: list[ThreadEvent] = []
        self._timer: asyncio.TimerHandle | None = None
        self._streaming: set[int | str] = set()  # turns, and responses of others

    def add(self, event: ThreadEvent) -> None:
        """Post `event`: at once, or with the next batch if it is a later delta of its turn."""
        self._waiting.append(event)
        if isinstance(event, TurnDone):
            self._streaming.discard(event.turn_id)
        elif isinstance(event, OtherTurnBegan | OtherTurnDone):
            self._streaming.discard(event.response_id)
        streams = _of_delta(event)
        if streams is not None:
            if streams in self._streaming:
                if self._timer is None:
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(self.pause_s, self.flush)
                return
            self._streaming.add(streams)
        self.flush()

    def flush(self) -> None:
        """Post what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            batch, self._waiting = self._waiting, []
            self._post(batch)


def _of_delta(event: ThreadEvent) -> int | str | None:
    """The turn, or the response of others, whose text `event` is; None for all other events."""
    if isinstance(event, OtherTurnText):
        return event.response_id
    if isinstance(event, TurnEvent) and event.event.type == DELTA_TYPE:
        return event.turn_id
    return None
