"""Sends what a person is typing once they pause: the newest text only, one request at a time.

Knows: when a half-typed text is worth sending, which one was sent last.
Does not know: sockets, keys, what is shown.
Invariant: after `take` nothing follows that was typed before it, so that no partial comes behind
its question. At most one partial is outstanding.
Cost: one request for each pause, with the whole text in it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from chatrt.errors import ChatrtError

if TYPE_CHECKING:
    from chatrt.client.connection import ChatClient
    from chatrt.client.messages import ResponseRequest
    from chatrt.client.typed_ahead import TypedAhead

# Most people leave 100 to 250 ms between two keys: a pause this long is one between words. Who
# types faster than that all the time is not waited for any longer than the second figure says.
PAUSE_S = 0.12
LONGEST_WAIT_S = 0.5
# A longer text fills any context, and a frame beyond the server's limit would cost the connection.
MAX_CHARS = 2**18
# A server says what became of a partial at once, unless it has much else to do.
_SETTLED_WITHIN_S = 5.0


class Typist:
    """Types ahead over one connection; all calls come from its event loop."""

    def __init__(self, client: ChatClient) -> None:
        self._client = client
        self._waiting: ResponseRequest | None = None
        self._waits_since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._sent: ResponseRequest | None = None
        self._typed: TypedAhead | None = None

    def type(self, request: ResponseRequest) -> None:
        """Send `request`, whose input is the text so far, unless a newer one comes in a moment."""
        if request == self._sent or len(request.input) > MAX_CHARS:
            self._forget()
            return
        now_s = asyncio.get_running_loop().time()
        if self._waiting is None:
            self._waits_since_s = now_s
        self._forget()
        self._waiting = request
        at_s = min(now_s + PAUSE_S, self._waits_since_s + LONGEST_WAIT_S)
        self._timer = asyncio.get_running_loop().call_at(at_s, self._due)

    def drop(self) -> None:
        """Send nothing of what waits."""
        self._forget()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def take(self) -> TypedAhead | None:
        """What was typed ahead, for the question that it has become; None if nothing was sent."""
        self.drop()
        typed, self._typed, self._sent = self._typed, None, None
        return typed

    def _forget(self) -> None:
        self._waiting = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        if self._task is None:
            self._task = asyncio.create_task(self._send(), name="chatrt-typist")

    async def _send(self) -> None:
        try:
            # While the timer runs, newer text is on its way.
            while self._waiting is not None and self._timer is None:
                self._sent, self._waiting = self._waiting, None
                await self._send_one(self._sent)
        except ChatrtError:
            pass  # the connection is gone, and its keeper says so
        self._task = None

    async def _send_one(self, request: ResponseRequest) -> None:
        self._typed = await self._client.type_ahead(request, self._typed)
        try:
            async with asyncio.timeout(_SETTLED_WITHIN_S):
                await self._typed.settled()
        except TimeoutError:
            pass  # the next one supersedes it
