"""What is typed ahead on one lane: the half-typed prompts sent, and which events are theirs.

Knows: the mark that a partial carries and the server repeats, whether the newest one is done with.
Does not know: sockets, answers, when a person pauses.
Invariant: events that name a response are told apart by the mark, never by their order: a question
overtakes the partial before it, and both share the lane.
Source: PROTOCOL 2 (`chatrt.partial`), 3 (a response repeats its `metadata`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chatrt.client.messages import TERMINAL_TYPES, ResponseRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from chatrt.errors import ChatrtError

_MARK = "typed_ahead"
_logger = logging.getLogger(__name__)


class TypedAhead:
    """The partials of one lane, made by `ChatClient.type_ahead` for the question that they become.

    The lane stays theirs until `ChatClient.send` is given this object.
    """

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self._settled = asyncio.Event()

    def message(self, request: ResponseRequest) -> dict[str, Any]:
        """The frame that sends `request` as it stands so far; it is outstanding from now on."""
        self._settled.clear()
        chatrt = {**request.chatrt, "partial": True}
        partial = replace(request, generate=False, chatrt=chatrt)
        return {**partial.to_message(self.lane), "metadata": {_MARK: "true"}}

    async def settled(self) -> None:
        """Wait until the server is done with the newest partial, or the connection is gone."""
        await self._settled.wait()

    def take(self, kind: str, error: ChatrtError | None) -> None:
        """Take an event of the newest partial. A refusal is nobody's trouble but the log's."""
        if error is not None:
            _logger.debug("a half-typed prompt was refused: %s", error.code)
        if error is not None or kind in TERMINAL_TYPES:
            self._settled.set()

    def lose(self) -> None:
        """The connection is gone: nothing more will come."""
        self._settled.set()


def is_of_partial(event: Mapping[str, Any]) -> bool:
    """Whether an event names a partial: by its response's mark, or as an error that says so."""
    response = event.get("response")
    if isinstance(response, dict):
        metadata = response.get("metadata")
        return isinstance(metadata, dict) and _MARK in metadata
    ours = event.get("chatrt")
    return event.get("type") == "error" and isinstance(ours, dict) and ours.get("partial") is True
