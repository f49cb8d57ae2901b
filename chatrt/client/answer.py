"""One answer as it arrives: an async iterator over the stamped events of its response.

Knows: when it has ended, how it is stopped. Does not know: sockets, which lanes are free.
Cost: events wait in memory, unbounded, until they are iterated.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, Self

from chatrt.client.messages import TERMINAL_TYPES, ClientEvent, TurnRecorder, TurnResult
from chatrt.errors import ChatrtError


class Canceller(Protocol):
    """Asks the server to stop a response; a connection does."""

    async def cancel(self, response_id: str | None, *, stream_id: str | None = None) -> None:
        """Stop a response by its id or, before it has one, the one running on a lane."""
        ...


class Answer:
    """The events of one response, in order, as an async iterator that ends after the terminal one.

    Iterating raises the server's error for a refused request, and `ServerUnavailable` when the
    connection is lost. `sent_ns` was stamped just before the request was written.
    """

    def __init__(
        self,
        client: Canceller,
        lane: str,
        start_ns: int | None,
        recorder: TurnRecorder | None = None,
    ) -> None:
        self.sent_ns = time.perf_counter_ns()
        self.recorder = recorder or TurnRecorder(self.sent_ns if start_ns is None else start_ns)
        self._client = client
        self._lane = lane
        self._queue: asyncio.Queue[ClientEvent | ChatrtError] = asyncio.Queue()
        self._ended = False

    @property
    def response_id(self) -> str | None:
        """The response's id, None until its first event was read."""
        return self.recorder.response_id

    @property
    def last_sequence_number(self) -> int | None:
        """The number of the last event that arrived, iterated or not; None before the first."""
        return self.recorder.last_sequence_number

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ClientEvent:
        if self._ended:
            raise StopAsyncIteration
        event = await self._queue.get()
        if isinstance(event, ChatrtError):
            self._ended = True
            raise event
        self._ended = event.type in TERMINAL_TYPES
        return event

    async def cancel(self) -> None:
        """Ask the server to stop; the iterator still gives what is left, and the terminal event."""
        if not self._ended and not self.recorder.finished:
            await self._client.cancel(self.response_id, stream_id=self._lane)

    async def collect(self) -> TurnResult:
        """Read to the end.

        Raises:
            ChatrtError: As iterating does, and for a response that failed.
        """
        async for _ in self:
            pass
        result = self.recorder.result()
        if result.error is not None:
            raise result.error
        return result

    def deliver(self, event: ClientEvent | ChatrtError) -> None:
        """Take the next event, or what ends the answer without one."""
        # Recorded as received, not as iterated: a cancel must know at once that there is an id.
        if isinstance(event, ClientEvent):
            self.recorder.add(event)
        self._queue.put_nowait(event)
