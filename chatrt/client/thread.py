"""The client on a thread and event loop of its own, for programs that paint.

Knows: connecting again with growing pauses, going on with an answer whose connection was lost, and
only then watching the conversation again.
Does not know: widgets. `post` is called on this thread and must only hand the batch over.
Invariant: receive times are taken here, never on the painting loop. A turn that was handed in gets
exactly one `TurnDone`, and no question is ever sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from chatrt.client.batches import (
    Batcher,
    ConnectionState,
    ConversationMade,
    TurnDone,
    TurnEvent,
    TurnInterrupted,
)
from chatrt.client.connection import ChatClient
from chatrt.client.http import HttpRoutes, is_loopback
from chatrt.client.messages import ResponseRequest, TurnRecorder, TurnResult
from chatrt.client.typist import Typist
from chatrt.client.watcher import Watcher
from chatrt.errors import ChatrtError, NobodyListens, NotFound, ServerUnavailable

if TYPE_CHECKING:
    import ssl as ssl_module
    from collections.abc import Callable, Coroutine, Iterator
    from concurrent.futures import Future

    from chatrt.client.answer import Answer
    from chatrt.client.batches import Post
    from chatrt.client.typed_ahead import TypedAhead

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_STEADY_S = 5.0
_SETTLE_POLLS = 50
_SETTLE_PAUSE_S = 0.2


def pauses_s() -> Iterator[float]:
    """Pauses before each new attempt to connect: doubling, up to 5 s."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A turn as it was handed in: `typed` is what the server had of it before Enter."""

    turn_id: int
    request: ResponseRequest
    title: str | None
    start_ns: int
    typed: TypedAhead | None


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
        self._batcher = Batcher(post)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="chatrt-client", daemon=True)
        self._turns: dict[int, asyncio.Task[None]] = {}
        self._running: dict[int, Answer] = {}  # turns of which the server told something
        self._waiting: set[int] = set()  # turns that wait for the connection
        self._stopped: set[int] = set()
        self._cut_off: set[int] = set()  # turns that the next connection has to resume
        self._client: ChatClient | None = None
        self._typist: Typist | None = None
        self._watcher = Watcher(self._batcher)
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

    def type_ahead(self, request: ResponseRequest) -> None:
        """Let the server prefill a question that is being typed: `request` with its text so far.

        It is sent when typing pauses, and not at all when `ask` or newer text comes first or there
        is no connection. Nobody is told what became of it.
        """
        self._call(self._type, request)

    def drop_typing(self) -> None:
        """Send nothing of a half-typed text that still waits to be sent."""
        self._call(self._drop_typing)

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine, as its address says."""
        return is_loopback(self._url)

    def gather_text_for(self, seconds: float) -> None:
        """Tell of text at most so often, but for an answer's first: the pauses from now on."""
        self._batcher.pause_s = seconds

    def watch(self, conversation_id: str | None) -> None:
        """Tell what others ask in this conversation from now on; of none with None.

        `Watching` comes first, then their turns; ours are never among them.
        """
        self._call(self._watcher.watch, conversation_id)

    def rename(self, conversation_id: str, title: str) -> Future[None]:
        """Give a conversation another title; the future raises what the server says to that.

        Without a connection it raises `ServerUnavailable` at once: nothing is tried later.
        """
        return asyncio.run_coroutine_threadsafe(self._rename(conversation_id, title), self._loop)

    async def _rename(self, conversation_id: str, title: str) -> None:
        if self._client is None:
            raise ServerUnavailable("there is no connection to the server")
        await self._client.rename_conversation(conversation_id, title)

    def stop(self, turn_id: int) -> None:
        """Stop a turn: its `TurnDone` has the part of the answer that was sent.

        While the connection is lost the server is told when it is back; a second call gives up at
        once, with the part that came.
        """
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
        self._watcher.watch(None)
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
                client = await ChatClient.connect(self._url, api_key=self._api_key, ssl=self._ssl)
            except ServerUnavailable as error:
                why = error
            except ChatrtError as refused:
                self._refusal = refused
                self._settled.set()
                self._batcher.add(ConnectionState("refused", refused.message, attempt))
                return
            else:
                self._client, self._typist = client, Typist(client)
                self._settled.set()
                self._batcher.add(ConnectionState("connected", "connected", attempt))
                self._watch_again()
                connected_s = self._loop.time()
                why = _as_unavailable(await client.wait_lost())
                self._leave()
                # A server that drops each new connection must not be hammered.
                if self._loop.time() - connected_s > _STEADY_S:
                    pauses, attempt = self._pauses(), 0
            pause_s = next(pauses)
            nobody = isinstance(why, NobodyListens)
            self._batcher.add(ConnectionState("lost", why.message, attempt, pause_s, nobody))
            await asyncio.sleep(pause_s)

    def _leave(self) -> None:
        """Have no connection, if there was one."""
        if self._client is not None and self._typist is not None:
            self._settled.clear()
            self._typist.drop()
            self._watcher.use(None)
            self._client = self._typist = None

    def _watch_again(self) -> None:
        """Watch over this connection, once it resumes all that it has to.

        A subscription would bring those answers first, and as if others had asked.
        """
        if not self._cut_off and self._client is not None:
            self._watcher.use(self._client)

    async def _connected(self, turn_id: int) -> ChatClient:
        self._waiting.add(turn_id)
        try:
            while self._client is None or self._client.is_lost:
                self._leave()  # a turn may see the loss before the keeper of the connection does
                if self._refusal is not None:
                    raise self._refusal
                if turn_id in self._stopped and turn_id not in self._running:
                    raise asyncio.CancelledError
                await self._settled.wait()
            return self._client
        finally:
            self._waiting.discard(turn_id)

    def _type(self, request: ResponseRequest) -> None:
        if self._typist is not None:
            self._typist.type(request)

    def _drop_typing(self) -> None:
        if self._typist is not None:
            self._typist.drop()

    def _begin(
        self, turn_id: int, request: ResponseRequest, title: str | None, start_ns: int
    ) -> None:
        typed = self._typist.take() if self._typist is not None else None
        asked = _Asked(turn_id, request, title, start_ns, typed)
        run: Coroutine[Any, Any, None] = self._turn(asked)
        task = self._loop.create_task(run, name=f"chatrt-turn-{turn_id}")
        self._turns[turn_id] = task
        task.add_done_callback(lambda _: self._turns.pop(turn_id, None))

    def _stop(self, turn_id: int) -> None:
        if turn_id not in self._turns:
            return
        again = turn_id in self._stopped
        self._stopped.add(turn_id)
        answer = self._running.get(turn_id)
        if turn_id not in self._waiting and answer is not None:
            self._loop.create_task(_cancel_quietly(answer))
        elif turn_id in self._waiting and (answer is None or again):
            self._turns[turn_id].cancel()

    async def _turn(self, asked: _Asked) -> None:
        turn_id = asked.turn_id
        try:
            result = await self._answer(asked)
        except ChatrtError as error:
            result = TurnRecorder(asked.start_ns).result(error)
        except asyncio.CancelledError:
            # Stopped before anything was sent.
            result = replace(TurnRecorder(asked.start_ns).result(), reason="cancelled")
        finally:
            self._running.pop(turn_id, None)
            self._stopped.discard(turn_id)
        self._batcher.add(TurnDone(turn_id, result))

    async def _answer(self, asked: _Asked) -> TurnResult:
        request, start_ns = asked.request, asked.start_ns
        if self._client is None:
            await self._connected(asked.turn_id)
            start_ns = time.perf_counter_ns()
        client = await self._connected(asked.turn_id)
        if request.conversation is None and request.previous_response_id is None:
            conversation_id = await client.create_conversation(asked.title)
            self._batcher.add(ConversationMade(asked.turn_id, conversation_id))
            request = replace(request, conversation=conversation_id)
        answer = await client.send(request, start_ns=start_ns, typed=asked.typed)
        self._running[asked.turn_id] = answer
        try:
            await self._read(asked.turn_id, answer)
        except ServerUnavailable as lost:
            if answer.response_id is None:
                raise
            return await self._go_on(asked.turn_id, answer, answer.response_id, lost)
        return answer.recorder.result()

    async def _read(self, turn_id: int, answer: Answer) -> None:
        if turn_id in self._stopped:
            await answer.cancel()
        async for event in answer:
            self._batcher.add(TurnEvent(turn_id, event))

    async def _go_on(
        self, turn_id: int, answer: Answer, response_id: str, lost: ServerUnavailable
    ) -> TurnResult:
        """The rest of an answer that a lost connection cut off, over as many as it takes."""
        recorder = answer.recorder
        try:
            while True:
                self._cut_off.add(turn_id)
                self._batcher.add(TurnInterrupted(turn_id))
                client = await self._connected(turn_id)
                try:
                    answer = await client.resume(
                        response_id, after=answer.last_sequence_number, recorder=recorder
                    )
                    self._running[turn_id] = answer
                    self._resumed(turn_id)
                    await self._read(turn_id, answer)
                except ChatrtError as error:
                    if not (isinstance(error, ServerUnavailable) and client.is_lost):
                        # The server no longer has its events.
                        return await self._find_again(turn_id, answer, response_id, lost)
                    lost = error
                else:
                    return recorder.result()
        except asyncio.CancelledError:
            return recorder.result(lost)
        except ChatrtError as refusal:
            return recorder.result(refusal)
        finally:
            self._resumed(turn_id)

    def _resumed(self, turn_id: int) -> None:
        """A turn has resumed its answer, or gives up on it."""
        self._cut_off.discard(turn_id)
        self._watch_again()

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
