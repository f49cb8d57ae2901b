"""Turns and conversations through the service, over a real engine and a real store."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.errors import ContextLengthExceeded, InvalidValue, ModelNotFound, NotFound
from chatrt.params import SamplingParams
from chatrt.service.prompts import Ask, PlannedPrompt, PromptPlanner
from chatrt.text.messages import Message
from chatrt.text.prompt import PromptBuilder
from chatrt.wire.messages import (
    LOGPROBS_INCLUDE,
    ConversationCreate,
    InputMessage,
)
from tests.chatrt.service_support import (
    KEY,
    NUM_PAGES,
    Chat,
    context,
    ended,
    has_text,
    serving,
    text_of,
)
from tests.support import assert_all_cached

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from chatrt.store import StoredTurn
    from chatrt.text.tokenizer import Tokenizer

ENDLESS: dict[str, Any] = {"max_output_tokens": 300, "chatrt": {"ignore_eos": True}}


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


@pytest.fixture
async def chat(tokenizer: Tokenizer, database: Path) -> AsyncIterator[Chat]:
    async with serving(tokenizer, database) as chat:
        yield chat


def kv(response: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = response["chatrt"]["kv"]
    return figures


def cached(response: dict[str, Any]) -> int:
    tokens: int = response["usage"]["input_tokens_details"]["cached_tokens"]
    return tokens


def input_tokens(response: dict[str, Any]) -> int:
    tokens: int = response["usage"]["input_tokens"]
    return tokens


async def conversation(chat: Chat) -> str:
    body = await chat.service.conversation_create(ConversationCreate(), context())
    conversation_id: str = body["id"]
    return conversation_id


# One turn behind another -------------------------------------------------------------------------


async def test_a_follow_up_computes_only_its_own_message(chat: Chat, tokenizer: Tokenizer) -> None:
    first = await chat.ask("hello")
    second = await chat.ask("and?", previous_response_id=first["id"])
    length = input_tokens(first) + first["usage"]["output_tokens"]
    assert_all_cached(cached(second), length)
    builder = PromptBuilder(tokenizer)
    prompt = builder.first_prompt([Message("user", "hello")])
    assert input_tokens(first) == len(prompt)
    stored = chat.store.load_turn(first["id"], KEY) if chat.store else None
    assert stored is not None
    assert list(stored.prompt_ids) == prompt
    more = builder.follow_up([Message("user", "and?")], tip_ids=stored.output_ids)
    assert input_tokens(second) == length + len(more)


async def test_the_same_parent_twice_is_a_fork_with_the_same_greedy_text(chat: Chat) -> None:
    first = await chat.ask("hello")
    one = await chat.ask("and?", previous_response_id=first["id"])
    two = await chat.ask("and?", previous_response_id=first["id"], lane="other")
    assert text_of(one) == text_of(two)
    assert cached(two) == input_tokens(two) - 1


async def test_a_conversation_goes_on_behind_its_newest_turn(chat: Chat) -> None:
    named = await conversation(chat)
    first = await chat.ask("hello", conversation=named)
    second = await chat.ask("and?", conversation=named)
    alone = await chat.ask("hello", lane="other")
    follow = await chat.ask("and?", previous_response_id=alone["id"], lane="other")
    assert text_of(second) == text_of(follow)
    assert second["conversation"] == {"id": named}
    items = await chat.service.conversation_items(named, KEY)
    texts = [part["text"] for item in items for part in item["content"]]
    assert texts == ["hello", text_of(first), "and?", text_of(second)]


async def test_an_unknown_parent_or_another_keys_is_not_found(chat: Chat) -> None:
    first = await chat.ask("hello")
    for wrong in ({"previous_response_id": "resp_unknown"}, {"conversation": "conv_unknown"}):
        with pytest.raises(NotFound):
            await chat.ask("and?", **wrong)
    named = await conversation(chat)
    theirs: tuple[dict[str, Any], ...] = (
        {"previous_response_id": first["id"]},
        {"conversation": named},
    )
    for fields in theirs:
        with pytest.raises(NotFound):
            await chat.ask("and?", key="other", **fields)
    service = chat.service
    with pytest.raises(NotFound):
        await service.response(first["id"], "other")
    with pytest.raises(NotFound):
        await service.delete_response(first["id"], "other")
    with pytest.raises(NotFound):
        await service.conversation_items(named, "other")
    with pytest.raises(NotFound):
        await service.conversation_delete(named, "other")
    assert await service.conversation_list(None, "other") == []


async def test_keys_share_no_pages_unless_told_to(tokenizer: Tokenizer) -> None:
    for share, expected in ((False, False), (True, True)):
        async with serving(tokenizer, share_prefixes=share) as chat:
            await chat.ask("hello world, " * 8)
            other = await chat.ask("hello world, " * 8, key="other")
            assert (cached(other) > 0) is expected


async def test_a_running_response_of_another_key_cannot_be_cancelled(chat: Chat) -> None:
    log = await chat.create("hello", **ENDLESS)
    with pytest.raises(NotFound):
        await chat.service.cancel(log.response_id, "other")
    assert await chat.service.cancel(log.response_id, KEY)
    assert (await ended(log))["status"] == "cancelled"
    assert not await chat.service.cancel(log.response_id, KEY)


async def test_a_cancelled_answer_is_a_parent_with_the_text_that_was_sent(chat: Chat) -> None:
    log = await chat.create("hello", **ENDLESS)
    await has_text(log)
    await chat.service.cancel(log.response_id, KEY)
    first = await ended(log)
    assert first["incomplete_details"] == {"reason": "cancelled"}
    assert text_of(first)
    second = await chat.ask("and?", previous_response_id=first["id"])
    stored = chat.store.load_turn(first["id"], KEY) if chat.store else None
    assert stored is not None
    assert stored.text == text_of(first)
    assert_all_cached(cached(second), len(stored.prompt_ids) + len(stored.output_ids))


async def test_an_abandoned_answer_ends(chat: Chat) -> None:
    log = await chat.create("hello", **ENDLESS)
    chat.service.abandon(log.response_id)
    assert (await ended(log))["status"] == "cancelled"


async def test_the_servers_cap_holds_for_those_who_name_none_and_refuses_more(
    tokenizer: Tokenizer,
) -> None:
    uncapped = SamplingParams(temperature=0.0, ignore_eos=True)
    async with serving(tokenizer, sampling=uncapped, max_output_tokens=5) as chat:
        found = await chat.ask("hello")
        assert found["usage"]["output_tokens"] == 5
        assert found["status"] == "incomplete"
        with pytest.raises(InvalidValue, match=r"6.*5"):
            await chat.ask("hello", max_output_tokens=6)


async def test_another_models_name_is_refused_and_too_long_an_input(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer, max_input_tokens=40) as chat:
        with pytest.raises(ModelNotFound, match="gpt"):
            await chat.ask("hello", model="gpt")
        with pytest.raises(InvalidValue, match="40"):
            await chat.ask("hello " * 40)


# What changes the front --------------------------------------------------------------------------


async def test_changed_instructions_rebuild_the_front_and_say_where(chat: Chat) -> None:
    first = await chat.ask("hello", instructions="be kind")
    same = await chat.ask("and?", instructions="be kind", previous_response_id=first["id"])
    assert kv(same)["miss_reason"] is None
    changed = await chat.ask("and?", instructions="be rude", previous_response_id=first["id"])
    assert kv(changed)["miss_reason"] == "instructions_changed"
    divergence = kv(changed)["first_divergence"]["position"]
    assert 0 < divergence < 25
    assert cached(changed) <= divergence
    left_out = await chat.ask("and?", previous_response_id=first["id"])
    assert kv(left_out)["miss_reason"] == "instructions_changed"
    follow = await chat.ask("more", instructions="be rude", previous_response_id=changed["id"])
    assert kv(follow)["miss_reason"] is None
    assert_all_cached(cached(follow), changed["usage"]["total_tokens"])


async def test_truncation_drops_oldest_turns_whole_and_keeps_the_system_message(
    tokenizer: Tokenizer, database: Path
) -> None:
    async with serving(tokenizer, database, max_context=208) as chat:
        system = (InputMessage("system", "be kind"), InputMessage("user", "a" * 60))
        tip = await chat.ask(system)
        for letter in "bc":
            tip = await chat.ask(letter * 20, previous_response_id=tip["id"])
        with pytest.raises(ContextLengthExceeded, match=r"\d+ tokens.*208"):
            await chat.ask("d" * 20, previous_response_id=tip["id"])
        last = await chat.ask("d" * 20, previous_response_id=tip["id"], truncation="auto")
        assert kv(last)["dropped_turns"] == 1
        assert kv(last)["miss_reason"] == "truncated"
        assert chat.store is not None
        stored = chat.store.load_turn(last["id"], KEY)
        assert stored is not None
        assert stored.is_whole
        text = tokenizer.decode(stored.prompt_ids, skip_special=False)
        assert text.startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nbbbb")
        assert "aaaa" not in text
        assert text.index("cccc") < text.index("dddd")
        follow = await chat.ask(
            "e", previous_response_id=last["id"], truncation="auto", max_output_tokens=1
        )
        assert kv(follow)["dropped_turns"] == 0
        assert_all_cached(cached(follow), last["usage"]["total_tokens"])


async def test_truncation_leaves_slack_so_that_the_next_turns_drop_nothing(
    tokenizer: Tokenizer,
) -> None:
    async with serving(tokenizer, max_context=400) as chat:
        tip, dropped = await chat.ask("a" * 20), []
        for _ in range(20):
            tip = await chat.ask("b" * 8, previous_response_id=tip["id"], truncation="auto")
            dropped.append(kv(tip)["dropped_turns"])
        assert max(dropped) > 1
        assert sum(n > 0 for n in dropped) < 6


async def test_a_stop_string_trims_text_usage_and_logprobs_alike(chat: Chat) -> None:
    plain = await chat.ask("hello")
    text = text_of(plain)
    stop = text[3:5]
    cut = await chat.ask("hello", include=[LOGPROBS_INCLUDE], chatrt={"stop": [stop]})
    part = cut["output"][0]["content"][0]
    assert part["text"] == text[: text.index(stop)]
    assert len(part["logprobs"]) == cut["usage"]["output_tokens"]
    assert cut["usage"]["output_tokens"] < plain["usage"]["output_tokens"]


async def test_one_message_longer_than_the_context_is_refused_even_with_truncation(
    tokenizer: Tokenizer,
) -> None:
    async with serving(tokenizer, max_context=64) as chat:
        first = await chat.ask("hi")
        with pytest.raises(ContextLengthExceeded, match="64"):
            await chat.ask("x" * 90, previous_response_id=first["id"], truncation="auto")


async def test_turns_of_another_model_are_rendered_anew_from_their_text(
    tokenizer: Tokenizer, database: Path
) -> None:
    async with serving(tokenizer, database, model="before") as chat:
        first = await chat.ask("hello")
    async with serving(tokenizer, database, model="after") as chat:
        second = await chat.ask("and?", previous_response_id=first["id"])
        assert kv(second)["miss_reason"] == "model_changed"
        assert chat.store is not None
        stored = chat.store.load_turn(second["id"], KEY)
        assert stored is not None
        expected = [
            Message("user", "hello"),
            Message("assistant", text_of(first)),
            Message("user", "and?"),
        ]
        assert list(stored.prompt_ids) == PromptBuilder(tokenizer).first_prompt(expected)


# Work before Enter -------------------------------------------------------------------------------


async def test_a_create_behind_a_prefill_computes_the_opening_of_the_answer_only(
    chat: Chat,
) -> None:
    prefilled = await chat.ask("hello world", generate=False)
    assert prefilled["status"] == "completed"
    assert prefilled["output"] == []
    answer = await chat.ask((), previous_response_id=prefilled["id"])
    plain = await chat.ask("hello world", lane="other", key="other")
    assert text_of(answer) == text_of(plain)
    assert input_tokens(answer) == input_tokens(plain)
    assert cached(answer) == input_tokens(prefilled)
    more = await chat.ask("and?", previous_response_id=answer["id"])
    assert_all_cached(cached(more), answer["usage"]["total_tokens"])


async def test_messages_can_be_added_to_a_prefill(chat: Chat) -> None:
    prefilled = await chat.ask((InputMessage("system", "be kind"),), generate=False)
    answer = await chat.ask("hello", previous_response_id=prefilled["id"])
    both = (InputMessage("system", "be kind"), InputMessage("user", "hello"))
    plain = await chat.ask(both, lane="other", key="other")
    assert text_of(answer) == text_of(plain)
    assert input_tokens(answer) == input_tokens(plain)


async def test_what_is_typed_ahead_is_computed_before_the_create(chat: Chat) -> None:
    first = await chat.ask("hello")
    text = "the moon is made of cheese and the sea is made of salt"
    for length in (10, 30, len(text)):
        typed = await chat.ask(
            text[:length],
            generate=False,
            previous_response_id=first["id"],
            chatrt={"partial": True},
        )
        assert typed["output"] == []
    answer = await chat.ask(text + "?", previous_response_id=first["id"])
    assert kv(answer)["typed_ahead_tokens"] > 15
    assert kv(answer)["computed_tokens"] < 25
    plain = await chat.ask(text + "?", previous_response_id=first["id"], lane="other")
    assert text_of(answer) == text_of(plain)
    assert kv(plain)["typed_ahead_tokens"] == 0


async def test_what_is_typed_ahead_is_neither_stored_nor_a_parent(chat: Chat) -> None:
    named = await conversation(chat)
    typed = await chat.ask("hello", generate=False, conversation=named, chatrt={"partial": True})
    with pytest.raises(NotFound):
        await chat.ask("and?", previous_response_id=typed["id"])
    assert await chat.service.conversation_items(named, KEY) == []


async def test_leaving_a_lane_returns_the_pages_of_what_was_typed(chat: Chat) -> None:
    for text in ("hello world " * 10, "hello world " * 10 + "and the moon " * 9, "the moon " * 20):
        await chat.ask(text, generate=False, chatrt={"partial": True}, lane="gone")
    chat.service.leave("gone")
    assert await chat.num_free() == NUM_PAGES


async def test_long_instructions_and_renewed_history_are_not_tokenised_on_the_loops_thread(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PromptPlanner.plan
    threads: list[threading.Thread] = []

    def noted(planner: PromptPlanner, ask: Ask, chain: Sequence[StoredTurn]) -> PlannedPrompt:
        threads.append(threading.current_thread())
        return plan(planner, ask, chain)

    monkeypatch.setattr(PromptPlanner, "plan", noted)
    monkeypatch.setattr("chatrt.service.service._INLINE_CHARS", 100)
    first = await chat.ask("x" * 90, max_output_tokens=2)
    second = await chat.ask("short", previous_response_id=first["id"], max_output_tokens=2)
    assert threads == [threading.main_thread()] * 2
    await chat.ask("short", instructions="y" * 101, max_output_tokens=2)
    await chat.ask("z", instructions="y", previous_response_id=second["id"], max_output_tokens=2)
    await chat.ask("z", truncation="auto", previous_response_id=second["id"], max_output_tokens=2)
    assert len(threads) == 5
    assert threading.main_thread() not in threads[2:]
