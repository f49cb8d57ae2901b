"""The HTTP routes that share the port: requests without a body, answered with JSON.

Knows: paths, the service's look-ups. Does not know: WebSocket frames, keys (its caller checked).
Invariant: an unknown path is 404, an unexpected failure 500 without details.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

import msgspec

from chatrt.errors import ChatrtError, ModelNotFound, NotFound
from chatrt.server.connection import report
from chatrt.wire.errors import error_body, internal_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from websockets.http11 import Request

    from chatrt.server.service import Service
    from chatrt.wire.live import Sockets
    from chatrt.wire.log import ResponseLog

SOCKET_PATHS = ("/v1/responses", "/responses")
OPEN_PATHS = ("/health", "/ready")
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer; `headers` are those beside its type, in place of the server's own."""

    status: HTTPStatus
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Target:
    """What a request asks for; `segments` are percent-decoded.

    `path` is without slashes at its end, `sent_path` as it was sent.
    """

    method: str
    path: str
    sent_path: str
    segments: tuple[str, ...]
    query: dict[str, list[str]]
    upgrade: bool

    @classmethod
    def of(cls, request: Request) -> Target:
        """The target of a request."""
        path, _, query = request.path.partition("?")
        segments = tuple(unquote(segment) for segment in path.strip("/").split("/"))
        upgrade = any("websocket" in v.lower() for v in request.headers.get_all("Upgrade"))
        return cls(
            method=request.method,
            path="/" + path.strip("/"),
            sent_path=path,
            segments=segments,
            query=parse_qs(query),
            upgrade=upgrade,
        )

    def parameter(self, name: str) -> str | None:
        """The first value of a query parameter."""
        values = self.query.get(name)
        return values[0] if values else None


def json_reply(value: object, status: HTTPStatus = HTTPStatus.OK) -> Reply:
    """A JSON answer."""
    return Reply(status, msgspec.json.encode(value))


def error_reply(error: ChatrtError) -> Reply:
    """An error in the API's HTTP form."""
    return json_reply({"error": error_body(error)}, HTTPStatus(error.status))


class Routes:
    """Answers the routes from the service; `sockets` tells how the connections are."""

    def __init__(self, service: Service, sockets: Callable[[], Sockets]) -> None:
        self._service = service
        self._sockets = sockets

    def open_route(self, target: Target) -> Reply | None:
        """`/health` and `/ready`, which need no key."""
        match (target.method, target.path):
            case ("GET", "/health"):
                return json_reply({"status": "ok"})
            case ("GET", "/ready"):
                if self._service.ready():
                    return json_reply({"status": "ready"})
                return json_reply({"status": "starting"}, HTTPStatus.SERVICE_UNAVAILABLE)
        return None

    async def route(self, target: Target, key_id: str) -> Reply:
        """Everything else."""
        try:
            return await self._route(target, key_id)
        except ChatrtError as error:
            return error_reply(error)
        except Exception as error:
            report(error, f"{target.method} request")
            return error_reply(internal_error())

    async def _route(self, target: Target, key_id: str) -> Reply:
        match (target.method, target.segments):
            case ("GET", ("metrics",)):
                text = await self._service.metrics(self._sockets())
                return Reply(HTTPStatus.OK, text, _PROMETHEUS)
            case ("GET", ("v1", "chatrt", "live")):
                return json_reply(await self._service.live(key_id, self._sockets()))
            case ("GET", ("v1", "models")):
                return json_reply(_list(self._service.models()))
            case ("GET", ("v1", "models", *parts)):
                return json_reply(_model("/".join(parts), self._service.models()))
            case (_, ("v1", "responses", response_id, *rest)):
                return await self._response(target.method, response_id, rest, key_id)
            case (_, ("v1", "conversations", *rest)):
                return await self._conversations(target, rest, key_id)
        raise _nothing_here(target.method, target.path)

    async def _response(
        self, method: str, response_id: str, rest: Sequence[str], key_id: str
    ) -> Reply:
        match (method, rest):
            case ("GET", []):
                return json_reply(await self._service.response(response_id, key_id))
            case ("DELETE", []):
                await self._service.delete_response(response_id, key_id)
                return json_reply({"id": response_id, "object": "response", "deleted": True})
            case ("POST", ["cancel"]):
                await self._service.cancel(response_id, key_id)
                with suppress(NotFound):  # it ended long ago
                    await _until_ended(self._service.find_log(response_id, key_id))
                return json_reply(await self._service.response(response_id, key_id))
        raise _nothing_here(method, "this path below a response")

    async def _conversations(self, target: Target, rest: Sequence[str], key_id: str) -> Reply:
        match (target.method, rest):
            case ("GET", []):
                query = target.parameter("q")
                return json_reply(_list(await self._service.conversation_list(query, key_id)))
            case ("GET", [conversation_id, "items"]):
                items = await self._service.conversation_items(conversation_id, key_id)
                return json_reply(_list(items))
            case ("GET", [conversation_id, "turns"]):
                turns = await self._service.conversation_turns(conversation_id, key_id)
                return await asyncio.to_thread(json_reply, _list(turns))
            case ("DELETE", [conversation_id]):
                await self._service.conversation_delete(conversation_id, key_id)
                deleted = {"object": "conversation.deleted", "deleted": True}
                return json_reply({"id": conversation_id, **deleted})
        raise _nothing_here(target.method, "this path below conversations")


async def _until_ended(log: ResponseLog) -> None:
    """Wait for a log's terminal event."""
    grew = asyncio.Event()
    subscription = log.subscribe(grew.set)
    try:
        while not log.finished:
            grew.clear()
            await grew.wait()
    finally:
        subscription.close()


def _list(data: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The API's list object, with all there is on its one page."""
    ids = [entry.get("id") for entry in data]
    return {
        "object": "list",
        "data": list(data),
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": False,
    }


def _model(model_id: str, models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The model of that name, which may have slashes in it."""
    for model in models:
        if model["id"] == model_id:
            return model
    served = ", ".join(str(model["id"]) for model in models)
    raise ModelNotFound(f"model {model_id} is not served here, {served} is", param="model")


def _nothing_here(method: str, path: str) -> NotFound:
    return NotFound(f"nothing answers {method} at {path}")
