"""Servers that run beside a blocking test: a scripted one, a proxy that can be cut, a foreign page.

Knows: threads, sockets. Does not know: browsers.
Invariant: what a test started has ended when its fixture is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from chatrt.client import ChatClient
from chatrt.server.server import Server
from chatrt.server.settings import ServerSettings
from chatrt.testing.service import ScriptedResponse, ScriptedService
from tests.support import time_scale

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator

    from chatrt.errors import ChatrtError
    from chatrt.wire.messages import ResponseCreate

T = TypeVar("T")

PATIENCE_S = 10.0 * time_scale()
_POLL_S = 0.01


def until(condition: Callable[[], T | None], what: str) -> T:
    """What `condition` gives once it is truthy; for states that nothing announces.

    Raises:
        AssertionError: It was not within the patience; `what` says what was waited for.
    """
    end = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(_POLL_S)
    return value


class _Held(list[str]):
    """Deltas before one of which something is done, in the moment when its turn comes."""

    def __init__(self, deltas: Iterable[str], at: int, hold: Callable[[], None]) -> None:
        super().__init__(deltas)
        self._at = at
        self._hold = hold

    def __iter__(self) -> Iterator[str]:
        for index, delta in enumerate(super().__iter__()):
            if index == self._at:
                self._hold()
            yield delta


class Script:
    """What the server says: `answers` by the last message's text, else that text itself.

    Texts in `refusals` are refused with these errors. An answer to a text in `holds` stops behind
    so many deltas, until it is told to go on.
    """

    def __init__(self, hold: Callable[[ResponseCreate], None]) -> None:
        self.answers: dict[str, list[str]] = {}
        self.holds: dict[str, int] = {}
        self.refusals: dict[str, ChatrtError] = {}
        self._hold = hold

    def __call__(self, message: ResponseCreate) -> list[str]:
        """The deltas for a request; raises what refuses it."""
        text = message.input[-1].content
        if text in self.refusals:
            raise self.refusals[text]
        deltas = self.answers.get(text, [f"You said: {text}"])
        if text not in self.holds:
            return deltas
        return _Held(deltas, self.holds[text], lambda: self._hold(message))


class LoopThread:
    """An event loop in a thread of its own; `call` runs coroutines on it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def run(self, function: Callable[[], T]) -> T:
        """What a function returns that may only be called on the loop."""

        async def work() -> T:
            return function()

        return self.call(work())

    def end(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


class LiveServer:
    """A server around a scripted service, which a test can hold in the middle of an answer."""

    def __init__(self, loop: LoopThread, **settings: Any) -> None:
        self.script = Script(self._hold)
        self._loop = loop
        self.service = ScriptedService(self.script, delay_s=0.005)
        self.server = Server(self.service, ServerSettings(**{"port": 0, **settings}))
        loop.call(self.server.start())
        self.port = self.server.port

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.port}/"

    def asked(self, text: str) -> ScriptedResponse:
        """The newest response to `text`, once there is one; half-typed ones do not count."""

        def find() -> ScriptedResponse | None:
            responses = reversed(list(self.service.responses.values()))
            return next((r for r in responses if self._is_about(r, text)), None)

        return until(find, f"a question {text!r}")

    def go_on(self, response: ScriptedResponse) -> None:
        """Go on with the words."""
        self._loop.run(lambda: response.unpaused.set())

    def forget(self, response: ScriptedResponse) -> None:
        """Delete a response behind the page's back."""
        log = response.log
        self._loop.call(self.service.delete_response(log.response_id, log.key_id))

    def stop(self) -> None:
        """End the server."""
        self._loop.call(self.server.stop())

    def _hold(self, message: ResponseCreate) -> None:
        """No further word of the answer to this message until `go_on`; called on the loop."""
        for response in self.service.responses.values():
            if response.message is message:
                response.unpaused.clear()

    @staticmethod
    def _is_about(response: ScriptedResponse, text: str) -> bool:
        message = response.message
        return not message.partial and message.input[-1].content == text


class Proxy:
    """A TCP proxy on a free port; `cut` kills all its connections, `refuse` lets no new one in."""

    def __init__(self, loop: LoopThread, target_port: int) -> None:
        self._loop = loop
        self.target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._refuses = False
        self.num_accepted = 0
        self._server = loop.call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        """Where the page is, through the proxy."""
        return f"http://127.0.0.1:{self.port}/"

    def cut(self, *, refuse: bool = False) -> None:
        """Abort all connections; `refuse` those that come, too, until `accept`."""

        def work() -> None:
            self._refuses = refuse
            for writer in self._writers:
                writer.transport.abort()

        self._loop.run(work)

    def stall(self) -> None:
        """Carry nothing more in either direction over the connections that stand, until `cut`."""

        def work() -> None:
            for writer in self._writers:
                writer.transport.pause_reading()  # type: ignore[attr-defined]

        self._loop.run(work)

    def accept(self) -> None:
        """Let connections in again."""
        self._refuses = False

    def stop(self) -> None:
        """End the proxy."""
        self.cut(refuse=True)
        self._loop.run(self._server.close)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        self.num_accepted += 1
        to = await asyncio.open_connection("127.0.0.1", self.target_port)
        if self._refuses:  # since then
            writer.transport.abort()
            to[1].transport.abort()
            return
        self._writers |= {writer, to[1]}
        await asyncio.gather(self._pipe(reader, to[1]), self._pipe(to[0], writer))
        self._writers -= {writer, to[1]}

    @staticmethod
    async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()


@contextlib.contextmanager
def another_client(
    loop: LoopThread, server: LiveServer, key: str | None = None
) -> Iterator[ChatClient]:
    """A connected client beside the page."""
    client = loop.call(ChatClient.connect(f"ws://127.0.0.1:{server.port}", api_key=key))
    yield client
    loop.call(client.close())


@contextlib.contextmanager
def foreign_page(body: bytes) -> Iterator[int]:
    """A page of another origin; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the library's name for it
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
