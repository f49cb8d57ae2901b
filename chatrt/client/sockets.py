"""The client's socket: how it is opened, when its messages were read, how its loss reads.

Knows: the handshake, the library's options, the errors of both. Does not know: messages, lanes.
Invariant: one stamp for each message, taken as its last bytes left the socket, before any parsing.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidMessage,
    InvalidStatus,
    WebSocketException,
)
from websockets.frames import DATA_OPCODES, Frame

from chatrt.client.http import is_loopback
from chatrt.errors import CallerError, NobodyListens, ServerUnavailable

if TYPE_CHECKING:
    import ssl as ssl_module

    from websockets.http11 import Response
    from websockets.protocol import Event

_MAX_FRAME_BYTES = 64 * 1024 * 1024  # a terminal event repeats the whole answer
_OPEN_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 1.0


class StampedConnection(ClientConnection):
    """Keeps, for each message, the time at which its last bytes were read from the socket."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stamps_ns: deque[int] = deque()
        self._read_ns = 0

    def data_received(self, data: bytes) -> None:
        """Stamp what was read, then take it."""
        self._read_ns = time.perf_counter_ns()
        super().data_received(data)

    def process_event(self, event: Event) -> None:
        """Keep the stamp of each message's last frame."""
        if isinstance(event, Frame) and event.opcode in DATA_OPCODES and event.fin:
            self.stamps_ns.append(self._read_ns)
        super().process_event(event)


async def open_socket(
    address: str, api_key: str | None, ssl: ssl_module.SSLContext | None
) -> StampedConnection:
    """A WebSocket to `address` (ws or wss).

    Raises:
        ServerUnavailable: Nothing answers, or it is not (yet) a chat server.
        CallerError: The server refuses the key or the origin, code `invalid_api_key`.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    tls = (ssl or True) if address.startswith("wss:") else None
    try:
        websocket = await connect(
            address,
            additional_headers=headers,
            compression=None,
            max_size=_MAX_FRAME_BYTES,
            open_timeout=_OPEN_TIMEOUT_S,
            close_timeout=_CLOSE_TIMEOUT_S,
            # A proxy of the environment is never asked for this machine's own server.
            proxy=None if is_loopback(address) else True,
            create_connection=StampedConnection,
            ssl=tls,
        )
    except InvalidStatus as refused:
        status = refused.response.status_code
        if status in (401, 403):
            raise CallerError(
                f"the server at {address} refuses this API key (HTTP status {status})",
                code="invalid_api_key",
            ) from refused
        raise ServerUnavailable(_said(refused.response, address)) from refused
    except InvalidMessage as error:
        raise ServerUnavailable(f"what answers at {address} is not a chat server") from error
    except ConnectionRefusedError as error:
        raise NobodyListens(f"no server answers at {address}") from error
    except (InvalidHandshake, WebSocketException, OSError, EOFError) as error:
        raise ServerUnavailable(f"no server answers at {address}: {error}") from error
    return cast("StampedConnection", websocket)


def _said(refusal: Response, address: str) -> str:
    """What a refused handshake says, or at least how it was refused."""
    try:
        body = msgspec.json.decode(refusal.body or b"")
        return str(body["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        status = refusal.status_code
        return f"the server at {address} does not accept the connection (HTTP status {status})"


def lost_error(closed: ConnectionClosed) -> ServerUnavailable:
    """How a connection ended, as an error for those who still waited."""
    received = closed.rcvd
    if received is None:
        return ServerUnavailable("the connection to the server was lost")
    reason = f": {received.reason}" if received.reason else ""
    return ServerUnavailable(f"the server closed the connection (code {received.code}{reason})")
