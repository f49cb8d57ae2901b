"""The service and its store: what survives a restart, and what a broken disk costs."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.errors import NotFound, StoreError
from chatrt.store import Store
from chatrt.wire.messages import ConversationCreate
from tests.chatrt.service_support import KEY, NUM_PAGES, Chat, context, serving, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.store import StoredTurn
    from chatrt.text.tokenizer import Tokenizer


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


class FullDisk(Store):
    """A store whose turns cannot be written while `full` is set."""

    full = True

    def save_turn(self, turn: StoredTurn) -> Future[None]:
        """Refused while the disk is full."""
        if not self.full:
            return super().save_turn(turn)
        refused: Future[None] = Future()
        refused.set_exception(StoreError("the disk is full"))
        return refused


async def three_turns(chat: Chat, **fields: Any) -> list[dict[str, Any]]:
    first = await chat.ask("hello", **fields)
    second = await chat.ask("and?", previous_response_id=first["id"], **fields)
    third = await chat.ask("more", previous_response_id=second["id"], **fields)
    return [first, second, third]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two answers have the same text behind prompts of one length."""
    return (
        text_of(one) == text_of(other)
        and one["usage"]["input_tokens"] == other["usage"]["input_tokens"]
    )


async def test_a_new_process_continues_with_the_very_ids(
    tokenizer: Tokenizer, database: Path
) -> None:
    async with serving(tokenizer, database) as chat:
        _, second, third = await three_turns(chat)
        body = await chat.service.response(third["id"], KEY)
    async with serving(tokenizer, database) as chat:
        assert (await chat.service.response(third["id"], KEY))["output"] == body["output"]
        again = await chat.ask("more", previous_response_id=second["id"])
        assert same(again, third)
        assert again["usage"]["input_tokens_details"]["cached_tokens"] == 0
        with pytest.raises(NotFound):
            await chat.ask("more", previous_response_id=second["id"], key="other")


async def test_a_new_process_continues_a_conversation_by_its_id(
    tokenizer: Tokenizer, database: Path
) -> None:
    async with serving(tokenizer, database) as chat:
        body = await chat.service.conversation_create(ConversationCreate(), context())
        for text in ("hello", "and?"):
            await chat.ask(text, conversation=body["id"])
        third = await chat.ask("more", conversation=body["id"])
        await chat.service.delete_response(third["id"], KEY)
    async with serving(tokenizer, database) as chat:
        assert same(await chat.ask("more", conversation=body["id"]), third)


async def test_a_turn_that_cannot_be_stored_says_so_and_can_be_continued(
    tokenizer: Tokenizer, database: Path
) -> None:
    async with serving(tokenizer) as chat:
        expected = await three_turns(chat)
    FullDisk.full = True
    async with serving(tokenizer, store=FullDisk.open(database)) as chat:
        found = await three_turns(chat)
        for one, other in zip(found, expected, strict=True):
            assert one["status"] == other["status"]
            assert one["chatrt"]["store_error"] == "the disk is full"
            assert same(one, other)
        assert "store_error" not in expected[0]["chatrt"]


async def test_a_turn_behind_one_that_is_not_stored_is_stored_with_all_that_was_before(
    tokenizer: Tokenizer, database: Path
) -> None:
    async with serving(tokenizer, database) as chat:
        first = await chat.ask("hello", store=False)
        second = await chat.ask("and?", previous_response_id=first["id"])
        third = await chat.ask("more", previous_response_id=second["id"])
        changed = await chat.ask("more", previous_response_id=second["id"], instructions="be rude")
    async with serving(tokenizer, database) as chat:
        with pytest.raises(NotFound):
            await chat.ask("and?", previous_response_id=first["id"])
        again = await chat.ask("more", previous_response_id=second["id"])
        assert same(again, third)
        rendered = await chat.ask("more", previous_response_id=second["id"], instructions="be rude")
        assert rendered["usage"]["input_tokens"] == changed["usage"]["input_tokens"]
        assert chat.store is not None
        stored = chat.store.load_turn(rendered["id"], KEY)
        assert stored is not None
        text = tokenizer.decode(stored.prompt_ids, skip_special=False)
        places = [text.index(part) for part in ("be rude", "hello", text_of(first), "and?")]
        assert places == sorted(places), "the unstored turn's words are still there"


async def test_a_response_that_is_not_to_be_stored_is_not_on_disk(
    tokenizer: Tokenizer, database: Path
) -> None:
    async with serving(tokenizer, database) as chat:
        turns = await three_turns(chat, store=False)
        assert chat.store is not None
        assert all(chat.store.load_turn(turn["id"], KEY) is None for turn in turns)
        for turn in turns:
            await chat.service.delete_response(turn["id"], KEY)
        assert await chat.num_free() == NUM_PAGES


async def test_without_a_store_everything_lives_in_memory(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as chat:
        body = await chat.service.conversation_create(ConversationCreate(title="sea"), context())
        first = await chat.ask("hello", conversation=body["id"])
        second = await chat.ask("and?", conversation=body["id"])
        assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0
        (listed,) = await chat.service.conversation_list("SEA", KEY)
        assert (listed["num_turns"], listed["last_response_id"]) == (2, second["id"])
        await chat.service.delete_response(second["id"], KEY)
        (listed,) = await chat.service.conversation_list(None, KEY)
        assert listed["last_response_id"] == first["id"]
        await chat.service.conversation_delete(body["id"], KEY)
        assert await chat.service.conversation_list(None, KEY) == []
        assert await chat.num_free() == NUM_PAGES


async def test_an_answer_that_runs_when_the_host_stops_is_stored_with_what_was_sent(
    tokenizer: Tokenizer, database: Path
) -> None:
    async with serving(tokenizer, database) as chat:
        log = await chat.create("hello", max_output_tokens=400, chatrt={"ignore_eos": True})
    async with serving(tokenizer, database) as chat:
        body = await chat.service.response(log.response_id, KEY)
        assert body["status"] in ("cancelled", "incomplete")
        assert await chat.ask("and?", previous_response_id=log.response_id)
