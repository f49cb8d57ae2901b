"""What other connections ask in one conversation: its events, told apart by their response.

Knows: which events of a subscription are of use, whose they are, which answers run.
Does not know: sockets, this connection's own answers, what a reader shows.
Invariant: whoever opens a watch gets every running answer from its start, however often the
conversation was watched before.
Cost: a subscription ends with its connection only. While nobody watches, events are kept for
answers that run, and forgotten with each one's end.
Source: PROTOCOL 2 (`chatrt.conversation.subscribe`), 3.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Self

from chatrt.client.messages import CREATED_TYPE, DELTA_TYPE, TERMINAL_TYPES, ClientEvent
from chatrt.errors import ChatrtError


@dataclass(frozen=True, slots=True)
class WatchedEvent:
    """One event of `response_id`: that it was created, a text delta, or its end."""

    response_id: str
    event: ClientEvent


class Watch:
    """One reading of a subscription, made by `ChatClient.subscribe`: an async iterator.

    It begins with the events so far of answers that run. Iterating raises `ServerUnavailable` when
    the connection is lost.
    """

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._queue: asyncio.Queue[WatchedEvent | ChatrtError] = asyncio.Queue()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchedEvent:
        read = await self._queue.get()
        if isinstance(read, ChatrtError):
            raise read
        return read

    def close(self) -> None:
        """Read no more."""
        self._subscription.forget(self)

    def deliver(self, what: WatchedEvent | ChatrtError) -> None:
        """Hand over what comes next."""
        self._queue.put_nowait(what)


class Subscription:
    """What comes of one conversation on `lane`; `is_confirmed` once the server said so."""

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.is_confirmed = False
        self._running: dict[str, list[WatchedEvent]] = {}
        self._watch: Watch | None = None
        self._reply: asyncio.Future[None] | None = None

    @property
    def is_watched(self) -> bool:
        """Whether somebody reads what comes."""
        return self._watch is not None

    def open(self) -> Watch:
        """A watch, in place of the one before."""
        watch = self._watch = Watch(self)
        for events in self._running.values():
            for event in events:
                watch.deliver(event)
        return watch

    def forget(self, watch: Watch) -> None:
        """Nobody reads this watch any more."""
        if self._watch is watch:
            self._watch = None

    def expect_reply(self) -> asyncio.Future[None]:
        """The server's reply to the request that goes out now; a refusal is raised by it."""
        self._reply = asyncio.get_running_loop().create_future()
        return self._reply

    def take(self, event: ClientEvent) -> None:
        """Take an event that came on the lane."""
        if event.type == "chatrt.conversation.subscribed":
            self.is_confirmed = True
            if self._reply is not None and not self._reply.done():
                self._reply.set_result(None)
            return
        response_id = _response_id(event)
        if response_id is None:
            return
        watched = WatchedEvent(response_id, event)
        if event.type == CREATED_TYPE:
            self._running[response_id] = []
        if response_id in self._running:
            self._running[response_id].append(watched)
            if event.type in TERMINAL_TYPES:
                del self._running[response_id]
            if self._watch is not None:
                self._watch.deliver(watched)

    def refuse(self, error: ChatrtError) -> None:
        """The server refused the subscription."""
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)

    def lose(self, error: ChatrtError) -> None:
        """The connection is gone."""
        self.refuse(error)
        if self._watch is not None:
            self._watch.deliver(error)


def _response_id(event: ClientEvent) -> str | None:
    """Whose event it is; None for one that adds nothing to the text or the end of an answer."""
    if event.type == DELTA_TYPE:
        return event.data.get("response_id")
    response = event.data.get("response")
    is_of_use = event.type == CREATED_TYPE or event.type in TERMINAL_TYPES
    return response.get("id") if is_of_use and isinstance(response, dict) else None
