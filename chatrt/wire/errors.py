"""Errors as events of the wire.

Knows: the error event's shape. Does not know: connections or lanes beyond the `stream_id` given.
Invariant: a fault of ours never shows its details; the caller's fault is told in full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chatrt.errors import CallerError, CapacityError, ChatrtError

if TYPE_CHECKING:
    from chatrt.wire.encode import Event


def error_body(error: ChatrtError) -> dict[str, Any]:
    """The `error` object: `{"type", "code", "message", "param"}`."""
    return {
        "type": _error_type(error),
        "code": error.code,
        "message": error.message,
        "param": error.param,
    }


def error_event(
    error: ChatrtError, stream_id: str | None = None, *, partial: bool = False
) -> Event:
    """The error event; `stream_id` is there exactly if the request had a readable one.

    `partial` marks it as being about a half-typed prompt: that one shares its lane with the
    question that it becomes, and an error names no response.
    """
    event: Event = {"type": "error", "status": error.status, "error": error_body(error)}
    if stream_id is not None:
        event["stream_id"] = stream_id
    if partial:
        event["chatrt"] = {"partial": True}
    return event


def internal_error() -> ChatrtError:
    """What a client is told of an unexpected failure of ours."""
    return ChatrtError("the server failed on this request; its log says why")


def _error_type(error: ChatrtError) -> str:
    if isinstance(error, CallerError):
        return "invalid_request_error"
    if isinstance(error, CapacityError):
        return "rate_limit_error"
    return "server_error"
