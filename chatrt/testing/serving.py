"""A server on a free port around any service, and a plain client that sees every frame.

Knows: the server's settings, JSON frames. Does not know: what the service answers.
Invariant: the server is stopped and all its tasks are gone when the context ends.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from chatrt.server.server import Server
from chatrt.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from chatrt.server.service import Service

TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")


@asynccontextmanager
async def serving(service: Service, **settings: Any) -> AsyncIterator[Server]:
    """A started server on a free loopback port; `settings` are `ServerSettings`' fields."""
    server = Server(service, ServerSettings(**{"port": 0, **settings}))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


class Caller:
    """One connection. `frames` are all that were received, in order."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.frames: list[dict[str, Any]] = []

    async def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        await self.socket.send(json.dumps(message))

    async def create(self, text: str, **fields: Any) -> None:
        """Send a `response.create` with `text` as its input."""
        await self.send({"type": "response.create", "input": text, **fields})

    async def receive(self) -> dict[str, Any]:
        """The next event."""
        event: dict[str, Any] = json.loads(await self.socket.recv())
        self.frames.append(event)
        return event

    async def until(self, types: Iterable[str] = TERMINAL) -> list[dict[str, Any]]:
        """The events up to and with the first of one of these types."""
        events = [await self.receive()]
        while events[-1]["type"] not in types:
            events.append(await self.receive())
        return events

    async def until_closed(self) -> int | None:
        """Read until the connection closes; the server's close code, None if it sent none."""
        try:
            await self.until(())
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd is not None else None
        raise AssertionError("no event has an empty type")


@asynccontextmanager
async def calling(
    server: Server, path: str = "/v1/responses", **options: Any
) -> AsyncIterator[Caller]:
    """A connection to a server; `options` are those of `websockets`' `connect`."""
    async with calling_url(f"ws://127.0.0.1:{server.port}{path}", **options) as caller:
        yield caller


@asynccontextmanager
async def calling_url(url: str, **options: Any) -> AsyncIterator[Caller]:
    """A connection to the server at `url`, which may be another process."""
    try:
        async with connect(url, **{"compression": None, "max_size": None, **options}) as socket:
            yield Caller(socket)
    except AttributeError as error:
        # Leaving aborts the transport; if the server has reset it in the middle of a write, asyncio
        # of Python 3.11 has taken the transport's loop away already. It is closed all the same.
        if error.name != "call_soon":
            raise


def text_of(events: Iterable[dict[str, Any]]) -> str:
    """The text of all deltas."""
    return "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")


async def eventually(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Wait until `condition` holds; for states that nothing announces.

    Raises:
        TimeoutError: It did not in time.
    """
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - any state can be asked for, few have an event
            await asyncio.sleep(0.005)
