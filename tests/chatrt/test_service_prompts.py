"""Tests of chatrt.service.prompts: what is appended, what is rendered anew, and from where on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.errors import ContextLengthExceeded, InvalidValue
from chatrt.prefix import num_common_tokens
from chatrt.service.prompts import (
    PREFILLED,
    Ask,
    PlannedPrompt,
    PromptPlanner,
    sequence_ids,
    transcript,
)
from chatrt.store import StoredTurn
from chatrt.text.messages import Message
from chatrt.text.prompt import PromptBuilder
from chatrt.turn import TurnKind

if TYPE_CHECKING:
    from chatrt.text.tokenizer import Tokenizer

MODEL = "tiny"


def planner(tokenizer: Tokenizer, max_context: int = 4096) -> PromptPlanner:
    return PromptPlanner(PromptBuilder(tokenizer), model=MODEL, max_context=max_context)


def ask(text: str, **fields: Any) -> Ask:
    given = {"instructions": None, "kind": TurnKind.ANSWER} | fields
    return Ask(messages=(Message("user", text),), **given)


def stored(
    response_id: str,
    planned: PlannedPrompt,
    answer: tuple[int, ...],
    text: str,
    **fields: Any,
) -> StoredTurn:
    """The turn as the service keeps it; `answer` need not be how `text` is tokenised."""
    given = {"model": MODEL, "status": "completed"} | fields
    messages = [{"role": m.role, "content": m.content} for m in planned.messages]
    return StoredTurn(
        response_id=response_id,
        parent_id=planned.parent_id,
        key_id="key",
        input_json=json.dumps(messages),
        prompt_ids=tuple(planned.delta_ids),
        output_ids=answer,
        is_whole=planned.is_whole,
        text=text,
        created_at=0.0,
        **given,
    )


def chain_of(tokenizer: Tokenizer, *texts: str, **fields: Any) -> list[StoredTurn]:
    """A conversation; every answer is "ok" in two tokens, which its text has as well."""
    answer = (*tokenizer.encode("o"), *tokenizer.encode("k"))
    chain: list[StoredTurn] = []
    for index, text in enumerate(texts):
        planned = planner(tokenizer).plan(ask(text), chain)
        chain.append(stored(f"resp_{index}", planned, answer, "ok", **fields))
    return chain


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special=False)


def test_a_follow_up_is_the_tips_ids_and_a_delta_behind_them(tokenizer: Tokenizer) -> None:
    chain = chain_of(tokenizer, "one", "two")
    planned = planner(tokenizer).plan(ask("three"), chain)
    history = sequence_ids(chain)
    assert planned.token_ids == history + planned.delta_ids
    assert (planned.num_history, planned.tip_id, planned.parent_id) == (
        len(history),
        "resp_1",
        "resp_1",
    )
    assert (planned.is_whole, planned.miss_reason) == (False, None)
    assert "three" in shown(tokenizer, planned.delta_ids)
    assert "two" not in shown(tokenizer, planned.delta_ids)


def test_other_instructions_keep_generated_ids_and_name_where_the_sequence_parts(
    tokenizer: Tokenizer,
) -> None:
    chain = chain_of(tokenizer, "one", "two")
    planned = planner(tokenizer).plan(ask("three", instructions="Be brief."), chain)
    history = sequence_ids(chain)
    assert (planned.is_whole, planned.miss_reason) == (True, "instructions_changed")
    assert (planned.num_history, planned.tip_id, planned.parent_id) == (0, None, "resp_1")
    assert planned.first_divergence is not None
    position = planned.first_divergence.position
    assert position == num_common_tokens(history, planned.token_ids) < len(history)
    text = shown(tokenizer, planned.token_ids)
    assert text.index("Be brief.") < text.index("one") < text.index("two") < text.index("three")
    assert text.count("ok") == 2
    # The answer's own two ids, which a new tokenisation of its text need not give.
    answer = list(chain[0].output_ids)
    pairs = [planned.token_ids[i : i + 2] for i in range(len(planned.token_ids))]
    assert pairs.count(answer) == 2


def test_a_turn_that_is_whole_makes_what_came_before_it_irrelevant(tokenizer: Tokenizer) -> None:
    chain = chain_of(tokenizer, "one")
    changed = planner(tokenizer).plan(ask("two", instructions="Be brief."), chain)
    answer = tuple(tokenizer.encode("yes"))
    chain.append(stored("resp_x", changed, answer, "yes", instructions="Be brief."))
    assert sequence_ids(chain) == [*changed.token_ids, *answer]
    planned = planner(tokenizer).plan(ask("three", instructions="Be brief."), chain)
    assert planned.token_ids[: planned.num_history] == sequence_ids(chain)
    assert not planned.is_whole


def test_another_models_turns_are_rendered_from_their_texts(tokenizer: Tokenizer) -> None:
    chain = chain_of(tokenizer, "one", model="other")
    planned = planner(tokenizer).plan(ask("two"), chain)
    assert (planned.is_whole, planned.miss_reason) == (True, "model_changed")
    messages = [*transcript(chain), Message("user", "two")]
    assert planned.token_ids == PromptBuilder(tokenizer).first_prompt(messages)


def test_a_parent_without_an_answer_asks_together_with_its_follow_up(tokenizer: Tokenizer) -> None:
    chain = chain_of(tokenizer, "one")
    prefill = planner(tokenizer).plan(ask("two", kind=TurnKind.PREFILL), chain)
    prefilled = stored("resp_p", prefill, (), "", status=PREFILLED)
    planned = planner(tokenizer).plan(ask("three"), [*chain, prefilled])
    assert [m.content for m in planned.messages] == ["two", "three"]
    assert (planned.parent_id, planned.tip_id) == ("resp_0", "resp_p")
    assert planned.token_ids[: planned.num_history] == sequence_ids([*chain, prefilled])


def test_the_oldest_whole_turns_are_dropped_until_the_answer_has_room(
    tokenizer: Tokenizer,
) -> None:
    chain = chain_of(tokenizer, "one", "two", "three")
    full = planner(tokenizer).plan(ask("four"), chain)
    limit = len(full.token_ids) + 3
    asked = ask("four", drop_oldest=True, num_reserved=4)
    planned = planner(tokenizer, limit).plan(asked, chain)
    assert (planned.num_dropped_turns, planned.miss_reason) == (1, "truncated")
    assert len(planned.token_ids) + 4 <= limit
    text = shown(tokenizer, planned.token_ids)
    assert "one" not in text
    assert "two" in text


def test_a_sequence_that_does_not_fit_is_refused_with_both_numbers(tokenizer: Tokenizer) -> None:
    chain = chain_of(tokenizer, "one")
    length = len(planner(tokenizer).plan(ask("two"), chain).token_ids)
    assert planner(tokenizer, length + 1).plan(ask("two"), chain).num_history
    with pytest.raises(ContextLengthExceeded, match=rf"{length} tokens .* holds {length},"):
        planner(tokenizer, length).plan(ask("two"), chain)


def test_nothing_to_say_is_refused(tokenizer: Tokenizer) -> None:
    nothing = Ask(messages=(), instructions=None, kind=TurnKind.ANSWER)
    with pytest.raises(InvalidValue, match="no message"):
        planner(tokenizer).plan(nothing, [])
