"""A service that is still loading: it refuses politely until the real one is there.

Knows: the service interface. Does not know: what loading means.
Invariant: before `begin` every call but `ready`, `models` and `metrics` raises StillLoading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chatrt.errors import StillLoading

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt.server.service import CallContext, OnLog
    from chatrt.service.service import ChatService
    from chatrt.wire.live import LiveFigures, Sockets
    from chatrt.wire.log import ResponseLog
    from chatrt.wire.messages import (
        ConversationCreate,
        ConversationSubscribe,
        ConversationUpdate,
        ResponseCreate,
    )


class DeferredService:
    """Implements `chatrt.server.service.Service` by another service that comes later."""

    def __init__(self) -> None:
        self._service: ChatService | None = None

    def begin(self, service: ChatService) -> None:
        """From now on calls go to `service`."""
        self._service = service

    @property
    def _loaded(self) -> ChatService:
        if self._service is None:
            raise StillLoading
        return self._service

    async def create(self, message: ResponseCreate, context: CallContext) -> ResponseLog:
        """See the interface, as below."""
        return await self._loaded.create(message, context)

    async def cancel(self, response_id: str, key_id: str) -> bool:
        """See the interface."""
        return await self._loaded.cancel(response_id, key_id)

    def find_log(self, response_id: str, key_id: str) -> ResponseLog:
        """See the interface."""
        return self._loaded.find_log(response_id, key_id)

    def pause(self, response_id: str) -> None:
        """See the interface."""
        self._loaded.pause(response_id)

    def resume(self, response_id: str) -> None:
        """See the interface."""
        self._loaded.resume(response_id)

    def abandon(self, response_id: str) -> None:
        """See the interface."""
        self._loaded.abandon(response_id)

    def leave(self, lane_key: str) -> None:
        """Nothing was typed ahead before the service began."""
        if self._service is not None:
            self._service.leave(lane_key)

    async def response(self, response_id: str, key_id: str) -> dict[str, Any]:
        """See the interface."""
        return await self._loaded.response(response_id, key_id)

    async def delete_response(self, response_id: str, key_id: str) -> None:
        """See the interface."""
        await self._loaded.delete_response(response_id, key_id)

    async def conversation_create(
        self, message: ConversationCreate, context: CallContext
    ) -> dict[str, Any]:
        """See the interface."""
        return await self._loaded.conversation_create(message, context)

    async def conversation_update(
        self, message: ConversationUpdate, context: CallContext
    ) -> dict[str, Any]:
        """See the interface."""
        return await self._loaded.conversation_update(message, context)

    async def conversation_subscribe(
        self, message: ConversationSubscribe, context: CallContext, on_log: OnLog
    ) -> Callable[[], None]:
        """See the interface."""
        return await self._loaded.conversation_subscribe(message, context, on_log)

    async def conversation_delete(self, conversation_id: str, key_id: str) -> None:
        """See the interface."""
        await self._loaded.conversation_delete(conversation_id, key_id)

    async def conversation_items(self, conversation_id: str, key_id: str) -> list[dict[str, Any]]:
        """See the interface."""
        return await self._loaded.conversation_items(conversation_id, key_id)

    async def conversation_turns(self, conversation_id: str, key_id: str) -> list[dict[str, Any]]:
        """See the interface."""
        return await self._loaded.conversation_turns(conversation_id, key_id)

    async def conversation_list(self, query: str | None, key_id: str) -> list[dict[str, Any]]:
        """See the interface."""
        return await self._loaded.conversation_list(query, key_id)

    def ready(self) -> bool:
        """Whether the real service is there."""
        return self._service is not None

    def models(self) -> list[dict[str, Any]]:
        """The model, once it is loaded."""
        return [] if self._service is None else self._service.models()

    async def live(self, key_id: str, sockets: Sockets) -> LiveFigures:
        """See the interface."""
        return await self._loaded.live(key_id, sockets)

    async def metrics(self, sockets: Sockets) -> bytes:
        """Metrics, once there is something to measure."""
        return b"" if self._service is None else await self._service.metrics(sockets)
