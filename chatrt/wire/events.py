"""An answer as the exact sequence of events that the API's clients expect.

Knows: the order, the event and response objects, which fields the SDK's types require.
Does not know: tokens, sessions, who reads the log.
Invariant: `created, in_progress, [item added, part added, delta × n, text done, part done, item
done,] terminal`, the bracket exactly if the response generates. The item's frames go out before
the first token exists, so that the first token is one frame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from chatrt.wire.ids import message_id
from chatrt.wire.log import DELTA, ResponseLog

if TYPE_CHECKING:
    from chatrt.errors import ChatrtError
    from chatrt.params import SamplingParams
    from chatrt.wire.encode import Event
    from chatrt.wire.messages import ResponseCreate

Figures: TypeAlias = Callable[[int | None], dict[str, Any]]
"""Makes `response.chatrt` from when the first delta was sent, in ns; None if none was."""

_Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
_LOWEST_LOGPROB = -9999.0  # the API's stand-in for minus infinity, which JSON lacks


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a turn; `cached_tokens` of the input tokens were not computed again."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    cache_write_tokens: int = 0

    def body(self) -> dict[str, Any]:
        """The API's `usage` object, both detail objects present."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": self.cache_write_tokens,
            },
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


@dataclass(frozen=True, slots=True)
class ResponseFields:
    """What a response object repeats of its request. `created_at` in seconds since 1970."""

    model: str
    created_at: int
    temperature: float
    top_p: float
    instructions: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    previous_response_id: str | None = None
    conversation_id: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    truncation: str = "disabled"
    store: bool = True
    new_branch: bool = False

    @classmethod
    def of(
        cls,
        message: ResponseCreate,
        sampling: SamplingParams,
        *,
        model: str,
        created_at: int,
        conversation_id: str | None = None,
    ) -> ResponseFields:
        """The fields of a request, with the sampling that was resolved for it."""
        return cls(
            model=model,
            created_at=created_at,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            instructions=message.instructions,
            metadata=message.metadata,
            previous_response_id=message.previous_response_id,
            conversation_id=conversation_id,
            max_output_tokens=sampling.max_output_tokens,
            top_logprobs=sampling.top_logprobs,
            truncation=message.truncation,
            store=message.store,
            new_branch=message.chatrt.new_branch,
        )


def response_body(
    response_id: str,
    fields: ResponseFields,
    *,
    status: str,
    output: Sequence[dict[str, Any]],
    usage: Usage | None = None,
    reason: str | None = None,
    error: ChatrtError | None = None,
) -> dict[str, Any]:
    """A full response object; `reason` is why it is incomplete, `error` why it failed."""
    body: dict[str, Any] = {
        "id": response_id,
        "object": "response",
        "created_at": fields.created_at,
        "status": status,
        "error": None if error is None else {"code": error.code, "message": error.message},
        "incomplete_details": None if reason is None else {"reason": reason},
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": dict(fields.metadata),
        "model": fields.model,
        "output": list(output),
        "parallel_tool_calls": False,
        "previous_response_id": fields.previous_response_id,
        "store": fields.store,
        "temperature": fields.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": fields.top_logprobs,
        "top_p": fields.top_p,
        "truncation": fields.truncation,
        "usage": None if usage is None else usage.body(),
    }
    if fields.conversation_id is not None:
        body["conversation"] = {"id": fields.conversation_id}
    if fields.new_branch:  # a watcher could not tell it from a turn behind the newest one
        body["chatrt"] = {"new_branch": True}
    return body


def message_item(
    response_id: str,
    text: str,
    *,
    status: Literal["in_progress", "completed", "incomplete"] = "completed",
    logprobs: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """The output message of a response, with one text part."""
    return {**_empty_item(response_id, status), "content": [_text_part(text, logprobs)]}


def logprob_entry(
    token: bytes, logprob: float, top: Sequence[tuple[bytes, float]] = ()
) -> dict[str, Any]:
    """A token's log-probability as the API writes it; `top` are the likeliest at its place.

    A token that is only part of a character shows its bytes as `\\xNN`.
    """
    alternatives = [_one_logprob(other, value) for other, value in top]
    return {**_one_logprob(token, logprob), "top_logprobs": alternatives}


class AnswerEvents:
    """Writes one response into its log, from `start` to one of the four endings.

    `generates` False is a prefill: no item, an empty output. Each ending takes `figures`, which is
    called when the terminal event goes out.
    """

    def __init__(self, log: ResponseLog, fields: ResponseFields, *, generates: bool = True) -> None:
        self._log = log
        self._fields = fields
        self._generates = generates
        self._item_id = message_id(log.response_id)
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._held_logprobs: list[dict[str, Any]] = []  # of tokens that ended no character yet

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def snapshot(self) -> dict[str, Any]:
        """The response object as it stands, running or ended."""
        terminal = self._log.terminal_event()
        if terminal is not None:
            body: dict[str, Any] = terminal["response"]
            return body
        return self._response("in_progress", [])

    def start(self) -> None:
        """Created, in progress, and the empty message that deltas will fill."""
        for name in ("created", "in_progress"):
            self._append(f"response.{name}", response=self._response("in_progress", []))
        if self._generates:
            item = _empty_item(self._log.response_id, "in_progress")
            self._append("response.output_item.added", output_index=0, item=item)
            self._append_part("response.content_part.added", part=_text_part("", ()))

    def delta(
        self,
        text: str,
        logprobs: Sequence[dict[str, Any]] = (),
        chatrt: dict[str, Any] | None = None,
    ) -> None:
        """New text with the log-probabilities of its tokens (from `logprob_entry`).

        Without text nothing is sent; the log-probabilities go out with the next text.
        `chatrt` is the per-token timing `{"t_ms", "n"}`, if it was asked for.
        """
        self._held_logprobs.extend(logprobs)
        if text:
            self._append_delta(text, chatrt)

    def keep_logprobs(self, num_tokens: int) -> None:
        """Forget held log-probabilities of tokens behind the first `num_tokens` of the answer."""
        del self._held_logprobs[max(0, num_tokens - len(self._logprobs)) :]

    def complete(self, usage: Usage, figures: Figures | None = None) -> None:
        """The model ended its turn, or the prefill is done."""
        self._end("response.completed", "completed", usage=usage, figures=figures)

    def incomplete(self, reason: str, usage: Usage, figures: Figures | None = None) -> None:
        """The answer was cut, as `max_output_tokens` does."""
        self._end("response.incomplete", "incomplete", reason=reason, usage=usage, figures=figures)

    def cancelled(self, usage: Usage, figures: Figures | None = None) -> None:
        """The caller cancelled; the partial output stays usable as a parent."""
        self._end(
            "response.incomplete", "cancelled", reason="cancelled", usage=usage, figures=figures
        )

    def failed(
        self, error: ChatrtError, usage: Usage | None = None, figures: Figures | None = None
    ) -> None:
        """The turn failed after it had started."""
        self._end("response.failed", "failed", error=error, usage=usage, figures=figures)

    def _end(
        self,
        event_type: str,
        status: _Status,
        *,
        usage: Usage | None,
        figures: Figures | None,
        reason: str | None = None,
        error: ChatrtError | None = None,
    ) -> None:
        output = [self._close_item(status == "completed")] if self._generates else []
        response = self._response(status, output, usage=usage, reason=reason, error=error)

        def build(first_sent_ns: int | None) -> Event:
            body = response
            if figures is not None:
                body = {**response, "chatrt": figures(first_sent_ns)}
            return {"type": event_type, "response": body}

        self._log.finish(build)

    def _close_item(self, completed: bool) -> dict[str, Any]:
        """Append the three `done` events; returns the finished message."""
        if self._held_logprobs:
            self._append_delta("", None)
        item = message_item(
            self._log.response_id,
            self.text,
            status="completed" if completed else "incomplete",
            logprobs=self._logprobs,
        )
        part = item["content"][0]
        self._append_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        self._append_part("response.content_part.done", part=part)
        self._append("response.output_item.done", output_index=0, item=item)
        return item

    def _append_delta(self, text: str, chatrt: dict[str, Any] | None) -> None:
        logprobs, self._held_logprobs = self._held_logprobs, []
        self._texts.append(text)
        self._logprobs.extend(logprobs)
        extra = {} if chatrt is None else {"chatrt": chatrt}
        self._append_part(
            DELTA, delta=text, logprobs=logprobs, response_id=self._log.response_id, **extra
        )

    def _append_part(self, event_type: str, **fields: Any) -> None:
        self._append(event_type, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _append(self, event_type: str, **fields: Any) -> None:
        self._log.append({"type": event_type, **fields})

    def _response(
        self,
        status: _Status,
        output: Sequence[dict[str, Any]],
        *,
        usage: Usage | None = None,
        reason: str | None = None,
        error: ChatrtError | None = None,
    ) -> dict[str, Any]:
        return response_body(
            self._log.response_id,
            self._fields,
            status=status,
            output=output,
            usage=usage,
            reason=reason,
            error=error,
        )


def _empty_item(response_id: str, status: str) -> dict[str, Any]:
    return {
        "id": message_id(response_id),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [],
    }


def _text_part(text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _one_logprob(token: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": token.decode("utf-8", "backslashreplace"),
        "bytes": list(token),
        "logprob": logprob if math.isfinite(logprob) else _LOWEST_LOGPROB,
    }
