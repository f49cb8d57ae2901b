"""Clients of a living server: connections with lanes, and all that they asked for and got.

Knows: sockets, frames, which turn a frame belongs to. Does not know: what a turn must give.
Invariant: a frame that belongs to nothing that was asked for is a fault, kept until it is raised.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from chatrt.text.messages import Message
from chatrt.wire.ids import message_id
from tests.chatrt.living_server import PATIENCE_S
from tests.chatrt.living_turns import (
    ANSWER,
    PARTIAL,
    Conversation,
    Reading,
    Turn,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

T = TypeVar("T")

_TICK_S = 0.002


@dataclass(frozen=True)
class HttpReply:
    """An HTTP answer, its JSON decoded."""

    status: int
    body: Any


@dataclass(eq=False)
class Line:
    """A connection: `waiting` are the turns of each lane that have no response yet.

    `readings` are what came by lane and response, `open_turns` those whose end is still to come.
    """

    key: str
    socket: ClientConnection
    may_read: asyncio.Event
    waiting: dict[str, deque[Turn]] = field(default_factory=dict)
    readings: dict[tuple[str, str], Reading] = field(default_factory=dict)
    open_turns: dict[tuple[str, str], Turn] = field(default_factory=dict)
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    closed: bool = False
    task: asyncio.Task[None] | None = None


class Clients:
    """All connections to one server, on an event loop of their own.

    `step` lets a held server go on a little; it is called while an answer is waited for.
    """

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="living-clients")
        self._thread.start()
        self._http = ThreadPoolExecutor(2, "living-http")
        self._changed = threading.Condition()
        self._faults: list[BaseException] = []
        self._by_message: dict[str, str] = {}  # message id → response id
        self._num_streams = 0
        self.port = 0
        self.lines: list[Line] = []
        self.turns: list[Turn] = []
        self.by_id: dict[str, Turn] = {}

    # Waiting -------------------------------------------------------------------------------------

    def until(self, holds: Callable[[], object], missing: Callable[[], object]) -> None:
        """Wait until frames that come make something true; if not, say what is `missing`.

        A held server goes on in small steps: a connection whose cancel waits for the engine reads
        nothing else meanwhile.
        """
        for _ in range(int(PATIENCE_S / _TICK_S)):
            with self._changed:
                if self._changed.wait_for(lambda: self._faults or holds(), _TICK_S):
                    break
            self._step()
        self.raise_faults()
        assert holds(), f"not within {PATIENCE_S:g} s: {missing()}"

    def done(self, future: Future[T]) -> T:
        """The result of something asked, while the server goes on in small steps."""
        for _ in range(int(PATIENCE_S / _TICK_S)):
            try:
                return future.result(_TICK_S)
            except FutureTimeout:
                self._step()
        raise AssertionError(f"no reply within {PATIENCE_S:g} s")

    def raise_faults(self) -> None:
        """Raise what went wrong on the clients' loop."""
        if self._faults:
            raise self._faults[0]

    def close(self) -> None:
        """Drop all connections and end the loop."""
        for line in [*self.lines]:
            self.drop(line, "close")
        self._http.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    # Connections ---------------------------------------------------------------------------------

    def connect(self, key: str) -> Line:
        """A new connection of a key."""
        line = self.done(self._call(self._connect(key)))
        self.lines.append(line)
        return line

    def drop(self, line: Line, how: str) -> None:
        """Lose a connection: `abort` resets it, `close` says so before.

        What nobody could come back to is dropped: what waited, and what was half typed.
        """
        self.lines.remove(line)
        self.done(self._call(self._drop(line, how)))
        read_elsewhere = {turn for other in self.lines for turn in other.open_turns.values()}
        for turn in [*line.open_turns.values(), *(t for q in line.waiting.values() for t in q)]:
            if turn.is_open and turn not in read_elsewhere:
                turn.may |= {"cancelled"}
            if turn.is_open and (turn.response_id is None or turn.kind == PARTIAL):
                turn.dropped = True

    def stall(self, line: Line, *, reads: bool) -> None:
        """Stop reading, or go on."""

        async def switch() -> None:
            (line.may_read.set if reads else line.may_read.clear)()

        self.done(self._call(switch()))

    # What is asked -------------------------------------------------------------------------------

    def ask(
        self,
        line: Line,
        lane: str,
        text: str,
        *,
        kind: str = ANSWER,
        parents: Iterable[Turn | None] = (None,),
        chat: Conversation | None = None,
        **fields: Any,
    ) -> Turn:
        """Send a create; `chat` is where it belongs, `fields` are the frame's."""
        parents = list(parents)
        frame: dict[str, Any] = {
            "type": "response.create",
            "input": text,
            "stream_id": lane,
            "metadata": {"number": str(len(self.turns))},
            **fields,
        }
        if kind != ANSWER:
            frame["generate"] = False
        if kind == PARTIAL:
            frame["chatrt"] = {**frame.get("chatrt", {}), "partial": True}
        turn = Turn(len(self.turns), line.key, kind, frame, (Message("user", text),), parents, chat)
        self.turns.append(turn)
        queue = line.waiting.setdefault(lane, deque())
        for older in [t for t in queue if t.kind == PARTIAL]:
            older.may.add("cancelled")
        for older in line.open_turns.values():
            if older.kind == PARTIAL and older.frame["stream_id"] == lane:
                older.may.add("cancelled")
        queue.append(turn)
        self.send(line, frame)
        return turn

    def send(self, line: Line, frame: dict[str, Any]) -> None:
        """Send a frame."""
        self.done(self._call(line.socket.send(json.dumps(frame))))

    def request(self, line: Line, frame: dict[str, Any]) -> dict[str, Any]:
        """Send a frame that is replied to by one event; the event."""
        stream_id = self.new_stream()
        self.send(line, {**frame, "stream_id": stream_id})
        self.reply_on(line, stream_id)
        return line.replies.pop(stream_id)

    def reply_on(self, line: Line, stream_id: str) -> None:
        """Wait for a reply, or the first frame of a response, on a stream."""
        self.until(lambda: stream_id in line.replies, lambda: stream_id)

    def new_stream(self) -> str:
        """A lane's name that was not used yet."""
        self._num_streams += 1
        return f"stream-{self._num_streams % 24}"

    def resume(self, line: Line, turn: Turn, reading: Reading) -> dict[str, Any] | None:
        """Read a response on from `reading.after`; the error if it is refused."""
        assert turn.response_id is not None
        stream_id = self.new_stream()
        frame: dict[str, Any] = {
            "type": "chatrt.resume",
            "response_id": turn.response_id,
            "stream_id": stream_id,
        }
        if reading.after is not None:
            frame["after_sequence_number"] = reading.after
        place = (stream_id, turn.response_id)
        line.readings[place], line.open_turns[place] = reading, turn
        turn.readings.append(reading)
        self.send(line, frame)
        # A refusal comes at once, and before the answer to what is asked next.
        probe = self.request(line, {"type": "chatrt.conversation.subscribe", "id": "none"})
        assert probe["type"] == "error"
        event = line.replies.pop(stream_id, None)
        if event is None:
            return None
        turn.readings.remove(reading)
        del line.readings[place], line.open_turns[place]
        refused: dict[str, Any] = event["error"]
        return refused

    def http(self, method: str, path: str, key: str) -> HttpReply:
        """An HTTP request to the server."""
        return self.done(self._http.submit(self._http_call, method, path, key))

    # Inside --------------------------------------------------------------------------------------

    def _http_call(self, method: str, path: str, key: str) -> HttpReply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, headers={"Authorization": f"Bearer {key}"})
            response = connection.getresponse()
            return HttpReply(response.status, json.loads(response.read() or b"null"))
        finally:
            connection.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _connect(self, key: str) -> Line:
        socket = await connect(
            f"ws://127.0.0.1:{self.port}/v1/responses",
            additional_headers={"Authorization": f"Bearer {key}"},
            compression=None,
            max_size=None,
            max_queue=1,
        )
        may_read = asyncio.Event()
        may_read.set()
        line = Line(key, socket, may_read)
        line.task = asyncio.create_task(self._read(line))
        return line

    async def _drop(self, line: Line, how: str) -> None:
        line.closed = True
        if how == "abort":
            line.socket.transport.abort()
        else:
            line.may_read.set()
            await line.socket.close()
        assert line.task is not None
        line.task.cancel()
        await asyncio.gather(line.task, return_exceptions=True)
        await line.socket.wait_closed()

    async def _read(self, line: Line) -> None:
        try:
            while True:
                await line.may_read.wait()
                event = json.loads(await line.socket.recv())
                with self._changed:
                    self._take(line, event)
                    self._changed.notify_all()
        except ConnectionClosed:
            line.closed = True
            with self._changed:
                self._changed.notify_all()
        except Exception as error:  # the edge of the task: raised where it is waited for
            with self._changed:
                self._faults.append(error)
                self._changed.notify_all()

    def _take(self, line: Line, event: dict[str, Any]) -> None:
        stream_id = event["stream_id"]
        if not event["type"].startswith("response."):
            self._reply(line, stream_id, event)
            return
        response_id = self._response_id(event)
        if event["type"] == "response.created":
            self._created(line, stream_id, response_id, event)
        turn = self.by_id[response_id]
        place = (stream_id, response_id)
        reading = line.readings.get(place)
        if reading is None:
            reading = line.readings[place] = Reading()
            line.open_turns[place] = turn
            turn.readings.append(reading)
        reading.take(event)
        if reading.end is not None:
            del line.open_turns[place]
            turn.end = turn.end or reading.end
            assert turn.end["output"] == reading.end["output"]
            assert turn.end["usage"] == reading.end["usage"]

    def _reply(self, line: Line, stream_id: str, event: dict[str, Any]) -> None:
        waiting = list(line.waiting.get(stream_id, ()))
        partial = event.get("chatrt", {}).get("partial", False)
        of_kind = [t for t in waiting if (t.kind == PARTIAL) == partial]
        if event["type"] != "error" or not of_kind:
            line.replies[stream_id] = event
            return
        of_kind[0].error = event["error"]
        self._leave_queue(line.waiting[stream_id], of_kind[0])

    def _created(self, line: Line, stream_id: str, response_id: str, event: dict[str, Any]) -> None:
        turn = self.turns[int(event["response"]["metadata"]["number"])]
        assert turn.response_id in (None, response_id), "two responses to one create"
        turn.response_id = response_id
        turn.dropped = False
        self.by_id[response_id] = turn
        self._by_message[message_id(response_id)] = response_id
        # One that views, or resumes, did not ask.
        if turn in line.waiting.get(stream_id, ()):
            self._leave_queue(line.waiting[stream_id], turn)

    @staticmethod
    def _leave_queue(queue: deque[Turn], turn: Turn) -> None:
        """A turn's fate is known: half-typed prompts before it were dropped without a word."""
        for older in [t for t in queue if t.number < turn.number]:
            assert older.kind == PARTIAL, "a lane answers in order"
            older.dropped = True
            queue.remove(older)
        queue.remove(turn)

    def _response_id(self, event: dict[str, Any]) -> str:
        if "response" in event:
            found: str = event["response"]["id"]
            return found
        item_id = event.get("item_id") or event["item"]["id"]
        return self._by_message[item_id]
