"""The lanes of a connection: first-in-first-out within one, side by side among them.

Knows: queues and their limits, which turn of a lane is at work. Does not know: sockets, events.
Invariant: a lane answers its creates in order, refusals included; a typed-ahead create never stands
in front of an answer, and only the newest one is kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from chatrt.errors import ChatrtError, Conflict, Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chatrt.wire.log import ResponseLog
    from chatrt.wire.messages import ResponseCreate


@dataclass(frozen=True, slots=True)
class Waiting:
    """A create that was read at `received_ns` and waits for its lane."""

    message: ResponseCreate
    received_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class Resumed:
    """A response of before that is sent on this lane now; `sent` is set once its end is out."""

    log: ResponseLog
    sent: asyncio.Event


class LaneHost(Protocol):
    """Does the work of a lane."""

    async def answer(self, lane: Lane, waiting: Waiting) -> None:
        """Create the response and return when its last event was sent."""
        ...

    async def follow(self, lane: Lane, resumed: Resumed) -> None:
        """Return when the last event of a resumed response was sent."""
        ...

    async def prefill(self, lane: Lane, waiting: Waiting) -> None:
        """Create a typed-ahead response and return at once."""
        ...

    def refuse(self, lane: Lane, error: ChatrtError) -> None:
        """Tell the client that a create was refused."""
        ...


class Lane:
    """One lane. `log` is the response at work; `generation` counts the creates that came."""

    def __init__(self, stream_id: str | None, host: LaneHost, max_queued: int) -> None:
        self.stream_id = stream_id
        self.log: ResponseLog | None = None
        self.cancel_asked = asyncio.Event()
        self.generation = 0
        self._host = host
        self._max_queued = max_queued
        self._queue: deque[Waiting | Resumed | ChatrtError] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._typed_ahead: Waiting | None = None
        self._typist: asyncio.Task[None] | None = None

    @property
    def worker(self) -> asyncio.Task[None] | None:
        """The task that answers; None while the lane has nothing to answer."""
        return self._worker

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """All tasks of this lane that run."""
        return [task for task in (self._worker, self._typist) if task is not None]

    def submit(self, item: Waiting | ChatrtError) -> None:
        """Queue a create, or the refusal of one, behind what is there.

        Raises:
            Overloaded: The lane's queue is full.
        """
        if len(self._queue) >= self._max_queued:
            raise Overloaded(
                f"{len(self._queue)} requests wait on this lane, at most {self._max_queued} may"
            )
        self.generation += 1
        self._typed_ahead = None
        self._queue.append(item)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())

    def follow(self, resumed: Resumed) -> None:
        """Be at work on a resumed response: later creates wait for its end.

        Raises:
            Conflict: The lane is at work on another one.
        """
        if self._worker is not None:
            at_work = "another response" if self.log is None else f"response {self.log.response_id}"
            raise Conflict(
                f"this lane is busy with {at_work}; wait for its end, or resume "
                f"{resumed.log.response_id} on another lane",
                param="stream_id",
            )
        self._queue.append(resumed)
        self._worker = asyncio.create_task(self._work())

    def type_ahead(self, waiting: Waiting) -> None:
        """Prefill a half-typed prompt once the lane is free; replaces the one before.

        One that is replaced before it started is dropped without an event: typing goes on, and
        nobody waits for it.
        """
        self._typed_ahead = waiting
        if self._worker is None and self._typist is None:
            self._typist = asyncio.create_task(self._type())

    async def _work(self) -> None:
        try:
            while self._queue:
                item = self._queue.popleft()
                if isinstance(item, ChatrtError):
                    self._host.refuse(self, item)
                elif isinstance(item, Resumed):
                    await self._host.follow(self, item)
                else:
                    await self._host.answer(self, item)
                self.cancel_asked.clear()
        finally:
            self._worker = None
        if self._typed_ahead is not None:
            self.type_ahead(self._typed_ahead)

    async def _type(self) -> None:
        while self._typed_ahead is not None and self._worker is None:
            waiting, self._typed_ahead = self._typed_ahead, None
            await self._host.prefill(self, waiting)
        self._typist = None
        if self._typed_ahead is not None and self._worker is None:
            self.type_ahead(self._typed_ahead)


class Lanes:
    """All lanes of a connection, at most `max_names` of them named."""

    def __init__(self, host: LaneHost, *, max_names: int, max_queued: int) -> None:
        self._host = host
        self._max_names = max_names
        self._max_queued = max_queued
        self._lanes: dict[str | None, Lane] = {}

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._lanes.values()))

    def find(self, stream_id: str | None) -> Lane | None:
        """The lane of that name, if it was used before."""
        return self._lanes.get(stream_id)

    def open(self, stream_id: str | None) -> Lane:
        """The lane of that name, new if need be.

        Raises:
            Overloaded: Too many names (code `websocket_stream_limit_reached`).
        """
        lane = self._lanes.get(stream_id)
        if lane is None:
            num_names = sum(name is not None for name in self._lanes)
            if stream_id is not None and num_names >= self._max_names:
                raise Overloaded(
                    f"this connection has {num_names} lanes, at most {self._max_names} are allowed",
                    param="stream_id",
                    code="websocket_stream_limit_reached",
                )
            lane = self._lanes[stream_id] = Lane(stream_id, self._host, self._max_queued)
        return lane
