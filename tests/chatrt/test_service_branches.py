"""Branches of a conversation as a client sees them, on a real server around a tiny model."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.client import ChatClient, HttpRoutes, ResponseRequest
from chatrt.errors import InvalidValue, NotFound
from chatrt.testing.serving import serving as serving_port
from tests.chatrt.service_support import KEY, Chat, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from chatrt.client import TurnResult
    from chatrt.text.tokenizer import Tokenizer


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


@asynccontextmanager
async def a_world(
    tokenizer: Tokenizer, database: Path | None
) -> AsyncIterator[tuple[Chat, ChatClient]]:
    """A server, and a client on it."""
    async with (
        serving(tokenizer, database) as chat,
        serving_port(chat.service, insecure_no_auth=True) as server,
        await ChatClient.connect(f"ws://127.0.0.1:{server.port}") as client,
    ):
        yield chat, client


def another(client: ChatClient) -> AbstractAsyncContextManager[ChatClient]:
    """A second connection to the client's server."""
    return connected(f"ws://127.0.0.1:{client.http._port}")


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[ChatClient]:
    async with await ChatClient.connect(url) as client:
        yield client


async def ask(client: ChatClient, text: str, **fields: Any) -> TurnResult:
    return await (await client.send(ResponseRequest(input=text, **fields))).collect()


def shape(turns: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    """Each turn's question, and the question of the turn that it follows."""
    asked = {turn["id"]: said(turn["input"]) for turn in turns}
    return [(asked[turn["id"]], asked.get(turn["previous_response_id"] or "")) for turn in turns]


def said(items: list[dict[str, Any]]) -> str:
    return "".join(part["text"] for item in items for part in item["content"])


@pytest.mark.parametrize("stored", [True, False])
async def test_all_turns_of_all_branches_are_listed_the_oldest_first(
    tokenizer: Tokenizer, database: Path, stored: bool
) -> None:
    async with a_world(tokenizer, database if stored else None) as (_, client):
        named = await client.create_conversation("a tree")
        first = await ask(client, "one", conversation=named)
        second = await ask(client, "two", conversation=named)
        await ask(client, "three", previous_response_id=second.response_id)
        await ask(client, "two again", previous_response_id=first.response_id)
        begun = await ask(client, "one again", conversation=named, chatrt={"new_branch": True})
        await ask(client, "behind it", conversation=named)
        turns = await client.http.turns(named)
        assert shape(turns) == [
            ("one", None),
            ("two", "one"),
            ("three", "two"),
            ("two again", "one"),
            ("one again", None),
            ("behind it", "one again"),
        ]
        assert [said(turn["output"]) for turn in turns[:2]] == [first.text, second.text]
        assert {turn["status"] for turn in turns} == {"incomplete"}  # at their longest
        assert turns[4]["id"] == begun.response_id
        assert [turn["created_at"] for turn in turns] == sorted(t["created_at"] for t in turns)
        items = await client.http.items(named)
        assert [said([item]) for item in items if item["role"] == "user"] == [
            "one again",
            "behind it",
        ]


async def test_a_tree_is_the_same_after_a_restart_and_grows_in_order(
    tokenizer: Tokenizer, database: Path
) -> None:
    async with a_world(tokenizer, database) as (_, client):
        named = await client.create_conversation()
        first = await ask(client, "one", conversation=named)
        await ask(client, "two", conversation=named)
        before = await client.http.turns(named)
    async with a_world(tokenizer, database) as (_, client):
        assert await client.http.turns(named) == before
        # Of a turn that is not stored memory alone knows.
        await ask(client, "unstored", previous_response_id=first.response_id, store=False)
        await ask(client, "three", previous_response_id=first.response_id)
        turns = await client.http.turns(named)
        assert turns[:2] == before
        assert shape(turns)[2:] == [("unstored", "one"), ("three", "one")]


async def test_a_new_branch_is_a_first_turn_and_computes_no_history(
    tokenizer: Tokenizer, database: Path
) -> None:
    async with a_world(tokenizer, database) as (_, client):
        named = await client.create_conversation()
        first = await ask(client, "hello there", conversation=named)
        again = await ask(
            client, "hello there", conversation=named, chatrt={"new_branch": True, "seed": 3}
        )
        assert again.usage["input_tokens"] == first.usage["input_tokens"]
        assert again.timing["kv"]["computed_tokens"] == 1  # all but the last were resident
        assert again.text == first.text


async def test_a_new_branch_begins_while_another_branch_is_answered(
    tokenizer: Tokenizer, database: Path
) -> None:
    endless = {"max_output_tokens": 300, "ignore_eos": True}
    async with a_world(tokenizer, database) as (_, client):
        named = await client.create_conversation()
        running = await client.send(
            ResponseRequest(input="endless", conversation=named, sampling=endless)
        )
        await anext(running)  # it has begun
        beside = await ask(client, "beside", conversation=named, chatrt={"new_branch": True})
        assert beside.usable_as_parent
        await running.cancel()
        await running.collect()
        assert {said(turn["input"]) for turn in await client.http.turns(named)} == {
            "endless",
            "beside",
        }


async def test_a_watcher_is_told_that_a_turn_begins_a_branch(
    tokenizer: Tokenizer, database: Path
) -> None:
    async with a_world(tokenizer, database) as (_, client), another(client) as other:
        named = await client.create_conversation()
        await ask(client, "one", conversation=named)
        watch = await client.subscribe(named)
        for options in ({"new_branch": True}, {}):
            result = await ask(other, "theirs", conversation=named, chatrt=options)
            created = await anext(watch)
            assert created.response_id == result.response_id
            assert created.event.data["response"].get("chatrt") == (options or None)
            async for watched in watch:
                if watched.event.type == "response.incomplete":
                    break


async def test_a_new_branch_without_a_conversation_is_refused_with_a_sentence(
    tokenizer: Tokenizer,
) -> None:
    async with a_world(tokenizer, None) as (_, client):
        first = await ask(client, "one")
        for fields in ({}, {"previous_response_id": first.response_id}):
            with pytest.raises(InvalidValue, match="new_branch needs a conversation") as refused:
                await ask(client, "x", chatrt={"new_branch": True}, **fields)
            assert refused.value.param == "chatrt.new_branch"


async def test_turns_of_another_key_or_an_unknown_conversation_are_not_found(
    tokenizer: Tokenizer, database: Path
) -> None:
    async with a_world(tokenizer, database) as (chat, client):
        named = await client.create_conversation()
        await ask(client, "one", conversation=named)
        with pytest.raises(NotFound, match="conv_unknown"):
            await client.http.turns("conv_unknown")
        with pytest.raises(NotFound):
            await chat.service.conversation_turns(named, KEY)  # the server's own key is another


async def test_what_was_deleted_is_in_no_tree_and_what_builds_on_it_still_is(
    tokenizer: Tokenizer, database: Path
) -> None:
    async with a_world(tokenizer, database) as (_chat, client):
        named = await client.create_conversation()
        first = await ask(client, "one", conversation=named)
        await ask(client, "two", conversation=named)
        routes: HttpRoutes = client.http
        await routes._call("DELETE", f"/v1/responses/{first.response_id}")
        turns = await routes.turns(named)
        assert [said(turn["input"]) for turn in turns] == ["two"]
        assert turns[0]["previous_response_id"] == first.response_id


async def test_a_prefill_is_a_turn_without_output_and_half_typed_text_is_none(
    tokenizer: Tokenizer, database: Path
) -> None:
    async with a_world(tokenizer, database) as (_, client):
        named = await client.create_conversation()
        await ask(client, "half", conversation=named, generate=False, chatrt={"partial": True})
        await ask(client, "read this", conversation=named, generate=False)
        (turn,) = await client.http.turns(named)
        assert (said(turn["input"]), turn["output"], turn["status"]) == (
            "read this",
            [],
            "completed",
        )
