"""Conversations with templates that read an answer in another way once another turn follows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from chatrt.prefix import num_common_tokens
from chatrt.service.prompts import (
    PREFILLED,
    Ask,
    PlannedPrompt,
    PromptPlanner,
    history_ids,
    sequence_ids,
)
from chatrt.store import StoredTurn
from chatrt.text.messages import Message
from chatrt.text.prompt import PromptBuilder
from chatrt.turn import Divergence, TurnKind
from tests.chatrt.drift_support import (
    FAMILIES,
    THINKING,
    Family,
    byte_tokenizer,
    family_named,
    merging_tokenizer,
)

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.text.tokenizer import Tokenizer

MODEL = "tiny"
QUESTIONS = ("Capital of France?", "And of Italy?", "Which is larger?")


class Conversation:
    """A chain of stored turns as the service makes it, with the messages that it stands for."""

    def __init__(self, tokenizer: Tokenizer, *, max_context: int = 8192) -> None:
        self.tokenizer = tokenizer
        self.builder = PromptBuilder(tokenizer)
        self.planner = PromptPlanner(self.builder, model=MODEL, max_context=max_context)
        self.chain: list[StoredTurn] = []
        self.messages: list[Message] = []

    def plan(self, text: str, *, kind: TurnKind = TurnKind.ANSWER) -> PlannedPrompt:
        return self.planner.plan(Ask((Message("user", text),), None, kind), self.chain)

    def answer(self, planned: PlannedPrompt, output_ids: list[int]) -> None:
        """Store the planned turn with an answer of these ids."""
        settled = self.builder.settle(planned.delta_ids, output_ids)
        text = self.tokenizer.decode(output_ids)
        asked = [{"role": m.role, "content": m.content} for m in planned.messages]
        turn = StoredTurn(
            response_id=f"resp_{len(self.chain)}",
            parent_id=planned.parent_id,
            key_id="key",
            model=MODEL,
            input_json=json.dumps(asked),
            prompt_ids=tuple(planned.delta_ids),
            output_ids=tuple(output_ids),
            is_whole=planned.is_whole,
            settled_from=None if settled is None else settled.start,
            settled_ids=() if settled is None else settled.token_ids,
            text=text,
            created_at=0.0,
        )
        self.chain.append(turn)
        self.messages += [*planned.messages, Message("assistant", text)]

    def ask(self, question: str, answer: str, end_of_turn: str | None) -> PlannedPrompt:
        planned = self.plan(question)
        end = [] if end_of_turn is None else [self.token_id(end_of_turn)]
        self.answer(planned, [*self.tokenizer.encode(answer, behind=True), *end])
        return planned

    def token_id(self, token: str) -> int:
        token_id = self.tokenizer.id_of(token)
        assert token_id is not None
        return token_id

    def whole(self, question: str) -> list[int]:
        """The ids of the whole chat, rendered at once."""
        return self.builder.first_prompt([*self.messages, Message("user", question)])


def two_turns(family: Family, tokenizer: Tokenizer) -> Conversation:
    chat = Conversation(tokenizer)
    for question, answer in zip(QUESTIONS, family.answers, strict=False):
        chat.ask(question, answer, family.end_of_turn)
    return chat


def without_date(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The ids behind the system message, whose date is of the moment of its rendering."""
    text = tokenizer.decode(ids, skip_special=False)
    return tokenizer.encode(text[text.index(QUESTIONS[0]) :])


@pytest.mark.parametrize("tags", [True, False], ids=["tags", "spelled"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))
def test_every_turn_reads_as_the_whole_chat_rendered_at_once(family: Family, tags: bool) -> None:
    tokenizer = byte_tokenizer(family, tags=tags)
    chat = Conversation(tokenizer)
    for question, answer in zip(QUESTIONS, family.answers, strict=False):
        whole = chat.whole(question)
        planned = chat.ask(question, answer, family.end_of_turn)
        assert without_date(tokenizer, planned.token_ids) == without_date(tokenizer, whole)
    planned = chat.plan(QUESTIONS[2])
    whole = chat.whole(QUESTIONS[2])
    assert without_date(tokenizer, planned.token_ids) == without_date(tokenizer, whole)
    # The front was rendered once: what stands there stays, whatever the date.
    first = list(chat.chain[0].prompt_ids)
    front = first[: len(first) - len(without_date(tokenizer, first))]
    assert planned.token_ids[: len(front)] == front


@pytest.mark.parametrize("tags", [True, False], ids=["tags", "spelled"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))
def test_a_drift_is_reported_with_its_position_and_both_tokens(family: Family, tags: bool) -> None:
    chat = two_turns(family, byte_tokenizer(family, tags=tags))
    planned = chat.plan(QUESTIONS[2])
    held = sequence_ids(chat.chain)
    position = num_common_tokens(held, planned.token_ids)
    assert (planned.tip_id, planned.parent_id) == ("resp_1", "resp_1")
    assert planned.num_history == position
    assert not planned.is_whole
    if family.drifts:
        assert position < len(held)
        assert planned.miss_reason == "template_drift"
        asked = planned.token_ids[position]
        assert planned.first_divergence == Divergence(position, held[position], asked)
    else:
        assert position == len(held)
        assert planned.miss_reason is None
        assert planned.first_divergence is None


def test_the_position_is_where_the_reasoning_began() -> None:
    family = family_named("qwen3")
    chat = Conversation(byte_tokenizer(family))
    first = chat.ask(QUESTIONS[0], family.answers[0], family.end_of_turn)
    planned = chat.plan(QUESTIONS[1])
    assert planned.first_divergence == Divergence(
        len(first.token_ids), chat.token_id("<think>"), ord("P")
    )


def test_the_position_is_inside_the_prompt_where_the_opening_drifts() -> None:
    family = family_named("qwen3-empty")
    chat = Conversation(byte_tokenizer(family))
    first = chat.ask(QUESTIONS[0], "Paris.", family.end_of_turn)
    planned = chat.plan(QUESTIONS[1])
    start = first.token_ids.index(chat.token_id("<think>"))
    assert planned.first_divergence == Divergence(start, chat.token_id("<think>"), ord("P"))
    assert start < len(first.token_ids)


def test_dropped_reasoning_costs_the_suffix_only() -> None:
    family = family_named("qwen3")
    chat = Conversation(byte_tokenizer(family))
    chat.ask("x" * 1900, "<think>" + "r" * 46 + "</think>Paris.", family.end_of_turn)
    planned = chat.plan("And?")
    exact = sequence_ids(chat.chain)
    assert len(history_ids(chat.chain)) == len(exact) - 48
    answer_and_delta = len("Paris.") + 1 + len(planned.delta_ids)
    assert len(planned.token_ids) - planned.num_history == answer_and_delta


@pytest.mark.parametrize("family", THINKING, ids=lambda family: str(family.name))
@pytest.mark.parametrize("ended", [True, False])
def test_an_answer_that_was_cut_in_its_reasoning_reads_as_the_template_has_it(
    family: Family, ended: bool
) -> None:
    chat = Conversation(byte_tokenizer(family))
    cut = family.answers[0].partition("</think>")[0][:-3]
    chat.ask(QUESTIONS[0], cut, family.end_of_turn if ended else None)
    assert chat.plan(QUESTIONS[1]).token_ids == chat.whole(QUESTIONS[1])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))
def test_an_answer_that_was_stopped_before_its_first_token_is_empty(family: Family) -> None:
    tokenizer = byte_tokenizer(family)
    chat = Conversation(tokenizer)
    chat.ask(QUESTIONS[0], "", None)
    planned = without_date(tokenizer, chat.plan(QUESTIONS[1]).token_ids)
    whole = tokenizer.decode(chat.whole(QUESTIONS[1]), skip_special=False)
    # Only white space may tell the two apart: it is at the edge of an empty answer.
    text = tokenizer.decode(planned, skip_special=False)
    assert "".join(text.split()) == "".join(whole[whole.index(QUESTIONS[0]) :].split())


@pytest.mark.parametrize("family", THINKING, ids=lambda family: str(family.name))
def test_generated_ids_survive_where_encoding_would_merge_them(
    family: Family, tmp_path: Path
) -> None:
    tokenizer = merging_tokenizer(family, tmp_path)
    chat = Conversation(tokenizer)
    shown = "a\n\nb 日本 🎉 hello"
    in_bytes = list(shown.encode())
    assert tokenizer.encode(shown) != in_bytes
    thought = family.answers[0].partition("</think>")
    in_front = list((thought[0] + thought[1] + "\n\n").encode()) if thought[1] else []
    planned = chat.plan(QUESTIONS[0])
    chat.answer(planned, [*in_front, *in_bytes, chat.token_id(family.end_of_turn)])
    follow_up = chat.plan(QUESTIONS[1])
    assert follow_up.miss_reason == "template_drift"
    history = follow_up.token_ids[: -len(follow_up.delta_ids)]
    assert history[-len(in_bytes) - 1 :] == [*in_bytes, chat.token_id(family.end_of_turn)]
    assert (
        follow_up.token_ids[: follow_up.num_history] == planned.token_ids[: follow_up.num_history]
    )
    text = tokenizer.decode(follow_up.token_ids, skip_special=False)
    assert text == tokenizer.decode(chat.whole(QUESTIONS[1]), skip_special=False)


def test_a_token_across_the_seam_is_the_only_one_made_anew(tmp_path: Path) -> None:
    family = family_named("qwen3")
    tokenizer = merging_tokenizer(family, tmp_path)
    chat = Conversation(tokenizer)
    planned = chat.plan(QUESTIONS[0])
    world = tokenizer.id_of("Ġworld")
    assert world is not None
    # The template strips line breaks: of the token that joins two of them nothing is left.
    generated = [*b"<think>a</think>", *tokenizer.encode("\n\n"), *b"x", world]
    chat.answer(planned, generated)
    history = history_ids(chat.chain)
    assert history == [*planned.token_ids, *b"x", world]


def test_a_fork_from_an_earlier_turn_begins_with_what_is_settled() -> None:
    family = family_named("qwen3")
    chat = two_turns(family, byte_tokenizer(family))
    settled = history_ids(chat.chain[:1])
    chat.chain, chat.messages = chat.chain[:1], chat.messages[:2]
    planned = chat.plan("Another?")
    assert planned.token_ids == chat.whole("Another?")
    assert planned.token_ids[: len(settled)] == settled
    assert (planned.tip_id, planned.miss_reason) == ("resp_0", "template_drift")


def test_other_instructions_are_put_in_front_of_settled_turns() -> None:
    family = family_named("deepseek")
    chat = two_turns(family, byte_tokenizer(family))
    asked = Ask((Message("user", QUESTIONS[2]),), "Be brief.", TurnKind.ANSWER)
    planned = chat.planner.plan(asked, chat.chain)
    system = Message("system", "Be brief.")
    messages = [system, *chat.messages, Message("user", QUESTIONS[2])]
    assert planned.token_ids == chat.builder.first_prompt(messages)
    assert planned.miss_reason == "instructions_changed"
    held = sequence_ids(chat.chain)
    assert planned.first_divergence == Divergence(1, held[1], ord("B"))


def test_dropping_the_oldest_turn_keeps_the_others_settled() -> None:
    family = family_named("qwen3-empty")
    chat = two_turns(family, byte_tokenizer(family))
    max_context = len(chat.plan("x" * 60).token_ids)
    chat.planner = PromptPlanner(chat.builder, model=MODEL, max_context=max_context)
    asked = Ask((Message("user", "x" * 60),), None, TurnKind.ANSWER, drop_oldest=True)
    planned = chat.planner.plan(asked, chat.chain)
    assert planned.num_dropped_turns == 1
    chat.messages = chat.messages[2:]
    assert planned.token_ids == chat.whole("x" * 60)


def test_a_prefilled_turn_behind_a_drifted_one_is_continued_without_a_miss() -> None:
    family = family_named("qwen3")
    chat = Conversation(byte_tokenizer(family))
    chat.ask(QUESTIONS[0], family.answers[0], family.end_of_turn)
    prefill = chat.plan(QUESTIONS[1], kind=TurnKind.PREFILL)
    assert prefill.miss_reason == "template_drift"
    chat.chain.append(
        StoredTurn(
            response_id="resp_p",
            parent_id=prefill.parent_id,
            key_id="key",
            model=MODEL,
            input_json=json.dumps([{"role": "user", "content": QUESTIONS[1]}]),
            prompt_ids=tuple(prefill.delta_ids),
            status=PREFILLED,
            created_at=0.0,
        )
    )
    nothing = Ask((), None, TurnKind.ANSWER)
    planned = chat.planner.plan(nothing, chat.chain)
    assert (planned.tip_id, planned.parent_id) == ("resp_p", "resp_0")
    assert planned.num_history == len(prefill.token_ids)
    assert (planned.miss_reason, planned.first_divergence) == (None, None)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))
def test_what_is_prepared_at_idle_time_begins_the_next_turn(family: Family) -> None:
    chat = two_turns(family, byte_tokenizer(family))
    prepared = chat.planner.next_turn_ids(chat.chain)
    history = history_ids(chat.chain)
    assert prepared[: len(history)] == history
    assert len(prepared) > len(history)
    for question in ("Why?", "\n\nwhy", " 日本"):
        assert chat.plan(question).token_ids[: len(prepared)] == prepared
    typed = chat.plan("Wh", kind=TurnKind.TYPED_AHEAD)
    assert typed.token_ids[: len(prepared)] == prepared


def test_nothing_is_prepared_where_the_next_turn_is_not_known() -> None:
    family = family_named("qwen3")
    chat = two_turns(family, byte_tokenizer(family))
    assert chat.planner.next_turn_ids([]) == []
    other = PromptPlanner(chat.builder, model="other", max_context=8192)
    assert other.next_turn_ids(chat.chain) == []
    full = PromptPlanner(chat.builder, model=MODEL, max_context=len(history_ids(chat.chain)))
    assert full.next_turn_ids(chat.chain) == []


@pytest.mark.parametrize("system", ["Be kind. /no_think", "Be kind."])
def test_a_system_message_decides_how_later_answers_are_opened_too(system: str) -> None:
    family = family_named("smollm3")
    tokenizer = byte_tokenizer(family)
    chat = Conversation(tokenizer)
    first = chat.planner.plan(
        Ask((Message("system", system), Message("user", QUESTIONS[0])), None, TurnKind.ANSWER), []
    )
    chat.answer(first, [*b"Paris.", chat.token_id(family.end_of_turn)])
    planned = chat.plan(QUESTIONS[1])
    whole = chat.whole(QUESTIONS[1])
    assert without_date(tokenizer, planned.token_ids) == without_date(tokenizer, whole)
    assert planned.miss_reason is None
    blocks = planned.token_ids.count(chat.token_id("<think>"))
    assert blocks == (2 if "/no_think" in system else 0)


def test_turns_of_another_model_are_rendered_from_texts_when_oldest_turns_are_dropped() -> None:
    family = family_named("qwen25")
    chat = two_turns(family, byte_tokenizer(family))
    max_context = len(chat.plan("x" * 60).token_ids)
    planner = PromptPlanner(chat.builder, model="other", max_context=max_context)
    asked = Ask((Message("user", "x" * 60),), None, TurnKind.ANSWER, drop_oldest=True)
    planned = planner.plan(asked, chat.chain)
    chat.messages = chat.messages[2 * planned.num_dropped_turns :]
    assert planned.num_dropped_turns
    assert planned.token_ids == chat.whole("x" * 60)
    assert planned.first_divergence is None
