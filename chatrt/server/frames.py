"""From the bytes of one frame to a message, or to the error that its sender is told.

Knows: the two halves of decoding. Does not know: sockets, lanes, what a message does.
Invariant: any bytes give one of the two; the lane is known whenever the frame names one readably.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.errors import CallerError
from chatrt.wire.messages import open_envelope, read_message

if TYPE_CHECKING:
    from chatrt.wire.messages import ClientMessage, WireLimits


@dataclass(frozen=True, slots=True)
class Rejected:
    """A frame that holds no message; `is_create` if it meant to be one."""

    error: CallerError
    stream_id: str | None = None
    is_create: bool = False


def decode_frame(frame: bytes, limits: WireLimits) -> ClientMessage | Rejected:
    """The message in a frame, or why there is none. Raises nothing."""
    try:
        envelope = open_envelope(frame, limits)
    except CallerError as error:
        return Rejected(error)
    try:
        return read_message(envelope, limits)
    except CallerError as error:
        is_create = envelope.type == "response.create"
        return Rejected(error, stream_id=envelope.stream_id, is_create=is_create)
