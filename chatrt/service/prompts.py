"""From a request and the turns before it to the exact token ids of its sequence.

Knows: stored turns, messages, the prompt builder. Does not know: pages, sockets, the engine.
Invariant: generated ids are never tokenised again while the model stays the same; what a request
changes at the front (instructions, dropped turns) is re-rendered there and only there. A turn is
followed in its settled form: as its template reads it once another turn follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from chatrt.errors import ContextLengthExceeded, InvalidValue
from chatrt.prefix import num_common_tokens
from chatrt.store.records import input_messages
from chatrt.text.messages import Message
from chatrt.turn import Divergence, TurnKind

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

    `num_history` is how many leading ids it shares with the exact tip `tip_id`: all of the tip's,
    or fewer where the template reads the tip's answer in another way from now on. `delta_ids` is
    what the turn adds to its stored parent `parent_id`, as settled, or the whole sequence when
    `is_whole`. `messages` are those of this turn, with what an unanswered parent
    (`generate: false`) had asked before.
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
    first_divergence: Divergence | None = None


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

    def next_turn_ids(self, chain: Sequence[StoredTurn]) -> list[int]:
        """What every next turn behind an answered `chain` begins with, as far as it is certain.

        Empty where that cannot be known: no turn, none that was answered, another model's turns.
        """
        if not chain or chain[-1].status == PREFILLED:
            return []
        if any(turn.model != self._model for turn in chain):
            return []
        history = history_ids(chain)
        ids = history + self._builder.glue(history)
        return ids if len(ids) < self._max_context else []

    def _plan(self, ask: Ask, chain: Sequence[StoredTurn]) -> PlannedPrompt:
        if not chain:
            ids = self._first(ask)
            return PlannedPrompt(ids, 0, None, None, ids, ask.messages)
        parent_id = chain[-1].response_id
        if any(turn.model != self._model for turn in chain):
            ids = self._rebuilt(ask, chain, num_dropped=0)
            return self._replanned(ids, ask, chain, "model_changed")
        if ask.instructions != chain[-1].instructions:
            ids = self._rebuilt(ask, chain, num_dropped=0)
            return self._replanned(ids, ask, chain, "instructions_changed")
        history = history_ids(chain)
        front = _system_messages(ask.instructions, chain[0])
        delta = self._behind(ask, history, front)
        ids = history + delta
        planned = PlannedPrompt(ids, len(history), parent_id, parent_id, delta, ask.messages)
        return planned if chain[-1].settled_from is None else _drifted(planned, sequence_ids(chain))

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
            first_divergence=self._divergence(chain, ids),
        )

    def _divergence(self, chain: Sequence[StoredTurn], ids: Sequence[int]) -> Divergence | None:
        # Ids of another vocabulary are other words; there is nothing to compare.
        if any(turn.model != self._model for turn in chain):
            return None
        return divergence(sequence_ids(chain), ids)

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
        all_front = _system_messages(ask.instructions, chain[0])
        # A root that is kept brings its own system messages.
        front = all_front if num_dropped else _system_messages(ask.instructions, None)
        kept = chain[num_dropped:]
        # From texts alone where turns of another model are kept: its ids mean nothing here.
        if not kept or any(turn.model != self._model for turn in kept):
            messages = (*front, *transcript(kept), *ask.messages)
            return self._first(replace(ask, messages=messages, instructions=None))
        root = self._builder.first_prompt([*front, *stored_messages(kept[0])])
        ids = self._answered(root, kept[0])
        for turn in kept[1:]:
            if turn.is_whole:
                prompt = self._builder.follow_up(
                    stored_messages(turn), tip_ids=ids, front=all_front
                )
                ids += self._answered(prompt, turn)
            else:
                ids += turn.settled_sequence
        return ids + self._behind(ask, ids, all_front)

    def _answered(self, prompt_ids: list[int], turn: StoredTurn) -> list[int]:
        """A turn's answer behind a prompt that was rendered anew, settled."""
        ids = [*prompt_ids, *turn.output_ids]
        settled = self._builder.settle(prompt_ids, turn.output_ids)
        return ids if settled is None else [*ids[: settled.start], *settled.token_ids]

    def _first(self, ask: Ask) -> list[int]:
        """The ids of the asked messages as a first prompt."""
        messages = [*_system_messages(ask.instructions, None), *ask.messages]
        if _is_unwritten(ask):
            return self._builder.open_first(messages)
        answers = ask.kind is not TurnKind.PREFILL
        return self._builder.first_prompt(messages, add_generation_prompt=answers)

    def _behind(self, ask: Ask, history: Sequence[int], front: tuple[Message, ...]) -> list[int]:
        """The ids of the asked messages behind an answered history."""
        if _is_unwritten(ask):
            return self._builder.open_follow_up(ask.messages, tip_ids=history)
        return self._builder.follow_up(
            ask.messages,
            tip_ids=history,
            add_generation_prompt=ask.kind is not TurnKind.PREFILL,
            front=front,
        )


def _is_unwritten(ask: Ask) -> bool:
    """Whether the message that is being typed has no word yet.

    One that has is planned as if it were sent as it stands (ADR 14): if it is, all is ready; if it
    goes on, what was computed of its end is computed anew.
    """
    return ask.kind is TurnKind.TYPED_AHEAD and not ask.messages[-1].content.strip()


def sequence_ids(chain: Sequence[StoredTurn]) -> list[int]:
    """The exact token ids of a chain's tip: earlier turns as settled, its own as they were."""
    if not chain:
        return []
    before = [] if chain[-1].is_whole else history_ids(chain[:-1])
    return [*before, *chain[-1].own_sequence]


def history_ids(chain: Sequence[StoredTurn]) -> list[int]:
    """What a turn behind a chain begins with: all turns of the chain as settled."""
    start = max((i for i, turn in enumerate(chain) if turn.is_whole), default=0)
    ids: list[int] = []
    for turn in chain[start:]:
        ids += turn.settled_sequence
    return ids


def divergence(held_ids: Sequence[int], asked_ids: Sequence[int]) -> Divergence | None:
    """Where `asked_ids` stop being a continuation of `held_ids`, if they do."""
    position = num_common_tokens(held_ids, asked_ids)
    if position == len(held_ids):
        return None
    asked = asked_ids[position] if position < len(asked_ids) else None
    return Divergence(position, held_ids[position], asked)


def stored_messages(turn: StoredTurn) -> tuple[Message, ...]:
    """The messages that a turn asked with."""
    return tuple(Message(role, content) for role, content in input_messages(turn.input_json))


def transcript(chain: Sequence[StoredTurn]) -> list[Message]:
    """All messages of a chain, answers included, in order."""
    messages: list[Message] = []
    for turn in chain:
        messages += [*stored_messages(turn), Message("assistant", turn.text)]
    return messages


def _drifted(planned: PlannedPrompt, tip_ids: Sequence[int]) -> PlannedPrompt:
    """The plan with what it shares with the exact ids of its tip."""
    drift = divergence(tip_ids, planned.token_ids)
    if drift is None:
        return replace(planned, num_history=len(tip_ids))
    return replace(
        planned,
        num_history=drift.position,
        miss_reason="template_drift",
        first_divergence=drift,
    )


def _attach_to(
    planned: PlannedPrompt, tip: StoredTurn | None, chain: Sequence[StoredTurn]
) -> PlannedPrompt:
    """Continue an unanswered parent's own tip where the new sequence starts with its ids."""
    if tip is None or tip.status != PREFILLED or planned.is_whole:
        return planned
    ids = sequence_ids([*chain, tip])
    if planned.token_ids[: len(ids)] != ids:
        return planned
    return replace(
        planned,
        tip_id=tip.response_id,
        num_history=len(ids),
        miss_reason=None,
        first_divergence=None,
    )


def _system_messages(instructions: str | None, root: StoredTurn | None) -> tuple[Message, ...]:
    """The instructions, and the system messages that a dropped root turn had."""
    kept = [] if root is None else [m for m in stored_messages(root) if m.template_role == "system"]
    front = [Message("system", instructions)] if instructions else []
    return (*front, *kept)
