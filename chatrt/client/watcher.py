"""Tells what others ask in the conversation that is shown, over whatever connection there is.

Knows: which conversation is watched, what was asked there before and what is being answered.
Does not know: sockets, reconnecting, this program's own turns, what is shown.
Invariant: nothing is told of a conversation before `Watching` was, which says what came before. A
question is known to the server's list once its turn has ended, so it comes with the end.
Cost: the conversation's turns are fetched once for each watch and each turn of others.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chatrt.client.batches import OtherTurnBegan, OtherTurnDone, OtherTurnText, Watching
from chatrt.client.messages import CREATED_TYPE, DELTA_TYPE, TurnRecorder, TurnResult
from chatrt.errors import ChatrtError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.client.batches import Batcher
    from chatrt.client.connection import ChatClient
    from chatrt.client.watch import Watch, WatchedEvent

_logger = logging.getLogger(__name__)


class Watcher:
    """Watches one conversation at a time; all calls come from its connection's event loop."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._client: ChatClient | None = None
        self._conversation_id: str | None = None
        self._task: asyncio.Task[None] | None = None

    def watch(self, conversation_id: str | None) -> None:
        """Watch this conversation from now on, or none."""
        if conversation_id != self._conversation_id:
            self._conversation_id = conversation_id
            self._begin()

    def use(self, client: ChatClient | None) -> None:
        """Watch over this connection from now on; None while there is none."""
        if client is not self._client:
            self._client = client
            self._begin()

    def _begin(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._client is not None and self._conversation_id is not None:
            reading = _Reading(self._client, self._batcher, self._conversation_id)
            self._task = asyncio.create_task(reading.run(), name="chatrt-watcher")


class _Reading:
    """One conversation, watched over one connection."""

    def __init__(self, client: ChatClient, batcher: Batcher, conversation_id: str) -> None:
        self._client = client
        self._batcher = batcher
        self._conversation_id = conversation_id
        self._recorders: dict[str, TurnRecorder] = {}

    async def run(self) -> None:
        """Tell what comes, until the connection is lost."""
        watch = await self._subscribed()
        try:
            turns = await self._turns()
            if self._client.is_lost:
                return
            self._batcher.add(Watching(self._conversation_id, turns))
            if watch is not None:
                async for watched in watch:
                    await self._tell(watched)
        except ChatrtError:
            pass  # the connection is gone, and its keeper says so
        finally:
            if watch is not None:
                watch.close()

    async def _subscribed(self) -> Watch | None:
        """The watch; None where the server lets none begin, which harms nothing else."""
        try:
            return await self._client.subscribe(self._conversation_id)
        except ChatrtError as error:
            _logger.debug("conversation %s is not watched: %s", self._conversation_id, error)
            return None

    async def _turns(self) -> Sequence[dict[str, Any]]:
        try:
            return await self._client.http.turns(self._conversation_id)
        except ChatrtError as error:
            _logger.debug("conversation %s is not read: %s", self._conversation_id, error)
            return ()

    async def _tell(self, watched: WatchedEvent) -> None:
        response_id, event = watched.response_id, watched.event
        if event.type == CREATED_TYPE:
            self._recorders[response_id] = TurnRecorder(event.received_ns)
        recorder = self._recorders[response_id]
        recorder.add(event)
        if event.type == CREATED_TYPE:
            self._batcher.add(_began(self._conversation_id, response_id, event.data["response"]))
        elif event.type == DELTA_TYPE:
            self._batcher.add(OtherTurnText(response_id, event.delta))
        else:
            del self._recorders[response_id]
            result, turns = _as_served(recorder.result()), await self._turns()
            self._batcher.add(OtherTurnDone(self._conversation_id, response_id, result, turns))


def _began(conversation_id: str, response_id: str, response: dict[str, Any]) -> OtherTurnBegan:
    ours = response.get("chatrt") or {}
    return OtherTurnBegan(
        conversation_id,
        response_id,
        response.get("previous_response_id"),
        begins_branch=bool(ours.get("new_branch")),
    )


def _as_served(result: TurnResult) -> TurnResult:
    """A turn of others with the server's time to first token: here it may have come at once."""
    server_ms = result.timing.get("ttft_ms")
    known_ms = float(server_ms) if isinstance(server_ms, int | float) else None
    return replace(result, ttft_ms=known_ms, gaps_ms=())
