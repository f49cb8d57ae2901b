"""From a request and the turns before it to the exact token ids of its sequence.

Knows: stored turns, messages, the prompt builder. Does not know: pages, sockets, the engine.
Invariant: generated ids are never tokenised again while the model stays the same; what a request
changes at the front (instructions, dropped turns) is re-rendered there and only there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from chatrt.errors import ContextLengthExceeded, InvalidValue
from chatrt.prefix import num_common_tokens
from chatrt.store.records import input_messages
from chatrt.text.messages import Message
from chatrt.turn import TurnKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.store import StoredTurn
    from chatrt.text.prompt import PromptBuilder

_SLACK = 8  # dropping turns leaves this part of the context free
PREFILLED = "prefilled"  # status of a stored turn that has no answer (`generate: false`)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request wants appended. `num_reserved` tokens are to stay free for its answer."""

    messages: tuple[Message, ...]
    instructions: str | None
    kind: TurnKind
    drop_oldest: bool = False
    num_reserved: int = 1


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """The sequence of a turn.

    `token_ids[:num_history]` are the exact ids of the tip `tip_id`. `delta_ids` is what the turn
    adds to its stored parent `parent_id`, or the whole sequence when `is_whole`. `messages` are
    those of this turn, with what an unanswered parent (`generate: false`) had asked before.
    """

    token_ids: list[int]
    num_history: int
    tip_id: str | None
    parent_id: str | None
    delta_ids: list[int]
    messages: tuple[Message, ...]
    is_whole: bool = False
    num_dropped_turns: int = 0
    miss_reason: str | None = None
    first_divergence: int | None = None


class PromptPlanner:
    """Plans prompts for one model.

    Args:
        builder: The model's template and tokenizer.
        model: Its name; turns of other models are rendered anew from their text.
        max_context: Tokens that one sequence may hold.
    """

    def __init__(self, builder: PromptBuilder, *, model: str, max_context: int) -> None:
        self._builder = builder
        self._model = model
        self._max_context = max_context

    def num_chars(self, ask: Ask, chain: Sequence[StoredTurn]) -> int:
        """At most how many characters `plan` will tokenise: the turn's own, and renewed history."""
        num_own = sum(len(message.content) for message in ask.messages)
        num_own += len(ask.instructions or "")
        changes_front = any(turn.instructions != ask.instructions for turn in chain[-2:])
        other_model = any(turn.model != self._model for turn in chain)
        renewed = [turn for turn in chain[-1:] if turn.status == PREFILLED]
        if ask.drop_oldest or changes_front or other_model:
            renewed = list(chain)
        return num_own + sum(len(turn.input_json) + len(turn.text) for turn in renewed)

    def plan(self, ask: Ask, chain: Sequence[StoredTurn]) -> PlannedPrompt:
        """The sequence of `ask` behind `chain`, root first.

        Raises:
            InvalidValue: There is no message at all, or the template refuses them.
            ContextLengthExceeded: The sequence does not fit; both numbers are named.
        """
        tip = chain[-1] if chain else None
        if tip is not None and tip.status == PREFILLED:
            chain = chain[:-1]
            ask = replace(ask, messages=(*stored_messages(tip), *ask.messages))
        if not ask.messages and not (ask.instructions and not chain):
            raise InvalidValue("input has no message", param="input")
        planned = self._plan(ask, chain)
        if len(planned.token_ids) + ask.num_reserved > self._max_context and ask.drop_oldest:
            planned = self._drop_oldest(ask, chain, planned)
        if len(planned.token_ids) >= self._max_context:
            raise ContextLengthExceeded(
                f"the conversation has {len(planned.token_ids)} tokens with this turn and the "
                f"context holds {self._max_context}, one of which is needed for the answer",
                param="input",
            )
        return _attach_to(planned, tip, chain)

    def _plan(self, ask: Ask, chain: Sequence[StoredTurn]) -> PlannedPrompt:
        if not chain:
            ids = self._tail_ids(ask, first=True, tip_ids=())
            return PlannedPrompt(ids, 0, None, None, ids, ask.messages)
        parent_id = chain[-1].response_id
        if any(turn.model != self._model for turn in chain):
            return self._replanned(self._retokenised(ask, chain), ask, chain, "model_changed")
        if ask.instructions != chain[-1].instructions:
            ids = self._rebuilt(ask, chain, num_dropped=0)
            return self._replanned(ids, ask, chain, "instructions_changed")
        history = sequence_ids(chain)
        delta = self._tail_ids(ask, first=False, tip_ids=history)
        return PlannedPrompt(
            history + delta, len(history), parent_id, parent_id, delta, ask.messages
        )

    def _replanned(
        self, ids: list[int], ask: Ask, chain: Sequence[StoredTurn], reason: str
    ) -> PlannedPrompt:
        return PlannedPrompt(
            ids,
            0,
            None,
            chain[-1].response_id,
            ids,
            ask.messages,
            is_whole=True,
            miss_reason=reason,
            first_divergence=num_common_tokens(sequence_ids(chain), ids),
        )

    def _drop_oldest(
        self, ask: Ask, chain: Sequence[StoredTurn], planned: PlannedPrompt
    ) -> PlannedPrompt:
        # With some slack, or each of the next turns would drop one more and compute all the rest.
        limit = self._max_context - ask.num_reserved - self._max_context // _SLACK
        for num_dropped in range(1, len(chain) + 1):
            ids = self._rebuilt(ask, chain, num_dropped=num_dropped)
            planned = replace(
                self._replanned(ids, ask, chain, "truncated"), num_dropped_turns=num_dropped
            )
            if len(ids) <= limit:
                break
        return planned

    def _rebuilt(self, ask: Ask, chain: Sequence[StoredTurn], *, num_dropped: int) -> list[int]:
        """The sequence with the asked instructions in front and the oldest turns left out."""
        front = _system_messages(ask.instructions, chain[0] if num_dropped else None)
        kept = chain[num_dropped:]
        if not kept:
            with_front = replace(ask, messages=(*front, *ask.messages), instructions=None)
            return self._tail_ids(with_front, first=True, tip_ids=())
        root = stored_messages(kept[0])
        ids = self._builder.first_prompt([*front, *root]) + list(kept[0].output_ids)
        for turn in kept[1:]:
            if turn.is_whole:
                ids += self._builder.follow_up(stored_messages(turn), tip_ids=ids)
            else:
                ids += turn.prompt_ids
            ids += turn.output_ids
        return ids + self._tail_ids(ask, first=False, tip_ids=ids)

    def _retokenised(self, ask: Ask, chain: Sequence[StoredTurn]) -> list[int]:
        """The sequence from texts alone: another model's ids mean nothing here."""
        front = _system_messages(ask.instructions, None)
        messages = (*front, *transcript(chain), *ask.messages)
        whole = replace(ask, messages=messages, instructions=None)
        return self._tail_ids(whole, first=True, tip_ids=())

    def _tail_ids(self, ask: Ask, *, first: bool, tip_ids: Sequence[int]) -> list[int]:
        """The ids of the asked messages, as a first prompt or behind an answer."""
        answers = ask.kind is TurnKind.ANSWER
        if first:
            messages = [*_system_messages(ask.instructions, None), *ask.messages]
            if ask.kind is TurnKind.TYPED_AHEAD:
                return self._builder.open_first(messages)
            return self._builder.first_prompt(messages, add_generation_prompt=answers)
        if ask.kind is TurnKind.TYPED_AHEAD:
            return self._builder.open_follow_up(ask.messages, tip_ids=tip_ids)
        return self._builder.follow_up(ask.messages, tip_ids=tip_ids, add_generation_prompt=answers)


def sequence_ids(chain: Sequence[StoredTurn]) -> list[int]:
    """All token ids of a chain's tip."""
    start = max((i for i, turn in enumerate(chain) if turn.is_whole), default=0)
    ids: list[int] = []
    for turn in chain[start:]:
        ids += turn.prompt_ids
        ids += turn.output_ids
    return ids


def stored_messages(turn: StoredTurn) -> tuple[Message, ...]:
    """The messages that a turn asked with."""
    return tuple(Message(role, content) for role, content in input_messages(turn.input_json))


def transcript(chain: Sequence[StoredTurn]) -> list[Message]:
    """All messages of a chain, answers included, in order."""
    messages: list[Message] = []
    for turn in chain:
        messages += [*stored_messages(turn), Message("assistant", turn.text)]
    return messages


def _attach_to(
    planned: PlannedPrompt, tip: StoredTurn | None, chain: Sequence[StoredTurn]
) -> PlannedPrompt:
    """Continue an unanswered parent's own tip where the new sequence starts with its ids."""
    if tip is None or tip.status != PREFILLED or planned.is_whole:
        return planned
    ids = sequence_ids([*chain, tip])
    if planned.token_ids[: len(ids)] != ids:
        return planned
    return replace(planned, tip_id=tip.response_id, num_history=len(ids))


def _system_messages(instructions: str | None, root: StoredTurn | None) -> tuple[Message, ...]:
    """The instructions, and the system messages that a dropped root turn had."""
    kept = [] if root is None else [m for m in stored_messages(root) if m.template_role == "system"]
    front = [Message("system", instructions)] if instructions else []
    return (*front, *kept)
