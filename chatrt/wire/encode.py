"""Events and messages to the bytes of one JSON text frame.

Knows: msgspec's encoder. Does not know: what an event means.
Invariant: the result is valid UTF-8 JSON on one line; numbers that JSON lacks become null.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

Event: TypeAlias = dict[str, Any]
"""One server event, as plain JSON values."""

_ENCODER = msgspec.json.Encoder()


def encode(value: Event | msgspec.Struct) -> bytes:
    """The frame of one event or client message.

    Raises:
        UnicodeEncodeError: A string holds a lone surrogate, which UTF-8 cannot carry.
    """
    return _ENCODER.encode(value)
