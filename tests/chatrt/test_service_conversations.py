"""Conversations of the service: deletion, transcripts, watchers, lists."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.errors import Conflict, NotFound
from chatrt.service.prompts import Ask, PlannedPrompt, PromptPlanner
from chatrt.wire.messages import (
    ConversationCreate,
    ConversationSubscribe,
    ConversationUpdate,
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
    from chatrt.wire.log import ResponseLog

ENDLESS: dict[str, Any] = {"max_output_tokens": 300, "chatrt": {"ignore_eos": True}}


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


@pytest.fixture
async def chat(tokenizer: Tokenizer, database: Path) -> AsyncIterator[Chat]:
    async with serving(tokenizer, database) as chat:
        yield chat


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


# Deletion ----------------------------------------------------------------------------------------


async def test_deleting_responses_returns_their_pages_and_ends_their_chains(chat: Chat) -> None:
    first = await chat.ask("hello")
    second = await chat.ask("and?", previous_response_id=first["id"])
    await chat.service.delete_response(first["id"], KEY)
    with pytest.raises(NotFound, match="cannot be continued"):
        await chat.ask("more", previous_response_id=second["id"])
    with pytest.raises(NotFound):
        await chat.service.response(first["id"], KEY)
    await chat.service.delete_response(second["id"], KEY)
    assert await chat.num_free() == NUM_PAGES


async def test_deleting_a_conversation_cancels_its_turn_and_returns_all_pages(chat: Chat) -> None:
    named = await conversation(chat)
    for text in ("hello", "and?", "more"):
        await chat.ask(text, conversation=named)
    log = await chat.create("endless", conversation=named, **ENDLESS)
    await has_text(log)
    await chat.service.conversation_delete(named, KEY)
    assert (await ended(log))["status"] == "cancelled"
    assert await chat.num_free() == NUM_PAGES
    with pytest.raises(NotFound):
        await chat.service.conversation_items(named, KEY)


@pytest.mark.parametrize("store", [True, False])
async def test_a_turn_that_is_being_tokenised_when_its_conversation_is_deleted_is_deleted_too(
    chat: Chat, monkeypatch: pytest.MonkeyPatch, store: bool
) -> None:
    plan = PromptPlanner.plan
    reached, deleted = threading.Event(), threading.Event()

    def slow(planner: PromptPlanner, ask: Ask, chain: Sequence[StoredTurn]) -> PlannedPrompt:
        reached.set()
        assert deleted.wait(5.0)
        return plan(planner, ask, chain)

    monkeypatch.setattr(PromptPlanner, "plan", slow)
    monkeypatch.setattr("chatrt.service.service._INLINE_CHARS", 0)
    named = await conversation(chat)
    asked = asyncio.create_task(
        chat.ask("late", conversation=named, store=store, max_output_tokens=4)
    )
    assert await asyncio.to_thread(reached.wait, 5.0)
    await chat.service.conversation_delete(named, KEY)
    deleted.set()
    response = await asked
    with pytest.raises(NotFound):
        await chat.service.response(response["id"], KEY)
    assert await chat.num_free() == NUM_PAGES


async def test_two_turns_at_once_cannot_hide_each_other_in_a_conversation(chat: Chat) -> None:
    named = await conversation(chat)
    first = await chat.ask("hello", conversation=named)
    log = await chat.create("endless", conversation=named, **ENDLESS)
    with pytest.raises(Conflict, match=f"{named} is being answered by {log.response_id}"):
        await chat.create("me too", conversation=named)
    fork = await chat.ask("a fork", previous_response_id=first["id"])
    assert fork["status"] == "incomplete"
    await chat.service.cancel(log.response_id, KEY)
    await ended(log)
    assert (await chat.ask("now me", conversation=named))["status"] == "incomplete"


async def test_a_conversation_goes_on_after_its_newest_turn_was_deleted(chat: Chat) -> None:
    named = await conversation(chat)
    first = await chat.ask("hello", conversation=named)
    second = await chat.ask("and?", conversation=named)
    await chat.service.delete_response(second["id"], KEY)
    third = await chat.ask("or?", conversation=named)
    assert_all_cached(cached(third), first["usage"]["total_tokens"])
    await chat.service.delete_response(third["id"], KEY)
    await chat.service.delete_response(first["id"], KEY)
    fresh = await chat.ask("anew", conversation=named)
    assert text_of(fresh) == text_of(await chat.ask("anew", key="other"))


async def test_a_transcript_starts_behind_a_deleted_turn(chat: Chat) -> None:
    named = await conversation(chat)
    first = await chat.ask("hello", conversation=named)
    second = await chat.ask("and?", conversation=named)
    await chat.service.delete_response(first["id"], KEY)
    items = await chat.service.conversation_items(named, KEY)
    assert [part["text"] for item in items for part in item["content"]] == [
        "and?",
        text_of(second),
    ]


async def test_deleting_a_running_response_cancels_it_first(chat: Chat) -> None:
    log = await chat.create("hello", **ENDLESS)
    await has_text(log)
    await chat.service.delete_response(log.response_id, KEY)
    assert (await ended(log))["status"] == "cancelled"
    assert await chat.num_free() == NUM_PAGES


# Watching ----------------------------------------------------------------------------------------


async def test_watchers_hear_of_answers_of_other_connections_and_not_of_half_typed_ones(
    chat: Chat,
) -> None:
    named = await conversation(chat)
    heard: list[ResponseLog] = []
    message = ConversationSubscribe(id=named)
    end = await chat.service.conversation_subscribe(
        message, context(connection="watcher"), heard.append
    )
    await chat.ask("hel", generate=False, conversation=named, chatrt={"partial": True})
    first = await chat.ask("hello", conversation=named)
    assert [log.response_id for log in heard] == [first["id"]]
    end()
    end()
    await chat.ask("and?", conversation=named)
    assert len(heard) == 1


async def test_conversations_are_listed_newest_first_and_renamed(chat: Chat) -> None:
    one, two = await conversation(chat), await conversation(chat)
    await chat.ask("the moon", conversation=one)
    renamed = await chat.service.conversation_update(
        ConversationUpdate(id=two, title="About the sea"), context()
    )
    assert renamed["title"] == "About the sea"
    found = [body["id"] for body in await chat.service.conversation_list("sea", KEY)]
    assert found == [two]
    assert {b["id"] for b in await chat.service.conversation_list(None, KEY)} == {one, two}
