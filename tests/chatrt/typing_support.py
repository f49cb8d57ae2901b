"""A scripted server that reads along while a person types."""

from __future__ import annotations

import asyncio
import http
from typing import TYPE_CHECKING, Any

import msgspec

from chatrt.testing.scripted_server import ScriptedServer, is_half_typed

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response


class ReadingServer(ScriptedServer):
    """Takes half-typed prompts as the real server does: no answer, marked as they came.

    While `goes_on` is clear it does not say what became of them; `refuses` is the error they get.
    While it `is_away` it takes no new connection, though its answers go on. `creates()` are
    the questions alone, `partials()` what was typed of them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.refuses: dict[str, Any] | None = None
        self.is_away = False

    def creates(self) -> list[dict[str, Any]]:
        return [message for message in super().creates() if not is_half_typed(message)]

    def partials(self) -> list[dict[str, Any]]:
        return [message for message in super().creates() if is_half_typed(message)]

    def typed(self) -> list[str]:
        """The texts of the half-typed prompts, in order."""
        return [message["input"] for message in self.partials()]

    def cut(self) -> None:
        """Abort every connection, as a network does that fails for a moment."""
        assert self._server is not None
        for connection in list(self._server.connections):
            connection.transport.abort()

    def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        if self.is_away:
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "away\n")
        return super()._http(connection, request)

    async def _read_along(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        await self.goes_on.wait()
        if self.refuses is None:
            await super()._read_along(connection, message)
            return
        refused = {"type": "error", "status": 400, "error": self.refuses}
        told = {**refused, "chatrt": {"partial": True}, "stream_id": message["stream_id"]}
        await connection.send(msgspec.json.encode(told).decode())
