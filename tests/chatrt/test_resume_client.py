"""The async client resumes: a real server over a real tiny engine, cut wherever it hurts."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.client import ChatClient, ResponseRequest
from chatrt.errors import ChatrtError, InvalidValue, NotFound, ServerUnavailable
from chatrt.server.handshake import NO_KEY_ID
from chatrt.service.recent import RecentLogs
from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from chatrt.testing.serving import eventually
from chatrt.testing.serving import serving as serving_port
from tests.chatrt.service_support import Chat, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from chatrt.client import Answer, ClientEvent
    from chatrt.server.server import Server
    from chatrt.text.tokenizer import Tokenizer

NUM_CUTS = 50
LONG = {"max_output_tokens": 300, "ignore_eos": True}


@asynccontextmanager
async def running(
    tokenizer: Tokenizer, database: Path | None = None, **settings: Any
) -> AsyncIterator[tuple[Chat, Server]]:
    """A server over a real engine; `settings` are the server's."""
    async with (
        serving(tokenizer, database) as chat,
        serving_port(chat.service, insecure_no_auth=True, **settings) as server,
    ):
        yield chat, server


def url(server: Server) -> str:
    return f"ws://127.0.0.1:{server.port}"


async def delta_of(answer: Answer) -> ClientEvent:
    """The next event with text."""
    async for event in answer:
        if event.delta:
            return event
    raise AssertionError("the answer ended without text")


async def rest_of(answer: Answer) -> list[ClientEvent]:
    """All that arrived, up to the end of the answer or of the connection."""
    events: list[ClientEvent] = []
    while True:
        try:
            events.append(await anext(answer))
        except (StopAsyncIteration, ServerUnavailable):
            return events


async def cut(client: ChatClient, how: str) -> None:
    transport = client._websocket.transport
    if how == "reset":
        transport.abort()
    elif how == "close frame":
        await client.close()
    else:  # the peer is there, and reads no more
        transport.pause_reading()


async def answered_in_pieces(server: Server, request: ResponseRequest, draw: random.Random) -> str:
    """The text of an answer that loses its connection up to three times; checks the numbers."""
    clients = [await ChatClient.connect(url(server))]
    answer = await clients[0].send(request)
    recorder, events = answer.recorder, [await delta_of(answer)]
    for _ in range(draw.randint(1, 3)):
        how = draw.choice(["reset", "close frame", "half-open"])
        num_more = draw.randint(0, 25)
        while num_more > 0 and not recorder.finished:
            events.append(await anext(answer))
            num_more -= 1
        await cut(clients[-1], how)
        if how != "half-open":
            events += await rest_of(answer)
        else:
            while not answer._queue.empty():
                events.append(await anext(answer))
        if recorder.finished:
            break
        clients.append(await ChatClient.connect(url(server)))
        assert answer.response_id is not None
        answer = await clients[-1].resume(
            answer.response_id, after=answer.last_sequence_number, recorder=recorder
        )
    events += await rest_of(answer)
    numbers = [event.data["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))
    result = recorder.result()
    text = "".join(event.delta for event in events)
    assert (result.status, result.text) == ("incomplete", text)
    assert len(result.gaps_ms) + 1 == sum(bool(event.delta) for event in events)
    for client in clients:
        client._websocket.transport.abort()
        await client.wait_lost()
    return text


async def test_an_answer_cut_at_fifty_places_reads_as_the_uninterrupted_one(
    tokenizer: Tokenizer,
) -> None:
    draw = random.Random(5)
    async with running(tokenizer) as (chat, server):
        for _ in range(NUM_CUTS):
            seed = draw.randrange(2**31)
            request = ResponseRequest(
                "hello",
                sampling={"temperature": 0.8, "seed": seed, **LONG, "max_output_tokens": 80},
            )
            async with await ChatClient.connect(url(server)) as client:
                whole = await (await client.send(request)).collect()
            assert await answered_in_pieces(server, request, draw) == whole.text
        await eventually(lambda: server.num_connections == 0)
        await chat.num_free()


async def test_a_resumed_answer_can_be_cancelled_and_continued(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as (_chat, server):
        first = await ChatClient.connect(url(server))
        answer = await first.send(ResponseRequest("hello", sampling=LONG))
        await delta_of(answer)
        await cut(first, "reset")
        await first.wait_lost()
        assert answer.response_id is not None
        async with await ChatClient.connect(url(server)) as second:
            resumed = await second.resume(
                answer.response_id, after=answer.last_sequence_number, recorder=answer.recorder
            )
            assert resumed.response_id == answer.response_id
            await resumed.cancel()
            result = await resumed.collect()
            assert result.status == "cancelled"
            assert result.ttft_ms is not None
            follow = await second.chat("and?", previous_response_id=result.response_id)
            assert (await follow.collect()).text


async def test_a_resume_without_a_recorder_has_the_whole_answer_behind_its_end(
    tokenizer: Tokenizer,
) -> None:
    async with (
        running(tokenizer) as (_chat, server),
        await ChatClient.connect(url(server)) as client,
    ):
        whole = await (await client.chat("hello")).collect()
        assert whole.response_id is not None
        again = await client.resume(whole.response_id, after=None)
        assert again.response_id == whole.response_id
        assert (await again.collect()).text == whole.text
        last = again.last_sequence_number
        with pytest.raises(InvalidValue, match="nothing follows"):
            await (await client.resume(whole.response_id, after=last)).collect()
        with pytest.raises(NotFound, match="cannot be resumed"):
            await (await client.resume("resp_none", after=0)).collect()
        assert (await (await client.chat("still here")).collect()).text


async def test_after_the_grace_the_text_that_was_generated_is_a_parent(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with running(tokenizer, tmp_path / "chat.db", disconnect_grace_s=0.0) as (chat, server):
        client = await ChatClient.connect(url(server))
        answer = await client.send(ResponseRequest("hello", sampling=LONG))
        await delta_of(answer)
        assert answer.response_id is not None
        log = chat.service.find_log(answer.response_id, NO_KEY_ID)
        await cut(client, "reset")
        await client.wait_lost()
        await eventually(lambda: log.finished)
        end = log.terminal_event()
        assert end is not None
        assert end["response"]["status"] == "cancelled"
        subscription, text = log.subscribe(lambda: None), ""
        while (event := subscription.take()) is not None:
            text += event.get("delta", "")
        assert chat.store is not None
        stored = chat.store.load_turn(answer.response_id, NO_KEY_ID)
        assert stored is not None
        assert (stored.text, stored.status) == (text, "cancelled")
        async with await ChatClient.connect(url(server)) as second:
            rest = await second.resume(
                answer.response_id, after=answer.last_sequence_number, recorder=answer.recorder
            )
            assert (await rest.collect()).text == text
            follow = await second.chat("and?", previous_response_id=answer.response_id)
            assert (await follow.collect()).text


async def test_an_answer_nobody_reads_is_decoded_to_its_cap_and_resumed_in_few_frames(
    tokenizer: Tokenizer,
) -> None:
    async with running(tokenizer) as (chat, server):
        client = await ChatClient.connect(url(server))
        answer = await client.send(ResponseRequest("hello", sampling=LONG))
        await delta_of(answer)
        await cut(client, "reset")
        await client.wait_lost()
        assert answer.response_id is not None
        log = chat.service.find_log(answer.response_id, NO_KEY_ID)
        await eventually(lambda: log.finished)
        async with await ChatClient.connect(url(server)) as second:
            rest = await second.resume(
                answer.response_id, after=answer.last_sequence_number, recorder=answer.recorder
            )
            events = await rest_of(rest)
    assert len(events) < 10
    assert answer.recorder.result().usage["output_tokens"] == LONG["max_output_tokens"]


async def test_an_expired_answer_is_not_resumed_but_found_by_its_id(tokenizer: Tokenizer) -> None:
    async with (
        running(tokenizer) as (chat, server),
        await ChatClient.connect(url(server)) as client,
    ):
        now_s = [0.0]
        chat.service._recent = RecentLogs(window_s=60.0, clock=lambda: now_s[0])
        whole = await (await client.chat("hello")).collect()
        assert whole.response_id is not None
        now_s[0] = 61.0
        with pytest.raises(NotFound, match="60 s after its end"):
            await (await client.resume(whole.response_id, after=0)).collect()
        found = await client.http.response(whole.response_id)
        assert found["status"] == whole.status


async def test_a_failed_turn_is_found_resumed_and_deleted(tokenizer: Tokenizer) -> None:
    async with (
        running(tokenizer) as (chat, server),
        await ChatClient.connect(url(server)) as client,
    ):
        answer = await client.send(ResponseRequest("hello", sampling=LONG))
        await delta_of(answer)
        await chat.host.call(lambda engine: engine.fail_all(ChatrtError("a cable was pulled")))
        with pytest.raises(ChatrtError, match="a cable was pulled"):
            await answer.collect()
        assert answer.response_id is not None
        found = await client.http.response(answer.response_id)
        assert (found["status"], found["error"]["message"]) == ("failed", "a cable was pulled")
        again = await client.resume(answer.response_id, after=3)
        with pytest.raises(ChatrtError, match="a cable was pulled"):
            await again.collect()
        assert not await chat.service.cancel(answer.response_id, NO_KEY_ID)
        await chat.service.delete_response(answer.response_id, NO_KEY_ID)
        with pytest.raises(NotFound):
            await client.http.response(answer.response_id)


async def test_a_post_of_cancel_answers_when_the_response_has_ended(tokenizer: Tokenizer) -> None:
    async with (
        running(tokenizer) as (_chat, server),
        await ChatClient.connect(url(server)) as client,
    ):
        answer = await client.send(ResponseRequest("hello", sampling=LONG))
        await delta_of(answer)
        path = f"/v1/responses/{answer.response_id}/cancel"
        body = await client.http._call("POST", path)
        assert body["status"] == "cancelled"
        assert body["output"][0]["content"][0]["text"]
        assert (await answer.collect()).status == "cancelled"
        assert (await client.http._call("POST", path))["status"] == "cancelled"


async def test_a_deleted_response_is_not_resumed(tokenizer: Tokenizer) -> None:
    async with (
        running(tokenizer) as (chat, server),
        await ChatClient.connect(url(server)) as client,
    ):
        conversation_id = await client.create_conversation("t")
        alone = await (await client.chat("hello")).collect()
        filed = await (await client.chat("hello", conversation=conversation_id)).collect()
        assert alone.response_id is not None
        assert filed.response_id is not None
        await chat.service.delete_response(alone.response_id, NO_KEY_ID)
        await client.http.delete_conversation(conversation_id)
        for response_id in (alone.response_id, filed.response_id):
            with pytest.raises(NotFound):
                await (await client.resume(response_id, after=0)).collect()
            with pytest.raises(NotFound):
                await client.http.response(response_id)


async def test_the_scripted_server_lets_an_answer_survive_its_connection() -> None:
    script = ScriptedAnswer(["a", "b", "c", "d"], delay_s=0.01, drop_after=2, survives=True)
    async with ScriptedServer([script]) as server:
        first = await ChatClient.connect(server.url)
        answer = await first.chat("hi")
        await rest_of(answer)
        assert answer.response_id is not None
        async with await ChatClient.connect(server.url) as second:
            rest = await second.resume(
                answer.response_id, after=answer.last_sequence_number, recorder=answer.recorder
            )
            deltas = [event.delta async for event in rest]
            assert "".join(deltas) == "cd"
            assert answer.recorder.result().text == "abcd"
        await server.stop()
        await server.start()
        async with await ChatClient.connect(server.url) as third:
            with pytest.raises(NotFound):
                await (await third.resume(answer.response_id, after=0)).collect()
