"""What one connection sends: pulled from the logs one event at a time, as the socket takes it.

Knows: subscriptions, fairness, the byte limit. Does not know: the socket, lanes, what events mean.
Invariant: an event is taken from its log only when it can be sent next, so that deltas merge as
late as possible and a slow client holds cursors, not frames. Subscriptions take turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.wire.log import DELTA

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt.server.service import Service
    from chatrt.wire.encode import Event
    from chatrt.wire.log import ResponseLog, Subscription

_MAX_REPLIES = 64  # past this the reader waits: a client that only writes fills no memory


@dataclass(slots=True, eq=False)
class _Source:
    """A log that is being sent, and what to call when its last event was."""

    subscription: Subscription
    on_sent: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One event to send now."""

    event: Event
    source: _Source | None


class Outbox:
    """Replies (sent first) and logs (in turn) of one connection.

    Past `limit_bytes` of waiting text the service pauses the responses that add to it; at half of
    that it resumes them.
    """

    def __init__(self, service: Service, limit_bytes: int) -> None:
        self._service = service
        self._limit_bytes = limit_bytes
        self._replies: deque[Event] = deque()
        self._sources: deque[_Source] = deque()
        self._paused: set[str] = set()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def pending_bytes(self) -> int:
        """Approximate bytes that wait in the logs for this connection."""
        return sum(source.subscription.pending_bytes for source in self._sources)

    def reply(self, event: Event) -> None:
        """Send an event that belongs to no log."""
        self._replies.append(event)
        if len(self._replies) >= _MAX_REPLIES:
            self._room.clear()
        self._wake()

    def attach(
        self,
        log: ResponseLog,
        *,
        stream_id: str | None,
        on_sent: Callable[[], None],
        after: int | None = None,
    ) -> None:
        """Send a log from behind event number `after`, or from its start.

        `on_sent` is called once its end is out, or at `close`.
        """
        others_lag = log.least_pending_bytes > self._limit_bytes // 2
        subscription = log.subscribe(lambda: self._grew(log), stream_id=stream_id, after=after)
        self._sources.append(_Source(subscription, on_sent))
        if others_lag and not log.finished:
            # One of them may have had it paused, perhaps a dead one that nobody noticed yet.
            self._service.resume(log.response_id)
        self._wake()

    def sends(self, log: ResponseLog) -> bool:
        """Whether a log is attached and not sent yet."""
        return any(source.subscription.log is log for source in self._sources)

    def next(self) -> Outgoing | None:
        """The next event to send, or None while there is none."""
        if self._replies:
            event = self._replies.popleft()
            if len(self._replies) < _MAX_REPLIES:
                self._room.set()
            return Outgoing(event, None)
        for _ in range(len(self._sources)):
            source = self._sources[0]
            self._sources.rotate(-1)
            taken = source.subscription.take()
            if taken is not None:
                self._resume_if_drained()
                return Outgoing(taken, source)
        self._changed.clear()
        self._empty.set()
        return None

    def sent(self, outgoing: Outgoing, time_ns: int) -> None:
        """The transport took an event at `time_ns`."""
        source = outgoing.source
        if source is None:
            return
        if outgoing.event["type"] == DELTA:
            source.subscription.mark_sent(time_ns)
        if source.subscription.exhausted:
            self._sources.remove(source)
            self._paused.discard(source.subscription.log.response_id)
            source.subscription.close()
            source.on_sent()

    async def changed(self) -> None:
        """Wait until `next` may have something."""
        await self._changed.wait()

    async def room(self) -> None:
        """Wait while too many replies are unsent."""
        await self._room.wait()

    async def empty(self) -> None:
        """Wait until all that is here was sent."""
        await self._empty.wait()

    def close(self) -> list[ResponseLog]:
        """Leave all logs; returns those that still run and have no other subscriber."""
        sources, self._sources = self._sources, deque()
        orphans = []
        for source in sources:
            source.subscription.close()
            log = source.subscription.log
            if not log.finished and log.num_subscribers == 0:
                orphans.append(log)
        self._resume_all()
        self._room.set()
        self._empty.set()
        for source in sources:
            source.on_sent()
        return orphans

    def _wake(self) -> None:
        self._empty.clear()
        self._changed.set()

    def _grew(self, log: ResponseLog) -> None:
        self._wake()
        if log.finished or self.pending_bytes <= self._limit_bytes:
            return
        # Another viewer that keeps up must not suffer from this one.
        if log.num_subscribers > 1 and log.least_pending_bytes <= self._limit_bytes // 2:
            return
        if log.response_id not in self._paused:
            self._paused.add(log.response_id)
            self._service.pause(log.response_id)

    def _resume_if_drained(self) -> None:
        if self._paused and self.pending_bytes <= self._limit_bytes // 2:
            self._resume_all()

    def _resume_all(self) -> None:
        paused, self._paused = self._paused, set()
        for response_id in paused:
            self._service.resume(response_id)
