"""One WebSocket to the server: several answers at once, each an async iterator of stamped events.

Knows: lanes, which event belongs to which answer or watch, the client's verbs.
Does not know: threads, reconnecting, how an answer is shown.
Invariant: every answer has a lane of its own while it runs (a `stream_id` is always sent), so an
event with a `stream_id` belongs to the one answer on that lane, or to the one subscription, and an
event without one answers the one outstanding connection-level request. Nothing is ever guessed from
order alone.
Cost: events wait in memory, unbounded, until their iterator is read.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
from websockets.exceptions import ConnectionClosed

from chatrt.client.answer import Answer
from chatrt.client.http import HttpRoutes, websocket_url
from chatrt.client.messages import (
    TERMINAL_TYPES,
    ClientEvent,
    ResponseRequest,
    TurnRecorder,
    error_from_wire,
)
from chatrt.client.sockets import StampedConnection, lost_error, open_socket
from chatrt.client.typed_ahead import TypedAhead, is_of_partial
from chatrt.client.watch import Subscription, Watch
from chatrt.errors import ChatrtError, ServerUnavailable

if TYPE_CHECKING:
    import ssl as ssl_module
    from collections.abc import Mapping
    from types import TracebackType

T = TypeVar("T")

MAX_ACTIVE_LANES = 16
_REPLY_TIMEOUT_S = 10.0
_MOST_SUBSCRIPTIONS = 16  # kept on one connection, of the 32 that a server lets begin


class ChatClient:
    """A connection to one server, made by `ChatClient.connect`, closed by `close` or `async with`.

    At most 16 answers run at once; a further `send` waits for a lane.
    """

    def __init__(self, websocket: StampedConnection, http: HttpRoutes) -> None:
        self.http = http
        self._websocket = websocket
        self._answers: dict[str, Answer] = {}
        self._typed: dict[str, TypedAhead] = {}
        self._subscriptions: dict[str, Subscription] = {}  # by conversation
        self._subscribed_lanes: dict[str, Subscription] = {}
        self._num_subscribed = 0  # so far: no lane's name is used twice
        self._free_lanes: asyncio.LifoQueue[str] = asyncio.LifoQueue()
        for index in reversed(range(MAX_ACTIVE_LANES)):
            self._free_lanes.put_nowait(f"lane-{index}")
        self._request_lock = asyncio.Lock()
        self._reply: asyncio.Future[dict[str, Any]] | None = None
        self._lost: ChatrtError | None = None
        self._reader = asyncio.create_task(self._read(), name="chatrt-client-reader")

    @classmethod
    async def connect(
        cls, url: str, *, api_key: str | None = None, ssl: ssl_module.SSLContext | None = None
    ) -> Self:
        """Connect to `url` (ws, wss, http or https; without a path, `/v1/responses` is meant).

        Raises:
            ServerUnavailable: Nothing answers, or it is not (yet) a chat server.
            CallerError: The server refuses the key or the origin, code `invalid_api_key`.
        """
        address = websocket_url(url)
        websocket = await open_socket(address, api_key, ssl)
        return cls(websocket, HttpRoutes(url, api_key=api_key, ssl=ssl))

    async def type_ahead(
        self, request: ResponseRequest, typed: TypedAhead | None = None
    ) -> TypedAhead:
        """Send `request` as a half-typed prompt, to be prefilled while its rest is typed.

        The first one takes a free lane; later ones go out behind it, on `typed`, and supersede it.
        What becomes of it shows in no answer: refusals are logged.

        Raises:
            ServerUnavailable: The connection is gone.
        """
        self._check_open()
        if typed is None or self._kept_lane(typed) is None:
            typed = TypedAhead(await self._free_lanes.get())
            self._typed[typed.lane] = typed
        try:
            await self._write(typed.message(request))
        except (ChatrtError, asyncio.CancelledError):
            self._free(typed.lane)
            raise
        return typed

    async def send(
        self,
        request: ResponseRequest,
        *,
        start_ns: int | None = None,
        typed: TypedAhead | None = None,
    ) -> Answer:
        """Send `request` on a free lane, or on that of `typed`, what was typed of it ahead.

        `start_ns` moves the start of the turn, from which TTFT counts, to before this call.

        Raises:
            ServerUnavailable: The connection is gone.
        """
        self._check_open()
        lane = self._kept_lane(typed) or await self._free_lanes.get()
        answer = Answer(self, lane, start_ns)
        self._answers[lane] = answer
        try:
            await self._write(request.to_message(lane))
        except ChatrtError:
            self._free(lane)
            raise
        return answer

    async def resume(
        self, response_id: str, *, after: int | None, recorder: TurnRecorder | None = None
    ) -> Answer:
        """Go on with a response that another connection began, behind its event number `after`.

        `recorder` is the one of the part before: text and figures go on in it. Without one the
        figures begin now. `after` None gives all events. Resume before you subscribe to the
        conversation, which would send the whole answer.

        Raises:
            ServerUnavailable: The connection is gone.

        Iterating raises `NotFound` if the server does not hold the response any more, and
        `InvalidValue` if nothing can follow `after`.
        """
        self._check_open()
        lane = await self._free_lanes.get()
        answer = Answer(self, lane, None, recorder)
        answer.recorder.response_id = response_id
        self._answers[lane] = answer
        message = {"type": "chatrt.resume", "response_id": response_id, "stream_id": lane}
        try:
            await self._write(
                message if after is None else {**message, "after_sequence_number": after}
            )
        except ChatrtError:
            self._free(lane)
            raise
        return answer

    async def chat(
        self,
        text: str,
        *,
        previous_response_id: str | None = None,
        conversation: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        chatrt: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Send `text` as one user message; see `ResponseRequest` for the arguments."""
        return await self.send(
            ResponseRequest(
                input=text,
                previous_response_id=previous_response_id,
                conversation=conversation,
                sampling=sampling or {},
                chatrt=chatrt or {},
            )
        )

    async def cancel(self, response_id: str | None, *, stream_id: str | None = None) -> None:
        """Stop a response by its id or, before it has one, the response running on a lane."""
        named = {"response_id": response_id} if response_id else {"stream_id": stream_id}
        await self._write({"type": "response.cancel", **named})

    async def create_conversation(self, title: str | None = None) -> str:
        """Make a conversation and return its id."""
        message = {"type": "chatrt.conversation.create"}
        reply = await self._request(message | ({"title": title} if title else {}))
        nested = reply.get("conversation")
        found = nested.get("id") if isinstance(nested, dict) else reply.get("id")
        if not found:
            raise ServerUnavailable("the server made a conversation but did not say its id")
        return str(found)

    async def rename_conversation(self, conversation_id: str, title: str) -> None:
        """Set a conversation's title."""
        await self._request(
            {"type": "chatrt.conversation.update", "id": conversation_id, "title": title}
        )

    async def subscribe(self, conversation_id: str) -> Watch:
        """Watch what other connections ask in a conversation, and how it is answered.

        One watch of a conversation at a time: a new one takes the place of the one before.

        Raises:
            NotFound: There is no such conversation.
            Overloaded: This connection has watched as many conversations as the server allows.
            ServerUnavailable: The connection is gone, or the server does not answer.
        """
        self._check_open()
        found = self._subscriptions.get(conversation_id)
        if found is None:
            await self._leave_oldest()
            self._num_subscribed += 1
            found = Subscription(f"watch-{self._num_subscribed}")
            self._subscriptions[conversation_id] = self._subscribed_lanes[found.lane] = found
        watch = found.open()
        if not found.is_confirmed:
            message = {"type": "chatrt.conversation.subscribe", "id": conversation_id}
            try:
                await self._confirmed({**message, "stream_id": found.lane}, found.expect_reply())
            except (ChatrtError, asyncio.CancelledError):
                watch.close()
                raise
        return watch

    async def _leave_oldest(self) -> None:
        """Let go of a conversation that nobody watches any more, where there are many of them."""
        idle = [id for id, found in self._subscriptions.items() if not found.is_watched]
        if len(self._subscriptions) >= _MOST_SUBSCRIPTIONS and idle:
            lane = self._subscriptions.pop(idle[0]).lane
            del self._subscribed_lanes[lane]
            message = {"type": "chatrt.conversation.unsubscribe", "id": idle[0]}
            await self._write({**message, "stream_id": lane})

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        return self._lost is not None

    async def wait_lost(self) -> ChatrtError:
        """Wait until the connection is gone, and say why."""
        await asyncio.wait([self._reader])
        assert self._lost is not None
        return self._lost

    async def close(self) -> None:
        """Close the connection; answers that still run end with `ServerUnavailable`."""
        await self._websocket.close()
        await asyncio.wait([self._reader])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def _write(self, message: Mapping[str, Any]) -> None:
        self._check_open()
        try:
            await self._websocket.send(msgspec.json.encode(message).decode())
        except ConnectionClosed as closed:
            raise lost_error(closed) from closed

    async def _request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a connection-level request and wait for its reply; one is outstanding at a time."""
        async with self._request_lock:
            self._reply = asyncio.get_running_loop().create_future()
            try:
                return await self._confirmed(message, self._reply)
            finally:
                self._reply = None

    async def _confirmed(self, message: Mapping[str, Any], reply: asyncio.Future[T]) -> T:
        """Send `message` and wait for its reply."""
        await self._write(message)
        try:
            async with asyncio.timeout(_REPLY_TIMEOUT_S):
                return await reply
        except TimeoutError as error:
            raise ServerUnavailable(
                f"the server did not answer {message['type']} within {_REPLY_TIMEOUT_S:g} s"
            ) from error

    async def _read(self) -> None:
        lost: ChatrtError
        try:
            while True:
                frame = await self._websocket.recv()
                self._route(frame, self._websocket.stamps_ns.popleft())
        except ConnectionClosed as closed:
            lost = lost_error(closed)
        except msgspec.DecodeError as error:
            lost = ServerUnavailable(f"the server sent a frame that is not JSON: {error}")
            await self._websocket.close(1002)
        self._lost = lost
        for typed in self._typed.values():
            typed.lose()
        for subscription in self._subscriptions.values():
            subscription.lose(lost)
        for lane in list(self._answers):
            self._answers[lane].deliver(lost)
            self._free(lane)
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(lost)

    def _route(self, frame: str | bytes, received_ns: int) -> None:
        data = msgspec.json.decode(frame, type=dict[str, Any])
        kind = str(data.get("type", ""))
        lane = data.get("stream_id")
        error = (
            error_from_wire(data.get("error"), int(data.get("status") or 400))
            if kind == "error"
            else None
        )
        if lane is None:
            self._answer_request(kind, data, error)
            return
        if (subscription := self._subscribed_lanes.get(str(lane))) is not None:
            if error is None:
                subscription.take(ClientEvent(kind, data, received_ns))
            else:
                subscription.refuse(error)
            return
        answer, typed = self._answers.get(str(lane)), self._typed.get(str(lane))
        if answer is None or is_of_partial(data):
            if typed is not None:
                typed.take(kind, error)
            return  # else its answer has ended: a cancel that came too late
        answer.deliver(error or ClientEvent(kind, data, received_ns))
        if error is not None or kind in TERMINAL_TYPES:
            self._free(str(lane))

    def _answer_request(self, kind: str, data: dict[str, Any], error: ChatrtError | None) -> None:
        if self._reply is None or self._reply.done():
            return
        if error is not None:
            self._reply.set_exception(error)
        elif kind.startswith("chatrt."):
            self._reply.set_result(data)

    def _kept_lane(self, typed: TypedAhead | None) -> str | None:
        """The lane of `typed`, None once its question was sent or the connection was lost."""
        if typed is None or typed.lane in self._answers or self._typed.get(typed.lane) is not typed:
            return None
        return typed.lane

    def _free(self, lane: str) -> None:
        answer, typed = self._answers.pop(lane, None), self._typed.pop(lane, None)
        if answer is not None or typed is not None:
            self._free_lanes.put_nowait(lane)
