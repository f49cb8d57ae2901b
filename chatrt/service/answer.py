"""One running answer: the engine's events become the wire's, and the turn becomes a stored one.

Knows: a request, its log, its events. Does not know: how it is stored, who reads the log.
Invariant: text goes into the log in the order in which it was accepted; `close` is called once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from chatrt.errors import ChatrtError, Conflict
from chatrt.service.figures import turn_figures
from chatrt.service.prompts import PREFILLED, transcript
from chatrt.store import StoredTurn
from chatrt.turn import FinishedEvent, FinishReason, KVFigures, TokensEvent, TurnKind
from chatrt.wire.events import AnswerEvents, ResponseFields, Usage, logprob_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from chatrt.service.prompts import PlannedPrompt
    from chatrt.text.messages import Message
    from chatrt.text.prompt import PromptBuilder
    from chatrt.text.settled import Settled
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import EngineEvent, TokenLogprob, TurnRequest
    from chatrt.wire.log import ResponseLog

_STATUS = {
    FinishReason.END_OF_TURN: "completed",
    FinishReason.PREFILLED: PREFILLED,
    FinishReason.MAX_OUTPUT_TOKENS: "incomplete",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.FAILED: "failed",
}


@dataclass(slots=True)
class Answer:
    """A turn between the engine and its log. `on_finished` is told once, with the last event.

    `builder` says how the answer will read once another turn follows it; without one, as it is.
    `turn` is what was kept of it, once it was; `cancel_asked_ns` when its end was first asked for.
    """

    request: TurnRequest
    planned: PlannedPrompt
    fields: ResponseFields
    log: ResponseLog
    tokenizer: Tokenizer
    token_timing: bool
    on_finished: Callable[[Answer, FinishedEvent], None]
    builder: PromptBuilder | None = None
    events: AnswerEvents = field(init=False)
    delta_times_ns: list[int] = field(default_factory=list)
    turn: StoredTurn | None = None
    cancel_asked_ns: int | None = None
    log_closed: asyncio.Event = field(default_factory=asyncio.Event)
    _num_held: int = 0

    def __post_init__(self) -> None:
        generates = self.request.kind is TurnKind.ANSWER
        self.events = AnswerEvents(self.log, self.fields, generates=generates)

    def on_event(self, event: EngineEvent) -> None:
        """Take an event of the engine, on the loop's thread."""
        if isinstance(event, TokensEvent):
            self._tokens(event)
        elif isinstance(event, FinishedEvent):
            self.on_finished(self, event)

    def close(self, event: FinishedEvent, *, store_error: ChatrtError | None = None) -> None:
        """Append the terminal event."""
        usage, kv = self.usage(event), self.kv(event)

        def figures(first_sent_ns: int | None) -> dict[str, Any]:
            body = turn_figures(
                self.request.stamps,
                event,
                kv=kv,
                delta_times_ns=self.delta_times_ns,
                first_sent_ns=first_sent_ns,
                token=self.tokenizer.token,
            )
            if store_error is not None:
                body["store_error"] = store_error.message
            return body

        if event.num_shown is not None:
            self.events.keep_logprobs(event.num_shown)
        if event.reason is FinishReason.FAILED:
            self.events.failed(event.error or ChatrtError("the turn failed"), usage, figures)
        elif event.reason is FinishReason.CANCELLED:
            self.events.cancelled(usage, figures)
        elif event.reason is FinishReason.MAX_OUTPUT_TOKENS:
            self.events.incomplete("max_output_tokens", usage, figures)
        else:
            self.events.complete(usage, figures)

    def usage(self, event: FinishedEvent) -> Usage:
        """Token counts as the API reports them."""
        return Usage(
            input_tokens=len(self.request.token_ids),
            output_tokens=_num_output(event),
            cached_tokens=event.kv.reused_tokens,
            cache_write_tokens=event.kv.computed_tokens,
        )

    def kv(self, event: FinishedEvent) -> KVFigures:
        """The engine's figures, with what the prompt's plan knows about a miss."""
        planned = self.planned
        if planned.miss_reason is None:
            return event.kv
        return replace(
            event.kv,
            dropped_turns=planned.num_dropped_turns,
            miss_reason=planned.miss_reason,
            first_divergence=planned.first_divergence,
        )

    def stored(self, event: FinishedEvent) -> StoredTurn:
        """The turn for the store."""
        figures = turn_figures(
            self.request.stamps,
            event,
            kv=self.kv(event),
            delta_times_ns=self.delta_times_ns,
            first_sent_ns=self.log.first_sent_ns,
            token=self.tokenizer.token,
        )
        settled = self._settled(event)
        return StoredTurn(
            response_id=self.request.response_id,
            parent_id=self.planned.parent_id,
            conversation_id=self.log.conversation_id,
            key_id=self.log.key_id,
            model=self.fields.model,
            instructions=self.fields.instructions,
            input_json=_messages_json(self.planned.messages),
            prompt_ids=tuple(self.planned.delta_ids),
            output_ids=event.output_ids,
            is_whole=self.planned.is_whole,
            settled_from=None if settled is None else settled.start,
            settled_ids=() if settled is None else settled.token_ids,
            text=event.text,
            status=_STATUS[event.reason],
            usage_json=_json(self.usage(event).body()),
            timing_json=_json(figures),
            params_json=_json(self.fields),
            created_at=float(self.fields.created_at),
            seed=event.seed,
        )

    def stored_whole(self, event: FinishedEvent, earlier: Sequence[StoredTurn]) -> StoredTurn:
        """The turn for the store when its parent is not there: a root with all that was `earlier`.

        Its messages are those of the whole chain, from which it can be rendered anew.
        """
        turn = self.stored(event)
        num_earlier = len(self.request.token_ids) - len(turn.prompt_ids)
        return replace(
            turn,
            parent_id=None,
            input_json=_messages_json([*transcript(earlier), *self.planned.messages]),
            prompt_ids=tuple(self.request.token_ids),
            is_whole=True,
            settled_from=None if turn.settled_from is None else num_earlier + turn.settled_from,
        )

    def _settled(self, event: FinishedEvent) -> Settled | None:
        if self.builder is None or self.request.kind is not TurnKind.ANSWER:
            return None
        return self.builder.settle(self.planned.delta_ids, event.output_ids)

    def _tokens(self, event: TokensEvent) -> None:
        entries = [self._logprob_entry(entry) for entry in event.logprobs]
        self._num_held += len(event.token_ids)
        timing = None
        if event.text:
            self.delta_times_ns.append(event.time_ns)
            if self.token_timing:
                t_ms = (event.time_ns - self.request.stamps.received_ns) / 1e6
                timing = {"t_ms": round(t_ms, 4), "n": self._num_held}
            self._num_held = 0
        self.events.delta(event.text, entries, timing)

    def _logprob_entry(self, entry: TokenLogprob) -> dict[str, Any]:
        token_bytes = self.tokenizer.token_bytes
        top = [(token_bytes(token_id, skip_special=False), value) for token_id, value in entry.top]
        return logprob_entry(token_bytes(entry.token_id, skip_special=False), entry.logprob, top)


def check_unanswered(answers: Iterable[Answer], conversation_id: str) -> None:
    """A conversation has one next turn: two at once would hide each other's in its list.

    Raises:
        Conflict: One of the `answers` answers the conversation.
    """
    for answer in answers:
        running = answer.log.conversation_id == conversation_id
        if running and answer.request.kind is TurnKind.ANSWER:
            raise Conflict(
                f"conversation {conversation_id} is being answered by "
                f"{answer.log.response_id}; wait for it, or fork with previous_response_id",
                param="conversation",
            )


def _messages_json(messages: Sequence[Message]) -> str:
    return _json([{"role": message.role, "content": message.content} for message in messages])


def _num_output(event: FinishedEvent) -> int:
    """Tokens of the answer: those that a stop string cut off do not count."""
    return event.num_generated if event.stop_string is None else len(event.output_ids)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
