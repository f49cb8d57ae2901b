"""The bodyless HTTP routes that the server answers on its WebSocket port.

Knows: paths, the key's header, how a refused request becomes an error of chatrt.
Does not know: the WebSocket connection.
Cost: one short connection per call, on a thread of the running loop's default executor.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import msgspec

from chatrt.client.messages import error_from_wire
from chatrt.errors import ChatrtError, ServerUnavailable
from chatrt.wire.live import LiveFigures

if TYPE_CHECKING:
    import ssl as ssl_module


def websocket_url(url: str) -> str:
    """`url` as the address of the WebSocket: `http` becomes `ws`, `/v1` gets its `/responses`.

    An empty path is `/v1/responses`, as a base address of the SDKs means it.

    Raises:
        ServerUnavailable: `url` has no known scheme or no host.
    """
    parts = urlsplit(url)
    schemes = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}
    if parts.scheme not in schemes or not parts.hostname:
        raise ServerUnavailable(f"{url!r} is not an address like ws://127.0.0.1:8642")
    path = parts.path.rstrip("/") or "/v1"
    if path.endswith("/v1"):
        path += "/responses"
    return parts._replace(scheme=schemes[parts.scheme], path=path, fragment="").geturl()


def is_loopback(url: str) -> bool:
    """Whether the host of `url` is this machine, said by `localhost` or by an address."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HttpRoutes:
    """Calls the HTTP routes of the server at `url` (a ws, wss, http or https address).

    Every call raises `ServerUnavailable` when no server answers within `timeout_s`, and the error
    that the server names otherwise (`NotFound` for an unknown id).
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        ssl: ssl_module.SSLContext | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        parts = urlsplit(websocket_url(url))
        self._host = parts.hostname
        self._port = parts.port
        self._tls = parts.scheme == "wss"
        self._ssl = ssl
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def health(self) -> bool:
        """Whether the server is alive."""
        return await self._answers("/health")

    async def ready(self) -> bool:
        """Whether its model is loaded and warm."""
        return await self._answers("/ready")

    async def models(self) -> list[dict[str, Any]]:
        """The models that the server serves."""
        return _data(await self._call("GET", "/v1/models"))

    async def live(self) -> LiveFigures:
        """What the server does right now; of turns only those of this key."""
        answer = await self._call("GET", "/v1/chatrt/live")
        try:
            return msgspec.convert(answer, LiveFigures)
        except msgspec.ValidationError as error:
            raise ServerUnavailable(f"the server's live figures cannot be read: {error}") from error

    async def response(self, response_id: str) -> dict[str, Any]:
        """The stored response object."""
        return await self._call("GET", f"/v1/responses/{quote(response_id, safe='')}")

    async def conversations(self, query: str = "") -> list[dict[str, Any]]:
        """Conversations whose title or text contains `query`, the newest first."""
        suffix = f"?q={quote(query)}" if query else ""
        return _data(await self._call("GET", f"/v1/conversations{suffix}"))

    async def items(self, conversation_id: str) -> list[dict[str, Any]]:
        """The messages of a conversation along its newest branch, the oldest first."""
        return _data(
            await self._call("GET", f"/v1/conversations/{quote(conversation_id, safe='')}/items")
        )

    async def turns(self, conversation_id: str) -> list[dict[str, Any]]:
        """All turns of a conversation in all its branches, the oldest first.

        Each has `id`, `previous_response_id` (the turn that it follows, None for a first one),
        `created_at`, `status`, and the messages of its `input` and `output`.
        """
        return _data(
            await self._call("GET", f"/v1/conversations/{quote(conversation_id, safe='')}/turns")
        )

    async def delete_conversation(self, conversation_id: str) -> None:
        """Delete a conversation, its text and its cache."""
        await self._call("DELETE", f"/v1/conversations/{quote(conversation_id, safe='')}")

    async def _answers(self, path: str) -> bool:
        try:
            status, _ = await asyncio.to_thread(self._exchange, "GET", path)
        except ServerUnavailable:
            return False
        return status == 200

    async def _call(self, method: str, path: str) -> dict[str, Any]:
        status, body = await asyncio.to_thread(self._exchange, method, path)
        try:
            decoded = msgspec.json.decode(body) if body else {}
        except msgspec.DecodeError:
            decoded = {}
        answer: dict[str, Any] = decoded if isinstance(decoded, dict) else {}
        if status >= 400:
            raise self._refusal(method, path, status, answer)
        return answer

    def _refusal(self, method: str, path: str, status: int, answer: dict[str, Any]) -> ChatrtError:
        error = answer.get("error") or {
            "message": f"{method} {path} was refused with HTTP status {status}"
        }
        return error_from_wire(error, status)

    def _exchange(self, method: str, path: str) -> tuple[int, bytes]:
        assert self._host is not None
        connection = (
            http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=self._ssl
            )
            if self._tls
            else http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        )
        try:
            connection.request(method, path, headers=self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or error
            raise ServerUnavailable(
                f"no server answers at {self._host}:{self._port}: {reason}"
            ) from error
        finally:
            connection.close()


def _data(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in answer.get("data") or () if isinstance(row, dict)]
