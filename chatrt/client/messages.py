"""What the client sends and what it makes of the answer: requests, stamped events, a turn's result.

Knows: field names of the wire (`response.create`, its events, error codes), how figures of a turn
are measured from receive times.
Does not know: sockets, threads, event loops.
Invariant: an event's `received_ns` was taken as its bytes left the socket, before any parsing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from chatrt import errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TERMINAL_TYPES = frozenset({"response.completed", "response.incomplete", "response.failed"})
CREATED_TYPE = "response.created"
DELTA_TYPE = "response.output_text.delta"

# The sampling fields that the API itself has; all others travel in our extension object.
_API_SAMPLING = ("temperature", "top_p", "top_logprobs", "max_output_tokens")

_ERRORS_BY_CODE: dict[str, type[errors.ChatrtError]] = {
    "invalid_value": errors.InvalidValue,
    "unsupported_parameter": errors.UnsupportedParameter,
    "context_length_exceeded": errors.ContextLengthExceeded,
    "model_not_found": errors.ModelNotFound,
    "previous_response_not_found": errors.NotFound,
    "response_not_found": errors.NotFound,
    "response_already_in_flight": errors.Conflict,
    "rate_limit_exceeded": errors.Overloaded,
    "websocket_stream_limit_reached": errors.Overloaded,
    "websocket_connection_limit_reached": errors.Overloaded,
    "kv_exhausted": errors.CapacityError,
}
_ERRORS_BY_STATUS: dict[int, type[errors.ChatrtError]] = {
    404: errors.NotFound,
    409: errors.Conflict,
    429: errors.Overloaded,
    503: errors.ServerUnavailable,
}


@dataclass(frozen=True, slots=True)
class ClientEvent:
    """One event of the server; `received_ns` is `perf_counter_ns` as its frame was read."""

    type: str
    data: dict[str, Any]
    received_ns: int

    @property
    def delta(self) -> str:
        """The text that this event adds to the answer, empty for all but text deltas."""
        return str(self.data.get("delta", "")) if self.type == DELTA_TYPE else ""


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """One `response.create`.

    `input` is a text (one user message) or a list of items. `sampling` takes every name of
    `chatrt.params.SamplingParams`; names that the API lacks travel in the `chatrt` object, to which
    `chatrt` adds the rest (`timing`, `speculation`, `priority`). A follow-up names
    `previous_response_id` and no `conversation`: the server files it under its parent's.
    `truncation` `auto` leaves the oldest turns out of a full context, which is refused otherwise.
    """

    input: str | Sequence[Mapping[str, Any]]
    model: str | None = None
    previous_response_id: str | None = None
    conversation: str | None = None
    generate: bool | None = None
    store: bool | None = None
    truncation: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    chatrt: Mapping[str, Any] = field(default_factory=dict)

    def to_message(self, stream_id: str) -> dict[str, Any]:
        """The JSON object to send on the lane `stream_id`; fields that are None are left out."""
        own = {name: v for name, v in self.sampling.items() if name not in _API_SAMPLING}
        message: dict[str, Any] = {
            "type": "response.create",
            "stream_id": stream_id,
            "input": self.input if isinstance(self.input, str) else list(self.input),
            "model": self.model,
            "previous_response_id": self.previous_response_id,
            "conversation": self.conversation,
            "generate": self.generate,
            "store": self.store,
            "truncation": self.truncation,
            **{name: self.sampling.get(name) for name in _API_SAMPLING},
            "chatrt": {**own, **self.chatrt} or None,
        }
        if self.sampling.get("top_logprobs") is not None:
            message["include"] = ["message.output_text.logprobs"]
        return {name: value for name, value in message.items() if value is not None}


def message_item(role: str, text: str) -> dict[str, Any]:
    """An input item: one message of `role` (`user`, `system`, …) with `text`."""
    return {"type": "message", "role": role, "content": text}


@dataclass(frozen=True, slots=True)
class TurnResult:
    """How one turn ended, with the client's own measurements.

    `status` is the response's (`completed`, `incomplete`, `cancelled`, `failed`), or `error` when
    no terminal event arrived; then `error` says why. `timing` is the server's `response.chatrt`.
    `ttft_ms` runs from the start of the turn to the first text delta read; None without one.
    `gaps_ms` are the times between successive deltas, in order.
    """

    text: str
    status: str
    response_id: str | None
    usage: dict[str, Any]
    timing: dict[str, Any]
    ttft_ms: float | None
    gaps_ms: tuple[float, ...]
    reason: str | None = None
    error: errors.ChatrtError | None = None

    @property
    def usable_as_parent(self) -> bool:
        """Whether a follow-up may name this response (a cancelled one, too, keeps its part)."""
        return self.response_id is not None and self.status not in ("failed", "error")


class TurnRecorder:
    """Adds up the events of one response into its `TurnResult`.

    `start_ns` is when the person's (or the caller's) turn began, on the `perf_counter_ns` clock.
    """

    def __init__(self, start_ns: int) -> None:
        self.response_id: str | None = None
        self.last_sequence_number: int | None = None
        self._start_ns = start_ns
        self._texts: list[str] = []
        self._delta_ns: list[int] = []
        self._terminal: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        """Whether the terminal event has arrived."""
        return self._terminal is not None

    def add(self, event: ClientEvent) -> None:
        """Take the next event of the response."""
        response = event.data.get("response")
        self.last_sequence_number = event.data.get("sequence_number", self.last_sequence_number)
        if isinstance(response, dict):
            self.response_id = response.get("id", self.response_id)
        if event.type == DELTA_TYPE:
            self._texts.append(event.delta)
            self._delta_ns.append(event.received_ns)
        elif event.type in TERMINAL_TYPES:
            self._terminal = response if isinstance(response, dict) else {}

    def result(self, error: errors.ChatrtError | None = None) -> TurnResult:
        """The turn so far; `error` is what ended it when no terminal event did."""
        return self.settled(self._terminal or {"status": "error"}, error)

    def settled(
        self, response: Mapping[str, Any], error: errors.ChatrtError | None = None
    ) -> TurnResult:
        """The turn as the `response` object tells it, with this client's measurements."""
        text = output_text(response) or "".join(self._texts)
        stamps = self._delta_ns
        failure = response.get("error")
        details = response.get("incomplete_details") or {}
        return TurnResult(
            text=text,
            status=str(response.get("status", "error")),
            response_id=self.response_id,
            usage=dict(response.get("usage") or {}),
            timing=dict(response.get("chatrt") or {}),
            ttft_ms=(stamps[0] - self._start_ns) / 1e6 if stamps else None,
            gaps_ms=tuple((b - a) / 1e6 for a, b in itertools.pairwise(stamps)),
            reason=details.get("reason"),
            error=error or (error_from_wire(failure, 500) if failure else None),
        )


def result_of(response: Mapping[str, Any]) -> TurnResult:
    """A turn of before, as its stored `response` object tells it; the TTFT is the server's."""
    recorder = TurnRecorder(0)
    recorder.response_id = response.get("id")
    result = recorder.settled(response)
    server_ms = result.timing.get("ttft_ms")
    return replace(result, ttft_ms=float(server_ms) if server_ms is not None else None)


def output_text(response: Mapping[str, Any]) -> str:
    """All output text of a `response` object."""
    return "".join(
        str(part.get("text", ""))
        for item in response.get("output") or ()
        for part in item.get("content") or ()
        if part.get("type") == "output_text"
    )


def error_from_wire(error: object, status: int) -> errors.ChatrtError:
    """The error of chatrt's tree that an error object of the wire stands for; its code is kept."""
    fields = error if isinstance(error, dict) else {}
    code = fields.get("code") or fields.get("type")
    message = str(fields.get("message") or f"the server reports an error ({code or status})")
    kind = _ERRORS_BY_CODE.get(str(code)) or _ERRORS_BY_STATUS.get(status)
    if kind is None:
        kind = errors.CallerError if 400 <= status < 500 else errors.ChatrtError
    return kind(message, param=fields.get("param"), code=str(code) if code else None)
