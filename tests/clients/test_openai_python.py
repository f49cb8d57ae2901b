"""The unmodified openai SDK against the real server with the default model."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from openai import AsyncOpenAI, NotFoundError, OpenAI

from chatrt.text.messages import Message
from chatrt.text.prompt import PromptBuilder
from chatrt.text.tokenizer import Tokenizer
from tests.support import assert_all_cached

if TYPE_CHECKING:
    from collections.abc import Mapping

    from chatrt.models.files import ModelFiles
    from tests.e2e.process import ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]
GREEDY: Mapping[str, Any] = {"temperature": 0, "max_output_tokens": 24}
PROMPTS = ("My name is Ada. Say hello.", "What is my name?", "Spell it.")


def sdk(server: ServerProcess) -> AsyncOpenAI:
    return AsyncOpenAI(api_key=server.api_key, base_url=server.base_url)


async def finished(connection: Any) -> Any:
    """The terminal response of the next answer, whose deltas must add up to its text."""
    text = ""
    async for event in connection:
        assert event.type != "error", event
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type in ("response.completed", "response.incomplete", "response.failed"):
            assert event.response.output_text == text
            return event.response
    raise AssertionError("the connection ended before the answer did")


async def test_follow_up_turns_reuse_all_but_the_template_delta_and_the_new_message(
    server: ServerProcess, default_model_files: ModelFiles
) -> None:
    tokenizer = Tokenizer.load(default_model_files.tokenizer_dir)
    builder = PromptBuilder(tokenizer)
    previous: dict[str, Any] = {}
    num_sequence = 0
    tip_ids: list[int] = []
    async with sdk(server) as client, client.responses.connect() as connection:
        for prompt in PROMPTS:
            await connection.response.create(
                model="smollm2-135m-instruct", input=prompt, **GREEDY, **previous
            )
            response = await finished(connection)
            usage = response.usage
            if previous:
                # The delta ends the turn before, which a greedy end-of-turn did already.
                delta = builder.follow_up([Message("user", prompt)], tip_ids=tip_ids)
                assert usage.input_tokens == num_sequence + len(delta)
                assert_all_cached(usage.input_tokens_details.cached_tokens, num_sequence)
            assert usage.total_tokens == usage.input_tokens + usage.output_tokens
            assert response.chatrt["kv"]["reused_tokens"] == (
                usage.input_tokens_details.cached_tokens
            )
            assert 0 < response.chatrt["ttft_ms"] < 60_000
            num_sequence = usage.total_tokens
            tip_ids = tokenizer.encode("<|im_end|>" if response.status == "completed" else "x")
            previous = {"previous_response_id": response.id}


# The SDK opens its connection in a way that newer websockets warn about.
@pytest.mark.filterwarnings("ignore:connect\\(\\) must be used as a context manager")
def test_a_follow_up_of_the_sync_sdk_says_what_the_whole_conversation_sent_at_once_would(
    server: ServerProcess,
) -> None:
    with (
        OpenAI(api_key=server.api_key, base_url=server.base_url) as client,
        client.responses.connect() as connection,
    ):

        def ask(asked: Any, **fields: Any) -> Any:
            connection.response.create(input=asked, **GREEDY, **fields)
            for event in connection:
                if event.type in ("response.completed", "response.incomplete"):
                    return event.response
            raise AssertionError("the connection ended before the answer did")

        first = ask(PROMPTS[0])
        follow_up = ask(PROMPTS[1], previous_response_id=first.id)
        items = [
            {"role": "user", "content": PROMPTS[0]},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": PROMPTS[1]},
        ]
        at_once = ask(items)
    assert follow_up.output_text == at_once.output_text != first.output_text
    assert follow_up.usage.input_tokens == at_once.usage.input_tokens


async def test_lanes_interleave_and_a_fork_continues_one_tip_twice(server: ServerProcess) -> None:
    async with sdk(server) as client, client.responses.connect() as connection:
        await connection.response.create(input=PROMPTS[0], **GREEDY)
        root = await finished(connection)
        for lane in ("a", "b"):
            await connection.response.create(
                input=PROMPTS[1], previous_response_id=root.id, stream_id=lane, **GREEDY
            )
        order: list[str] = []
        done: dict[str, Any] = {}
        while len(done) < 2:
            event: Any = await connection.recv()
            order.append(event.stream_id)
            if event.type in ("response.completed", "response.incomplete"):
                done[event.stream_id] = event.response
    switches = sum(a != b for a, b in itertools.pairwise(order))
    assert switches > 4, order
    assert done["a"].output_text == done["b"].output_text
    for one in done.values():
        assert_all_cached(one.usage.input_tokens_details.cached_tokens, root.usage.total_tokens)


async def test_a_cancelled_answer_is_a_usable_parent(server: ServerProcess) -> None:
    async with sdk(server) as client, client.responses.connect() as connection:
        await connection.response.create(input="Count to a hundred.", temperature=0)
        text = ""
        response_id = ""
        async for event in connection:
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta":
                if not text:
                    await connection.send_raw(
                        f'{{"type": "response.cancel", "response_id": "{response_id}"}}'
                    )
                text += event.delta
            if event.type == "response.incomplete":
                break
        assert event.type == "response.incomplete"
        assert event.response.status == "cancelled"
        assert event.response.incomplete_details is not None
        assert event.response.incomplete_details.reason == "cancelled"  # type: ignore[comparison-overlap]
        assert event.response.output_text == text
        usage = event.response.usage
        assert usage is not None
        assert 0 < usage.output_tokens < 200
        await connection.response.create(input="Stop.", previous_response_id=response_id, **GREEDY)
        after = await finished(connection)
    assert after.usage.input_tokens_details.cached_tokens >= usage.total_tokens - 1


async def test_an_unknown_parent_is_an_error_code_and_the_connection_goes_on(
    server: ServerProcess,
) -> None:
    async with sdk(server) as client, client.responses.connect() as connection:
        await connection.response.create(input="x", previous_response_id="resp_nowhere")
        event = await connection.recv()
        assert event.type == "error"
        assert event.error.code == "previous_response_not_found"
        assert "resp_nowhere" in event.error.message
        await connection.response.create(input="Say hi.", **GREEDY)
        assert (await finished(connection)).output_text


async def test_many_clients_of_the_sdk_at_once_each_get_their_own_answer(
    server: ServerProcess,
) -> None:
    async def ask(word: str) -> str:
        async with sdk(server) as client, client.responses.connect() as connection:
            await connection.response.create(input=f"Repeat exactly: {word}", **GREEDY)
            text: str = (await finished(connection)).output_text
            return text

    words = ("apple", "river", "purple", "winter")
    answers = await asyncio.gather(*map(ask, words))
    for word, answer in zip(words, answers, strict=True):
        others = [other for other in words if other != word]
        assert word in answer.lower()
        assert not any(other in answer.lower() for other in others)


async def test_what_the_sdk_reads_and_ends_over_http_needs_no_body(server: ServerProcess) -> None:
    async with sdk(server) as client, client.responses.connect() as connection:
        models = await client.models.list()
        assert await client.models.retrieve(models.data[0].id) == models.data[0]
        endless = {"chatrt.ignore_eos": "true"}
        await connection.response.create(input="Count to fifty.", temperature=0, metadata=endless)
        event: Any = await connection.recv()
        while event.type != "response.output_text.delta":
            event = await connection.recv()
        cancelled = await client.responses.cancel(event.response_id)
        assert cancelled.status == "cancelled"
        read = await client.responses.retrieve(cancelled.id)
        assert read.output_text == cancelled.output_text != ""
        await client.responses.delete(cancelled.id)
        with pytest.raises(NotFoundError):
            await client.responses.retrieve(cancelled.id)


async def test_a_conversation_made_by_a_raw_message_is_asked_read_and_deleted_by_the_sdk(
    server: ServerProcess,
) -> None:
    async with sdk(server) as client, client.responses.connect() as connection:
        await connection.send_raw('{"type": "chatrt.conversation.create", "title": "capitals"}')
        made: Any = await connection.recv()
        conversation = made.conversation["id"]
        asked = ("What is the capital of France?", "And what is the capital of Italy?")
        answers = []
        for prompt in asked:
            await connection.response.create(input=prompt, conversation=conversation, **GREEDY)
            answers.append((await finished(connection)).output_text)
        items: list[Any] = [one async for one in client.conversations.items.list(conversation)]
        told = [item.content[0].text for item in items]
        assert told == [asked[0], answers[0], asked[1], answers[1]]
        assert "Rome" in answers[1]
        assert (await client.conversations.delete(conversation)).deleted


async def test_the_rest_of_an_answer_is_read_by_a_raw_message_on_another_connection(
    server: ServerProcess,
) -> None:
    async with sdk(server) as client:
        async with client.responses.connect() as connection:
            await connection.response.create(input="Tell me about the sea.", **GREEDY)
            event: Any = await connection.recv()
            while event.type != "response.output_text.delta":
                event = await connection.recv()
        resume = {"response_id": event.response_id, "after_sequence_number": event.sequence_number}
        text = event.delta
        async with client.responses.connect() as connection:
            await connection.send_raw(json.dumps({"type": "chatrt.resume", **resume}))
            async for event in connection:
                if event.type == "response.output_text.delta":
                    text += event.delta
                if event.type in ("response.completed", "response.incomplete", "error"):
                    break
    assert event.response.id == resume["response_id"]
    assert event.response.output_text == text
