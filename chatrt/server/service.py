"""What the server serves: the interface between frames and answers.

Knows: the calls a server makes. Does not know: how they are answered.
Invariant: every method is called on the event loop's thread and returns quickly; an answer's events
follow in its log, appended on that same thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from chatrt.wire.log import ResponseLog

if TYPE_CHECKING:
    from chatrt.wire.live import LiveFigures, Sockets
    from chatrt.wire.messages import (
        ConversationCreate,
        ConversationSubscribe,
        ConversationUpdate,
        ResponseCreate,
    )

OnLog: TypeAlias = Callable[[ResponseLog], None]
"""Told of each new response of a conversation, before its first event is sent."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """Who calls. `received_ns` is `perf_counter_ns` as the frame was read, before JSON.

    `lane_key` names the lane among all connections: a partial supersedes the one before it on its
    lane, and a real create supersedes a partial.
    """

    key_id: str
    connection_id: str
    lane_key: str
    received_ns: int


class Service(Protocol):
    """Creates, cancels and looks up responses and conversations of a key.

    Every method may raise a `ChatrtError`, which is sent to the caller; an id of another key is
    `NotFound`, like one that does not exist.
    """

    async def create(self, message: ResponseCreate, context: CallContext) -> ResponseLog:
        """Begin a turn; returns as soon as its log exists, events follow in the log."""
        ...

    async def cancel(self, response_id: str, key_id: str) -> bool:
        """Ask a running response to end; its log then ends soon. False: it had ended already."""
        ...

    def find_log(self, response_id: str, key_id: str) -> ResponseLog:
        """The log of a response that runs or ended a moment ago, to read it once more.

        Raises:
            NotFound: There is none of this id and key, or it ended too long ago (code
                `response_not_found`).
        """
        ...

    def pause(self, response_id: str) -> None:
        """The client lags: decode no further. Pages stay. Twice is as once."""
        ...

    def resume(self, response_id: str) -> None:
        """The client caught up. Harmless when not paused or already ended."""
        ...

    def abandon(self, response_id: str) -> None:
        """Nobody reads this response any more: cancel it. Harmless when it has ended."""
        ...

    def leave(self, lane_key: str) -> None:
        """The lane's connection is gone: drop what was typed ahead on it."""
        ...

    async def response(self, response_id: str, key_id: str) -> dict[str, Any]:
        """The response object."""
        ...

    async def delete_response(self, response_id: str, key_id: str) -> None:
        """Forget a response."""
        ...

    async def conversation_create(
        self, message: ConversationCreate, context: CallContext
    ) -> dict[str, Any]:
        """A new conversation: `{"id", "title", "created_at", …}`."""
        ...

    async def conversation_update(
        self, message: ConversationUpdate, context: CallContext
    ) -> dict[str, Any]:
        """The conversation with its new title."""
        ...

    async def conversation_subscribe(
        self, message: ConversationSubscribe, context: CallContext, on_log: OnLog
    ) -> Callable[[], None]:
        """Call `on_log` for each response of the conversation; returns what ends that.

        Running responses are reported at once. Responses that the caller's own connection
        creates are not reported: it has their events already.
        """
        ...

    async def conversation_delete(self, conversation_id: str, key_id: str) -> None:
        """Forget a conversation with all its turns; a running response of it is cancelled."""
        ...

    async def conversation_items(self, conversation_id: str, key_id: str) -> list[dict[str, Any]]:
        """The messages along the newest branch, oldest first, as the API's items."""
        ...

    async def conversation_turns(self, conversation_id: str, key_id: str) -> list[dict[str, Any]]:
        """All turns of all branches, the oldest first, each with the turn that it follows."""
        ...

    async def conversation_list(self, query: str | None, key_id: str) -> list[dict[str, Any]]:
        """Conversations, newest first; those with `query` in title or text, if it is given."""
        ...

    def ready(self) -> bool:
        """Whether the model is loaded and warm."""
        ...

    def models(self) -> list[dict[str, Any]]:
        """The API's model objects: `{"id", "object": "model", "created", "owned_by"}`."""
        ...

    async def live(self, key_id: str, sockets: Sockets) -> LiveFigures:
        """What runs now and ended a moment ago: the key's own turns, counts of all."""
        ...

    async def metrics(self, sockets: Sockets) -> bytes:
        """Metrics in Prometheus' text format."""
        ...
