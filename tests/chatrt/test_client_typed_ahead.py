"""Typing ahead, and going on with a cut-off answer, against the real server over a tiny model."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from chatrt.client import ChatClient, ClientThread, ResponseRequest
from chatrt.testing.serving import eventually
from chatrt.testing.serving import serving as server_around
from tests.chatrt.service_support import serving
from tests.chatrt.test_client_thread import Recorder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from chatrt.text.tokenizer import Tokenizer
    from tests.chatrt.service_support import Chat

QUESTION = "where does the river end that runs through the old town?"


@asynccontextmanager
async def served(tokenizer: Tokenizer) -> AsyncIterator[tuple[Chat, str]]:
    async with serving(tokenizer) as chat, server_around(chat.service) as server:
        yield chat, f"ws://127.0.0.1:{server.port}"


async def test_the_question_computes_only_what_was_not_typed_ahead(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as (_, url), await ChatClient.connect(url) as client:
        cold = await (await client.send(ResponseRequest(input=QUESTION))).collect()
        warm = ResponseRequest(input=QUESTION[::-1])
        typed = await client.type_ahead(ResponseRequest(input=QUESTION[::-1][:-6]))
        await typed.settled()
        result = await (await client.send(warm, typed=typed)).collect()
    assert cold.timing["kv"]["typed_ahead_tokens"] == 0
    kv = result.timing["kv"]
    assert kv["typed_ahead_tokens"] > 20
    assert kv["computed_tokens"] < cold.timing["kv"]["computed_tokens"] / 2


async def test_a_new_conversation_finds_what_was_typed_before_it_existed(
    tokenizer: Tokenizer,
) -> None:
    seen = Recorder()
    async with served(tokenizer) as (chat, url):
        client = ClientThread(url, api_key=None, post=seen)
        client.start()
        await seen.wait(lambda event: getattr(event, "kind", "") == "connected")
        # Nothing tells the client of a partial: what the engine holds tells the test.
        client.type_ahead(ResponseRequest(input=QUESTION))
        await eventually(lambda: chat.engine.sessions.figures().sessions["parked"] == 1)
        client.ask(1, ResponseRequest(input=QUESTION), title="a title")
        result = await seen.done(1)
        await asyncio.to_thread(client.close)
        (listed,) = await client.http.conversations()
    assert result.timing["kv"]["typed_ahead_tokens"] > 20
    assert (listed["title"], listed["num_turns"]) == ("a title", 1)


async def test_a_partial_of_an_unknown_parent_is_refused_in_silence(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as (_, url), await ChatClient.connect(url) as client:
        lost = ResponseRequest(input="hi", previous_response_id="resp_unknown")
        typed = await client.type_ahead(lost)
        async with asyncio.timeout(5):
            await typed.settled()
        answer = await client.send(ResponseRequest(input=QUESTION), typed=typed)
        assert (await answer.collect()).status in ("completed", "incomplete")
