"""The server: listens, admits, counts connections, and ends in an orderly way.

Knows: the listening socket, all connections, signals. Does not know: messages, answers.
Invariant: nothing is upgraded that the gate refuses; a shutdown loses no running answer that ends
within the drain time.
Source: the options of `serve` are the protocol's section on moving frames.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import signal
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from websockets.asyncio.server import ServerConnection, serve
from websockets.frames import CloseCode
from websockets.typing import Subprotocol

from chatrt.errors import Overloaded, ServerUnavailable, StillLoading
from chatrt.server.connection import Connection, Peer, report
from chatrt.server.grace import Graces
from chatrt.server.handshake import Admitted, Gate, Refused, select_subprotocol
from chatrt.server.http import (
    OPEN_PATHS,
    SOCKET_PATHS,
    Reply,
    Routes,
    Target,
    error_reply,
    json_reply,
)
from chatrt.server.static import WebPage
from chatrt.wire.live import Sockets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from websockets.asyncio.server import Server as SocketServer
    from websockets.http11 import Request, Response

    from chatrt.server.service import Service
    from chatrt.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0  # for the peer's half of a closing handshake
_STOP_TIMEOUT_S = 15.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server:
    """Serves a `Service` on one port. `clock` gives nanoseconds.

    `start`, then `serve_forever`; `drain` ends it kindly and `stop` at once.
    """

    def __init__(
        self,
        service: Service,
        settings: ServerSettings,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._service = service
        self._settings = settings
        self._clock = clock
        self._gate = Gate(settings)
        self._routes = Routes(service, self.sockets)
        self._page = WebPage()
        self._graces = Graces(service, settings.disconnect_grace_s)
        self._connections: set[Connection] = set()
        self._server: SocketServer | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None, "the server is not started"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def num_connections(self) -> int:
        """Open WebSocket connections."""
        return len(self._connections)

    @property
    def outbox_bytes(self) -> int:
        """Approximate bytes that wait to be sent on all connections."""
        return sum(connection.outbox_bytes for connection in self._connections)

    def sockets(self) -> Sockets:
        """The open connections and what waits to be sent on them."""
        waiting = [connection.outbox_bytes for connection in self._connections]
        return Sockets(len(waiting), sum(waiting), max(waiting, default=0))

    async def start(self) -> None:
        """Listen.

        Raises:
            ServerUnavailable: The port is in use, or the address is not this machine's.
        """
        settings = self._settings
        # Below this level the library logs headers and frames: keys and prompts.
        socket_logger = logging.getLogger("chatrt.server.websockets")
        socket_logger.setLevel(logging.WARNING)
        try:
            self._server = await serve(
                self._serve,
                settings.host,
                settings.port,
                process_request=self._process_request,
                select_subprotocol=_select_subprotocol,
                compression=None,
                max_size=settings.max_message_bytes,
                max_queue=16,
                write_limit=32 * 2**10,
                ping_interval=20,
                ping_timeout=20,
                open_timeout=5,
                close_timeout=_CLOSE_TIMEOUT_S,
                server_header=None,
                logger=socket_logger,
            )
        except OSError as error:
            raise _cannot_listen(settings, error) from error
        logger.info("listening on %s port %d", settings.host, self.port)
        self._watch_idleness()

    async def serve_forever(self) -> None:
        """Return when the server has ended: by `drain`, `stop`, a signal or for want of clients."""
        await self._stopped.wait()

    def install_signal_handlers(self) -> None:
        """SIGTERM and SIGINT drain; a second one stops at once. Main thread only."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled)

    async def drain(self) -> None:
        """Refuse new clients and turns, let running answers finish up to `drain_s`, then stop."""
        assert self._server is not None, "the server is not started"
        logger.info("draining %d connections", len(self._connections))
        self._server.close(close_connections=False)
        drains = [asyncio.create_task(connection.drain()) for connection in self._connections]
        if drains:
            _, late = await asyncio.wait(drains, timeout=self._settings.drain_s)
            for task in late:
                task.cancel()
        await self.stop(CloseCode.SERVICE_RESTART)

    async def stop(self, code: int = CloseCode.GOING_AWAY) -> None:
        """Close the listening socket and all connections."""
        assert self._server is not None, "the server is not started"
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._server.close(close_connections=False)
        self._graces.end()
        closing = [connection.close(code, "the server ends") for connection in self._connections]
        await asyncio.gather(*closing, return_exceptions=True)
        try:
            await asyncio.wait_for(self._server.wait_closed(), _STOP_TIMEOUT_S)
        except TimeoutError:
            logger.warning("a connection did not end within %s s, ending anyway", _STOP_TIMEOUT_S)
        self._stopped.set()

    async def _process_request(self, socket: ServerConnection, request: Request) -> Response | None:
        target = Target.of(request)
        if target.path in OPEN_PATHS:
            reply = self._routes.open_route(target)
            if reply is not None:
                return _response(socket, reply)
        if self._page.has(target):
            elsewhere = self._gate.check_place(request.headers)
            if elsewhere is None:
                return _response(socket, self._page.reply(target, request.headers))
            return _refusal(socket, elsewhere)
        verdict = self._gate.check(request.headers)
        if isinstance(verdict, Refused):
            return _refusal(socket, verdict)
        if not (target.upgrade and target.path in SOCKET_PATHS):
            return _response(socket, await self._routes.route(target, verdict.key_id))
        if not self._service.ready():
            # A client that waits for its server asks again; an open socket would take its question.
            return _response(socket, error_reply(StillLoading()))
        if self._connections_of(verdict.key_id) >= self._settings.max_connections_per_key:
            return _response(socket, error_reply(self._too_many(verdict.key_id)))
        return None

    async def _serve(self, socket: ServerConnection) -> None:
        """Serve one upgraded socket until it closes."""
        assert socket.request is not None
        verdict = self._gate.check(socket.request.headers)
        assert isinstance(verdict, Admitted), "the gate let the same headers pass before"
        if self._connections_of(verdict.key_id) >= self._settings.max_connections_per_key:
            # Others of the key were upgraded in the same moment.
            error = self._too_many(verdict.key_id)
            await socket.close(CloseCode.TRY_AGAIN_LATER, error.message)
            return
        model = Target.of(socket.request).parameter("model")
        peer = Peer(secrets.token_hex(8), verdict.key_id, model)
        connection = Connection(
            socket, self._service, self._settings, peer, self._graces, self._clock
        )
        self._connections.add(connection)
        self._watch_idleness()
        logger.info("connection %s of key %s opened", peer.connection_id, peer.key_id)
        try:
            await connection.run()
        except Exception as error:
            report(error, f"connection {peer.connection_id}")
        finally:
            self._connections.discard(connection)
            self._watch_idleness()
            logger.info("connection %s closed", peer.connection_id)

    def _connections_of(self, key_id: str) -> int:
        return sum(connection.key_id == key_id for connection in self._connections)

    def _too_many(self, key_id: str) -> Overloaded:
        return Overloaded(
            f"this key has {self._connections_of(key_id)} connections, "
            f"at most {self._settings.max_connections_per_key} are allowed",
            code="websocket_connection_limit_reached",
        )

    def _watch_idleness(self) -> None:
        """Start the idle timer when the last client left, stop it when one came."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        idle_exit_s = self._settings.idle_exit_s
        if idle_exit_s is not None and not self._connections and not self._stopped.is_set():
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(idle_exit_s, self._idle_exit)

    def _idle_exit(self) -> None:
        if not self._service.ready():
            self._watch_idleness()  # nobody could have come while it was loading
            return
        logger.info("no client for %s s, ending", self._settings.idle_exit_s)
        self._ending = asyncio.create_task(self.stop())

    def _signalled(self) -> None:
        end = self.drain if self._ending is None else self.stop
        self._ending = asyncio.create_task(end())


def _select_subprotocol(_: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    chosen = select_subprotocol(offered)
    return None if chosen is None else Subprotocol(chosen)


def _response(socket: ServerConnection, reply: Reply) -> Response:
    response = socket.respond(reply.status, reply.body.decode())
    del response.headers["Content-Type"]
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **reply.headers}
    for name, value in {"Content-Type": reply.content_type, **headers}.items():
        response.headers[name] = value
    if reply.status is HTTPStatus.NOT_MODIFIED:
        del response.headers["Content-Length"]  # it would be that of the file
    if socket.request is not None and socket.request.method == "HEAD":
        response.body = b""
    return response


def _refusal(socket: ServerConnection, refused: Refused) -> Response:
    logger.info("refused a request: %s", refused.code)
    error = {"type": "invalid_request_error", "code": refused.code, "message": refused.message}
    response = _response(socket, json_reply({"error": {**error, "param": None}}, refused.status))
    if refused.status is HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _cannot_listen(settings: ServerSettings, error: OSError) -> ServerUnavailable:
    where = f"{settings.host} port {settings.port}"
    if error.errno == errno.EADDRINUSE:
        return ServerUnavailable(f"{where} is in use: stop what listens there or take another port")
    return ServerUnavailable(f"cannot listen on {where}: {error.strerror or error}")
