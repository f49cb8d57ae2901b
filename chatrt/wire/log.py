"""The one event log of a response, and its subscribers.

Knows: numbering, cursors, merging of deltas, the moment of the first send.
Does not know: sockets, asyncio, how an event is encoded.
Invariant: an event's `sequence_number` is its place in the log; every subscriber gets all text in
order, whether in many deltas or in few. Not thread-safe: log and subscribers live on one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt.wire.encode import Event

DELTA = "response.output_text.delta"
_MAX_MERGED_BYTES = 64 * 2**10  # clients refuse frames of a megabyte, and escapes take up to 6 ×
_EVENT_BYTES = 256  # an event's names and ids; a delta's vanish when it is merged
_LOGPROB_BYTES = 96
_HELD_EVENT_BYTES = 640  # what one event's dict takes in memory besides its text


class ResponseLog:
    """Events of one response, appended by its writer and read by any number of subscribers.

    `key_id` is whose response it is; `conversation_id` where it belongs, if anywhere. `on_gap` is
    told the nanoseconds between two deltas that a transport took, for each subscriber.
    """

    def __init__(
        self,
        response_id: str,
        key_id: str,
        conversation_id: str | None = None,
        on_gap: Callable[[int], None] | None = None,
    ) -> None:
        self.response_id = response_id
        self.key_id = key_id
        self.conversation_id = conversation_id
        self._events: list[Event] = []
        self._end_bytes: list[int] = []  # approximate bytes of all events up to and with this one
        self._terminal: Callable[[int | None], Event] | None = None
        self._first_sent_ns: int | None = None
        self._on_gap = on_gap
        self._when_sent: Callable[[int], None] | None = None
        self._subscriptions: list[Subscription] = []

    @property
    def finished(self) -> bool:
        """Whether the terminal event is in the log."""
        return self._terminal is not None

    @property
    def num_events(self) -> int:
        """Events so far, the terminal one included."""
        return len(self._end_bytes)

    @property
    def held_bytes(self) -> int:
        """Approximate memory of all events as they are held here, unmerged."""
        return self._bytes_before(self.num_events) + _HELD_EVENT_BYTES * self.num_events

    @property
    def num_subscribers(self) -> int:
        """Subscriptions that are not closed."""
        return len(self._subscriptions)

    @property
    def first_sent_ns(self) -> int | None:
        """When a transport took the first delta, in the caller's clock; None before that."""
        return self._first_sent_ns

    @property
    def least_pending_bytes(self) -> int:
        """`pending_bytes` of the subscriber that is furthest; 0 without subscribers."""
        return min((s.pending_bytes for s in self._subscriptions), default=0)

    def append(self, event: Event) -> None:
        """Add an event, which gets the next `sequence_number`, and wake the subscribers."""
        assert not self.finished, "nothing follows the terminal event"
        event["sequence_number"] = len(self._events)
        self._events.append(event)
        self._grow(_approximate_bytes(event))

    def finish(self, build: Callable[[int | None], Event]) -> None:
        """Add the terminal event and wake the subscribers.

        The event says when the first delta was sent, which may be later than now. So it is built
        for each subscriber as that one takes it: `build(first_sent_ns)`, a new dict each time. A
        subscriber takes it only after its own deltas, so the stamp is there if any was sent.
        """
        assert not self.finished, "a log has one terminal event"
        self._terminal = build
        self._grow(_EVENT_BYTES)

    def mark_sent(self, time_ns: int) -> None:
        """A transport took a delta at `time_ns`. Only the first call counts."""
        if self._first_sent_ns is None:
            self._first_sent_ns = time_ns
            if self._when_sent is not None:
                self._when_sent(time_ns)

    def when_sent(self, tell: Callable[[int], None]) -> None:
        """Call `tell` once with `first_sent_ns`: now, or as soon as it is known; a second replaces.

        An answer may be over before the transport took its first delta.
        """
        if self._first_sent_ns is not None:
            tell(self._first_sent_ns)
        else:
            self._when_sent = tell

    def subscribe(
        self,
        on_change: Callable[[], None],
        *,
        stream_id: str | None = None,
        after: int | None = None,
    ) -> Subscription:
        """A cursor at the event behind number `after`, or at the start.

        `on_change` is called after every later append; what is already here is there to be taken.
        `stream_id` is added to each event this subscriber takes.
        """
        subscription = Subscription(self, on_change, stream_id, 0 if after is None else after + 1)
        self._subscriptions.append(subscription)
        return subscription

    def check_number(self, number: int) -> None:
        """Check that events can follow behind the event `number`.

        Raises:
            InvalidValue: It is not the number of an event here, or that of the terminal one.
        """
        last = self.num_events - 1
        if not 0 <= number <= last:
            raise InvalidValue(
                f"after_sequence_number is {number}, "
                f"response {self.response_id} has events 0 to {last}",
                param="after_sequence_number",
            )
        if self.finished and number == last:
            raise InvalidValue(
                f"after_sequence_number is {number}, "
                f"response {self.response_id} ended with event {last}: nothing follows",
                param="after_sequence_number",
            )

    def terminal_event(self) -> Event | None:
        """The terminal event as it would be taken now; None while the response runs."""
        return None if self._terminal is None else self._read(len(self._events))

    def _grow(self, num_bytes: int) -> None:
        self._end_bytes.append((self._end_bytes[-1] if self._end_bytes else 0) + num_bytes)
        for subscription in tuple(self._subscriptions):
            subscription.on_change()

    def _bytes_before(self, index: int) -> int:
        return self._end_bytes[index - 1] if index else 0

    def _read(self, index: int) -> Event:
        """A copy of the event at `index`."""
        if index < len(self._events):
            return dict(self._events[index])
        assert self._terminal is not None, "read past the end"
        event = self._terminal(self._first_sent_ns)
        event["sequence_number"] = index
        return event

    def _end_of_run(self, start: int) -> int:
        """The first index behind `start` whose event cannot be merged into the one there."""
        events, end = self._events, start + 1
        if start < len(events) and events[start]["type"] == DELTA:
            item_id = events[start]["item_id"]
            limit = self._bytes_before(start) + _MAX_MERGED_BYTES
            while (
                end < len(events)
                and _is_delta_of(events[end], item_id)
                and self._end_bytes[end] <= limit
            ):
                end += 1
        return end

    def _merged(self, start: int, end: int) -> Event:
        """The events `[start, end)`, adjacent deltas of one item, as one."""
        event = self._read(start)
        if end == start + 1:
            return event
        run = self._events[start:end]
        event["delta"] = "".join(delta["delta"] for delta in run)
        event["logprobs"] = [entry for delta in run for entry in delta["logprobs"]]
        event["sequence_number"] = end - 1
        timed = [delta["chatrt"] for delta in run if "chatrt" in delta]
        if timed:
            event["chatrt"] = {**timed[-1], "n": sum(timing["n"] for timing in timed)}
        return event


class Subscription:
    """One reader's cursor in a log. Made by `ResponseLog.subscribe`."""

    def __init__(
        self, log: ResponseLog, on_change: Callable[[], None], stream_id: str | None, cursor: int
    ) -> None:
        self.log = log
        self.on_change = on_change
        self.stream_id = stream_id
        self._cursor = min(cursor, log.num_events)
        self._open = True
        self._last_sent_ns: int | None = None

    @property
    def pending_bytes(self) -> int:
        """Approximate bytes of the events not taken yet."""
        log = self.log
        return log._bytes_before(log.num_events) - log._bytes_before(self._cursor)

    @property
    def exhausted(self) -> bool:
        """Whether the terminal event was taken: nothing more will come."""
        return self.log.finished and self._cursor == self.log.num_events

    def take(self) -> Event | None:
        """The next event, or None while there is none. The dict is the caller's own.

        Deltas of one item that wait one behind the other come as one (of up to 64 KiB), which
        carries the last one's number: a reader that keeps up gets each as it was appended.
        """
        log = self.log
        if self._cursor >= log.num_events:
            return None
        end = log._end_of_run(self._cursor)
        event = log._merged(self._cursor, end)
        self._cursor = end
        if self.stream_id is not None:
            event["stream_id"] = self.stream_id
        return event

    def mark_sent(self, time_ns: int) -> None:
        """A transport took a delta of this subscriber at `time_ns`."""
        last_ns, self._last_sent_ns = self._last_sent_ns, time_ns
        if last_ns is None:
            self.log.mark_sent(time_ns)
        elif self.log._on_gap is not None:
            self.log._on_gap(time_ns - last_ns)

    def close(self) -> None:
        """Leave the log; `on_change` is not called again. Closing twice is harmless."""
        if self._open:
            self._open = False
            self.log._subscriptions.remove(self)


def _is_delta_of(event: Event, item_id: Any) -> bool:
    return bool(event["type"] == DELTA and event["item_id"] == item_id)


def _approximate_bytes(event: Event) -> int:
    if event["type"] != DELTA:
        return _EVENT_BYTES
    num_logprobs = sum(1 + len(entry["top_logprobs"]) for entry in event["logprobs"])
    return len(event["delta"].encode()) + _LOGPROB_BYTES * num_logprobs
