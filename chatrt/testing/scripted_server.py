"""A small server that speaks the wire from a script, to test clients without a model.

Knows: the event sequence of one answer, conversations in memory, the HTTP routes that clients call.
Does not know: models, limits, several keys; it checks far less than the real server.
Invariant: `requests` holds every message received, in order, as decoded JSON.
Source: PROTOCOL 1 to 4.
"""

from __future__ import annotations

import asyncio
import http
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from chatrt.client.messages import DELTA_TYPE, TERMINAL_TYPES
from chatrt.testing.scripted_answer import (
    Dropped,
    ScriptedAnswer,
    finish,
    play,
    response_object,
)
from chatrt.testing.scripted_turn import ScriptedTurn

if TYPE_CHECKING:
    import ssl as ssl_module

__all__ = ["CONTEXT_TOKENS", "Script", "ScriptedAnswer", "ScriptedServer"]

CONTEXT_TOKENS = 8192


Script = Callable[[dict[str, Any]], ScriptedAnswer]


@dataclass(slots=True)
class _Conversation:
    id: str
    title: str
    created_at: int
    tip_id: str | None = None


class ScriptedServer:
    """Serves `answers` in order (the last one again and again), or what a function says.

    `async with ScriptedServer(…) as server` starts it on a free loopback port; `stop` and `start`
    take it away and bring it back on the same port with its conversations kept.
    """

    def __init__(
        self,
        answers: Iterable[ScriptedAnswer] | Script,
        *,
        api_key: str | None = None,
        ssl: ssl_module.SSLContext | None = None,
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        self.num_connections = 0
        self._script = answers if callable(answers) else _in_order(answers)
        self._api_key = api_key
        self._ssl = ssl
        self._port = 0
        self._server: Server | None = None
        self._counter = itertools.count(1)
        self._turns: dict[str, ScriptedTurn] = {}
        self._conversations: dict[str, _Conversation] = {}
        self._running: dict[str, tuple[str | None, asyncio.Event]] = {}
        self._surviving: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The address to connect to."""
        return f"{'ws' if self._ssl is None else 'wss'}://127.0.0.1:{self._port}"

    def creates(self) -> list[dict[str, Any]]:
        """The `response.create` messages received so far."""
        return [message for message in self.requests if message["type"] == "response.create"]

    async def start(self) -> None:
        """Listen, on the port of the last time if there was one."""
        self._server = await serve(
            self._serve,
            "127.0.0.1",
            self._port,
            compression=None,
            process_request=self._http,
            ssl=self._ssl,
        )
        self._port = next(iter(self._server.sockets)).getsockname()[1]

    async def stop(self) -> None:
        """Abort every connection and answer, and stop listening."""
        for task in self._surviving:
            task.cancel()
        await asyncio.gather(*self._surviving, return_exceptions=True)
        for turn in self._turns.values():
            turn.survives = False
        if self._server is not None:
            for connection in list(self._server.connections):
                connection.transport.abort()
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _serve(self, connection: ServerConnection) -> None:
        self.num_connections += 1
        tasks: set[asyncio.Task[None]] = set()
        try:
            async for frame in connection:
                message = msgspec.json.decode(frame)
                self.requests.append(message)
                task = asyncio.create_task(self._handle(connection, message))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except ConnectionClosed:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _handle(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        match message["type"]:
            case "response.create":
                await self._create(connection, message)
            case "response.cancel":
                self._cancel(message)
            case "chatrt.resume":
                await self._resume(connection, message)
            case "chatrt.conversation.create":
                made = self._make_conversation(message.get("title") or "")
                await _send(connection, {"type": f"{message['type']}d", "conversation": made})
            case "chatrt.conversation.update":
                self._conversations[message["id"]].title = message["title"]
                await _send(connection, {"type": f"{message['type']}d", "id": message["id"]})

    def _cancel(self, message: dict[str, Any]) -> None:
        for response_id, (lane, cancelled) in self._running.items():
            if response_id == message.get("response_id") or (
                "response_id" not in message and lane == message.get("stream_id")
            ):
                cancelled.set()

    async def _resume(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        lane = {"stream_id": message["stream_id"]} if "stream_id" in message else {}
        turn = self._turns.get(message["response_id"])
        if turn is None or not turn.survives:
            missing = f"response {message['response_id']} cannot be resumed"
            error = {"code": "response_not_found", "message": missing}
            await _send(connection, {"type": "error", "status": 404, "error": error, **lane})
            return
        number = message.get("after_sequence_number", -1) + 1
        while number == 0 or turn.events[number - 1]["type"] not in TERMINAL_TYPES:
            if number == len(turn.events):
                await turn.grew.wait()
            await _send(connection, {**turn.events[number], **lane})
            number += 1

    def _make_conversation(self, title: str) -> dict[str, Any]:
        made = _Conversation(f"conv_{next(self._counter)}", title, int(time.time()))
        self._conversations[made.id] = made
        return {"id": made.id, "title": title, "created_at": made.created_at}

    async def _read_along(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        """A half-typed prompt: no answer, and its mark on every event."""
        lane = {"stream_id": message["stream_id"]} if "stream_id" in message else {}
        response = response_object("resp_half", message, message.get("previous_response_id"))
        response["metadata"] = message.get("metadata")
        await _send(connection, {"type": "response.created", "response": response, **lane})
        response["status"] = "completed"
        await _send(connection, {"type": "response.completed", "response": response, **lane})

    async def _create(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        if is_half_typed(message):
            await self._read_along(connection, message)
            return
        lane = {"stream_id": message["stream_id"]} if "stream_id" in message else {}
        parent_id = message.get("previous_response_id")
        if parent_id is not None and parent_id not in self._turns:
            error = {"code": "previous_response_not_found", "message": f"no response {parent_id}"}
            await _send(connection, {"type": "error", "status": 404, "error": error, **lane})
            return
        script = self._script(message)
        if script.error is not None:
            await _send(
                connection,
                {"type": "error", "status": 400, "error": dict(script.error), **lane},
            )
            return
        turn = self._open_turn(message, parent_id)
        turn.survives = script.survives
        answering = self._answer(connection, turn, script, lane)
        if not script.survives:
            await answering
            return
        task = asyncio.create_task(answering)
        self._surviving.add(task)
        task.add_done_callback(self._surviving.discard)

    def _open_turn(self, message: dict[str, Any], parent_id: str | None) -> ScriptedTurn:
        parent = self._turns.get(parent_id or "")
        conversation_id = parent.conversation_id if parent else message.get("conversation")
        conversation = self._conversations.get(conversation_id or "")
        if parent is None and conversation is not None:
            begins = message.get("chatrt", {}).get("new_branch")
            parent_id = None if begins else conversation.tip_id
        response_id = f"resp_{next(self._counter)}"
        turn = ScriptedTurn(
            response_object(response_id, message, parent_id),
            conversation_id,
            parent_id,
            _input_text(message.get("input", "")),
        )
        self._turns[response_id] = turn
        if conversation is not None:
            conversation.tip_id = response_id
        return turn

    async def _answer(
        self,
        connection: ServerConnection,
        turn: ScriptedTurn,
        script: ScriptedAnswer,
        lane: dict[str, str],
    ) -> None:
        response = turn.response
        cancelled = asyncio.Event()
        self._running[response["id"]] = (lane.get("stream_id"), cancelled)

        async def send(event: dict[str, Any]) -> None:
            turn.add(event)
            try:
                await _send(connection, {**event, **lane})
            except ConnectionClosed:
                if not script.survives:
                    raise
            num_deltas = sum(one["type"] == DELTA_TYPE for one in turn.events)
            if script.survives and event["type"] == DELTA_TYPE and num_deltas == script.drop_after:
                connection.transport.abort()

        try:
            await play(script, response, send, cancelled)
        except Dropped:
            if script.forgets:
                del self._turns[response["id"]]
            connection.transport.abort()
        except (ConnectionClosed, asyncio.CancelledError):
            if response["status"] == "in_progress":
                finish(response, script, num_tokens=0, cancelled=True)
        finally:
            self._running.pop(response["id"], None)

    def _http(self, _: ServerConnection, request: Request) -> Response | None:
        if self._api_key is not None:
            offered = request.headers.get("Authorization", "")
            if offered != f"Bearer {self._api_key}":
                return _json(http.HTTPStatus.UNAUTHORIZED, {"error": {"message": "bad key"}})
        if request.headers.get("Upgrade"):
            return None
        url = urlsplit(request.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        method = getattr(request, "method", "GET")
        query = parse_qs(url.query).get("q", [""])[0]
        body = self._route(method, parts, query)
        if body is None:
            missing = {"error": {"code": "not_found", "message": f"nothing at {url.path}"}}
            return _json(http.HTTPStatus.NOT_FOUND, missing)
        return _json(http.HTTPStatus.OK, body)

    def _route(self, method: str, parts: list[str], query: str) -> dict[str, Any] | None:
        match (method, parts):
            case ("GET", ["health" | "ready"]):
                return {"status": "ok"}
            case ("GET", ["v1", "models"]):
                model = {"id": "scripted", "object": "model", "max_context": CONTEXT_TOKENS}
                return {"object": "list", "data": [model]}
            case ("GET", ["v1", "responses", response_id]) if response_id in self._turns:
                return self._turns[response_id].response
            case ("GET", ["v1", "conversations"]):
                return {"object": "list", "data": self._list(query)}
            case ("GET", ["v1", "conversations", name, "items"]) if name in self._conversations:
                return {"object": "list", "data": self._items(self._conversations[name])}
            case ("GET", ["v1", "conversations", name, "turns"]) if name in self._conversations:
                turns = [t for t in self._turns.values() if t.conversation_id == name]
                return {"object": "list", "data": [turn.body() for turn in turns]}
            case ("DELETE", ["v1", "conversations", name]) if name in self._conversations:
                del self._conversations[name]
                return {"id": name, "deleted": True}
        return None

    def _branch(self, conversation: _Conversation) -> list[ScriptedTurn]:
        turns: list[ScriptedTurn] = []
        response_id = conversation.tip_id
        while response_id is not None and response_id in self._turns:
            turns.append(self._turns[response_id])
            response_id = turns[-1].parent_id
        return turns[::-1]

    def _list(self, query: str) -> list[dict[str, Any]]:
        rows = [
            {
                "id": conversation.id,
                "title": conversation.title,
                "created_at": conversation.created_at,
                "updated_at": conversation.created_at,
                "num_turns": len(self._branch(conversation)),
                "last_response_id": conversation.tip_id,
            }
            for conversation in self._conversations.values()
            if query.lower() in conversation.title.lower()
        ]
        return rows[::-1]

    def _items(self, conversation: _Conversation) -> list[dict[str, Any]]:
        return [item for turn in self._branch(conversation) for item in turn.items()]


def _in_order(answers: Iterable[ScriptedAnswer]) -> Script:
    waiting = list(answers)
    assert waiting, "a script needs at least one answer"
    return lambda _: waiting.pop(0) if len(waiting) > 1 else waiting[0]


def is_half_typed(message: dict[str, Any]) -> bool:
    """Whether a `response.create` is what a person has typed so far."""
    return bool(message.get("chatrt", {}).get("partial")) and message["generate"] is False


async def _send(connection: ServerConnection, event: Mapping[str, object]) -> None:
    await connection.send(msgspec.json.encode(event).decode())


def _input_text(given: str | list[dict[str, Any]]) -> str:
    if isinstance(given, str):
        return given
    contents = [item["content"] for item in given if item.get("role", "user") == "user"]
    return "\n".join(
        content if isinstance(content, str) else "".join(part["text"] for part in content)
        for content in contents
    )


def _json(status: http.HTTPStatus, body: Mapping[str, object]) -> Response:
    encoded = msgspec.json.encode(body)
    headers = Headers(
        {
            "Content-Type": "application/json",
            "Content-Length": str(len(encoded)),
            "Connection": "close",
        }
    )
    return Response(status.value, status.phrase, headers, encoded)
