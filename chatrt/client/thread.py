"""The client on a thread and event loop of its own, for programs that paint.

Knows: connecting again with growing pauses, what becomes of an answer whose connection was lost,
how events are gathered into batches.
Does not know: widgets. `post` is called on this thread and must only hand the batch over.
Invariant: receive times are taken here, never on the painting loop. The first delta of an answer
is posted at once, later ones at most `_BATCHES_PER_S` times a second. A turn that was handed in
gets exactly one `TurnDone`, and no request is ever sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from chatrt.client.connection import Answer, ChatClient
from chatrt.client.http import HttpRoutes
from chatrt.client.messages import (
    DELTA_TYPE,
    ClientEvent,
    ResponseRequest,
    TurnRecorder,
    TurnResult,
)
from chatrt.errors import ChatrtError, NotFound, ServerUnavailable

if TYPE_CHECKING:
    import ssl as ssl_module

_BATCHES_PER_S = 30
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_STEADY_S = 5.0
_SETTLE_POLLS = 50
_SETTLE_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """The connection changed; `message` is a sentence for people.

    `lost` is followed by a new attempt after `retry_in_s`; `refused` is final.
    """

    kind: Literal["connecting", "connected", "lost", "refused"]
    message: str
    attempt: int = 0
    retry_in_s: float = 0.0


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
    """The connection was lost in mid-answer; `TurnDone` follows when it is back."""

    turn_id: int


@dataclass(frozen=True, slots=True)
class TurnDone:
    """The turn ended, well or not."""

    turn_id: int
    result: TurnResult


ThreadEvent: TypeAlias = ConnectionState | ConversationMade | TurnEvent | TurnInterrupted | TurnDone
Post: TypeAlias = Callable[[Sequence[ThreadEvent]], None]


def pauses_s() -> Iterator[float]:
    """Pauses before each new attempt to connect: doubling, up to 5 s."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _Batcher:
    """Gathers events for `post`; belongs to the thread's loop."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._waiting: list[ThreadEvent] = []
        self._timer: asyncio.TimerHandle | None = None
        self._streaming: set[int] = set()

    def add(self, event: ThreadEvent) -> None:
        """Post `event`: at once, or with the next batch if it is a later delta of its turn."""
        self._waiting.append(event)
        if isinstance(event, TurnDone):
            self._streaming.discard(event.turn_id)
        if isinstance(event, TurnEvent) and event.event.type == DELTA_TYPE:
            if event.turn_id in self._streaming:
                if self._timer is None:
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(1 / _BATCHES_PER_S, self.flush)
                return
            self._streaming.add(event.turn_id)
        self.flush()

    def flush(self) -> None:
        """Post what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            batch, self._waiting = self._waiting, []
            self._post(batch)


class ClientThread:
    """Keeps one connection to `url` alive and runs turns over it.

    Made and used by the program's own thread; `start` returns at once, `post` tells the rest.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        post: Post,
        ssl: ssl_module.SSLContext | None = None,
        pauses: Callable[[], Iterator[float]] = pauses_s,
    ) -> None:
        self.http = HttpRoutes(url, api_key=api_key, ssl=ssl)
        self._url = url
        self._api_key = api_key
        self._ssl = ssl
        self._pauses = pauses
        self._batcher = _Batcher(post)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="chatrt-client", daemon=True)
        self._turns: dict[int, asyncio.Task[None]] = {}
        self._running: dict[int, Answer] = {}
        self._waiting: set[int] = set()  # turns that wait for the connection
        self._stopped: set[int] = set()
        self._client: ChatClient | None = None
        self._settled = asyncio.Event()  # connected, or refused for good
        self._refusal: ChatrtError | None = None
        self._closing = asyncio.Event()

    def start(self) -> None:
        """Start the thread; it connects, and connects again whenever the connection is lost."""
        self._thread.start()

    def ask(self, turn_id: int, request: ResponseRequest, *, title: str | None = None) -> None:
        """Run one turn; its TTFT counts from this call, or from the connection if that comes later.

        A request with neither `conversation` nor `previous_response_id` opens a conversation called
        `title` first. Before there is a connection the turn waits for it.
        """
        start_ns = time.perf_counter_ns()
        self._call(self._begin, turn_id, request, title, start_ns)

    def stop(self, turn_id: int) -> None:
        """Stop a turn: its `TurnDone` has the part of the answer that was sent."""
        self._call(self._stop, turn_id)

    def close(self, *, timeout_s: float = 3.0) -> None:
        """Close the connection and end the thread."""
        if self._thread.is_alive():
            self._call(self._closing.set)
            self._thread.join(timeout_s)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        # A loop that has closed has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        keeper = asyncio.create_task(self._keep_connected())
        await self._closing.wait()
        tasks = [keeper, *self._turns.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    async def _keep_connected(self) -> None:
        pauses, attempt, connected_s = self._pauses(), 0, 0.0
        while True:
            attempt += 1
            self._batcher.add(ConnectionState("connecting", "connecting", attempt))
            try:
                self._client = await ChatClient.connect(
                    self._url, api_key=self._api_key, ssl=self._ssl
                )
            except ServerUnavailable as error:
                why = error
            except ChatrtError as refused:
                self._refusal = refused
                self._settled.set()
                self._batcher.add(ConnectionState("refused", refused.message, attempt))
                return
            else:
                self._settled.set()
                self._batcher.add(ConnectionState("connected", "connected", attempt))
                connected_s = self._loop.time()
                why = _as_unavailable(await self._client.wait_lost())
                self._settled.clear()
                self._client = None
                # A server that drops each new connection must not be hammered.
                if self._loop.time() - connected_s > _STEADY_S:
                    pauses, attempt = self._pauses(), 0
            pause_s = next(pauses)
            self._batcher.add(ConnectionState("lost", why.message, attempt, pause_s))
            await asyncio.sleep(pause_s)

    async def _connected(self, turn_id: int) -> ChatClient:
        self._waiting.add(turn_id)
        try:
            while self._client is None:
                if self._refusal is not None:
                    raise self._refusal
                if turn_id in self._stopped:
                    raise asyncio.CancelledError
                await self._settled.wait()
            return self._client
        finally:
            self._waiting.discard(turn_id)

    def _begin(
        self, turn_id: int, request: ResponseRequest, title: str | None, start_ns: int
    ) -> None:
        run: Coroutine[Any, Any, None] = self._turn(turn_id, request, title, start_ns)
        task = self._loop.create_task(run, name=f"chatrt-turn-{turn_id}")
        self._turns[turn_id] = task
        task.add_done_callback(lambda _: self._turns.pop(turn_id, None))

    def _stop(self, turn_id: int) -> None:
        if turn_id not in self._turns:
            return
        self._stopped.add(turn_id)
        answer = self._running.get(turn_id)
        if turn_id in self._waiting:
            self._turns[turn_id].cancel()
        elif answer is not None:
            self._loop.create_task(_cancel_quietly(answer))

    async def _turn(
        self, turn_id: int, request: ResponseRequest, title: str | None, start_ns: int
    ) -> None:
        try:
            result = await self._answer(turn_id, request, title, start_ns)
        except ChatrtError as error:
            result = TurnRecorder(start_ns).result(error)
        except asyncio.CancelledError:
            # Stopped before anything was sent.
            result = replace(TurnRecorder(start_ns).result(), reason="cancelled")
        finally:
            self._running.pop(turn_id, None)
            self._stopped.discard(turn_id)
        self._batcher.add(TurnDone(turn_id, result))

    async def _answer(
        self, turn_id: int, request: ResponseRequest, title: str | None, start_ns: int
    ) -> TurnResult:
        if self._client is None:
            await self._connected(turn_id)
            start_ns = time.perf_counter_ns()
        client = await self._connected(turn_id)
        if request.conversation is None and request.previous_response_id is None:
            conversation_id = await client.create_conversation(title)
            self._batcher.add(ConversationMade(turn_id, conversation_id))
            request = replace(request, conversation=conversation_id)
        answer = await client.send(request, start_ns=start_ns)
        self._running[turn_id] = answer
        if turn_id in self._stopped:
            await answer.cancel()
        try:
            async for event in answer:
                self._batcher.add(TurnEvent(turn_id, event))
        except ServerUnavailable as lost:
            self._running.pop(turn_id, None)
            if answer.response_id is None:
                raise
            self._batcher.add(TurnInterrupted(turn_id))
            try:
                return await self._find_again(turn_id, answer, answer.response_id, lost)
            except asyncio.CancelledError:
                return answer.recorder.result(lost)
        return answer.recorder.result()

    async def _find_again(
        self, turn_id: int, answer: Answer, response_id: str, lost: ServerUnavailable
    ) -> TurnResult:
        """What the server kept of an answer that a lost connection cut off."""
        for _ in range(_SETTLE_POLLS):
            client = await self._connected(turn_id)
            try:
                response = await client.http.response(response_id)
                if response.get("status") not in ("in_progress", "queued"):
                    return answer.recorder.settled(response)
                await client.cancel(response_id)
            except NotFound:
                break
            except ServerUnavailable:
                pass  # lost once more
            await asyncio.sleep(_SETTLE_PAUSE_S)
        return answer.recorder.result(lost)


def _as_unavailable(error: ChatrtError) -> ServerUnavailable:
    return error if isinstance(error, ServerUnavailable) else ServerUnavailable(error.message)


async def _cancel_quietly(answer: Answer) -> None:
    # When the connection is gone the turn itself says so.
    with contextlib.suppress(ChatrtError):
        await answer.cancel()
