"""ChatClient against the scripted server: events, lanes, errors, figures."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from websockets.asyncio.server import ServerConnection, serve

from chatrt.client import ChatClient, ResponseRequest
from chatrt.client.http import websocket_url
from chatrt.client.messages import message_item
from chatrt.errors import (
    CallerError,
    ContextLengthExceeded,
    NotFound,
    Overloaded,
    ServerUnavailable,
)
from chatrt.testing.scripted_server import Script, ScriptedAnswer, ScriptedServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable


@asynccontextmanager
async def talking(
    answers: Iterable[ScriptedAnswer] | Script,
) -> AsyncIterator[tuple[ScriptedServer, ChatClient]]:
    async with ScriptedServer(answers) as server, await ChatClient.connect(server.url) as client:
        yield server, client


async def test_events_arrive_in_the_order_and_with_the_numbers_of_the_wire() -> None:
    async with talking([ScriptedAnswer(["a", "b"])]) as (_server, client):
        events = [event async for event in await client.chat("hi")]
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    assert "".join(event.delta for event in events) == "ab"


async def test_collect_gives_text_id_usage_and_timing_of_the_turn() -> None:
    answer = ScriptedAnswer(
        ["one ", "two"], delay_s=0.03, first_delay_s=0.02, timing={"decode_tps": 120.0}
    )
    async with talking([answer]) as (_server, client):
        result = await (await client.chat("hi")).collect()
    assert (result.text, result.status) == ("one two", "completed")
    assert result.response_id is not None
    assert result.usage["output_tokens"] == 2
    assert result.timing == {"decode_tps": 120.0}
    assert result.ttft_ms is not None
    assert result.ttft_ms >= 20
    assert len(result.gaps_ms) == 1
    assert result.gaps_ms[0] >= 25
    assert result.usable_as_parent


async def test_receive_time_is_when_the_frame_was_read_not_when_it_was_taken() -> None:
    async with talking([ScriptedAnswer(["a"])]) as (_server, client):
        answer = await client.chat("hi")
        await asyncio.sleep(0.15)  # everything has arrived; nobody has looked
        taken_ns = time.perf_counter_ns()
        events = [event async for event in answer]
    assert all(answer.sent_ns <= event.received_ns < taken_ns for event in events)
    stamps = [event.received_ns for event in events]
    assert stamps == sorted(stamps)
    assert stamps[-1] < taken_ns - 50_000_000


async def test_answers_on_several_lanes_interleave_and_never_mix() -> None:
    def script(message: dict[str, object]) -> ScriptedAnswer:
        return ScriptedAnswer([str(message["input"])] * 5, delay_s=0.01)

    async with talking(script) as (server, client):
        answers = [await client.chat(str(i)) for i in range(8)]
        results = await asyncio.gather(*(answer.collect() for answer in answers))
        lanes = [message["stream_id"] for message in server.creates()]
    assert [result.text for result in results] == [str(i) * 5 for i in range(8)]
    assert len(set(lanes)) == 8


async def test_a_seventeenth_answer_waits_for_a_lane() -> None:
    async with talking([ScriptedAnswer(["x"], first_delay_s=0.1)]) as (_server, client):
        answers = [await client.chat("hi") for _ in range(16)]
        late = asyncio.create_task(client.chat("late"))
        await asyncio.sleep(0.02)
        assert not late.done()
        await asyncio.gather(*(answer.collect() for answer in answers))
        assert (await (await late).collect()).text == "x"


async def test_cancel_keeps_the_part_that_came_and_it_can_be_continued() -> None:
    answers = [ScriptedAnswer(["word "] * 500, delay_s=0.01), ScriptedAnswer(["more"])]
    async with talking(answers) as (_server, client):
        answer = await client.chat("hi")
        async for event in answer:
            if event.delta:
                await answer.cancel()
                break
        result = await answer.collect()
        assert (result.status, result.reason) == ("cancelled", "cancelled")
        assert result.text.startswith("word ")
        assert result.usable_as_parent
        follow_up = await client.chat("go on", previous_response_id=result.response_id)
        assert (await follow_up.collect()).text == "more"


async def test_cancel_works_before_the_first_event_was_read() -> None:
    async with talking([ScriptedAnswer(["x"], first_delay_s=30)]) as (_server, client):
        answer = await client.chat("hi")
        await answer.cancel()
        result = await asyncio.wait_for(answer.collect(), 5)
    assert (result.status, result.text) == ("cancelled", "")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("context_length_exceeded", ContextLengthExceeded),
        ("rate_limit_exceeded", Overloaded),
        ("something_new", CallerError),
    ],
)
async def test_an_error_event_raises_its_kind_and_keeps_code_and_message(
    code: str, kind: type[Exception]
) -> None:
    error = {"code": code, "message": "the prompt has 9 tokens, the context 8", "param": "input"}
    answers = [ScriptedAnswer(error=error), ScriptedAnswer(["fine"])]
    async with talking(answers) as (_server, client):
        with pytest.raises(kind, match="9 tokens, the context 8") as caught:
            await (await client.chat("hi")).collect()
        assert getattr(caught.value, "code", None) == code
        assert getattr(caught.value, "param", None) == "input"
        assert (await (await client.chat("again")).collect()).text == "fine"


async def test_an_error_on_one_lane_leaves_the_others_alone() -> None:
    def script(message: dict[str, object]) -> ScriptedAnswer:
        if message["input"] == "bad":
            return ScriptedAnswer(error={"code": "invalid_value", "message": "no"})
        return ScriptedAnswer(["a"] * 20, delay_s=0.005)

    async with talking(script) as (_server, client):
        good = await client.chat("good")
        with pytest.raises(CallerError):
            await (await client.chat("bad")).collect()
        assert (await good.collect()).text == "a" * 20


async def test_a_failed_response_raises_its_error_after_its_events() -> None:
    answer = ScriptedAnswer(["part"], failure={"code": "kv_exhausted", "message": "no page free"})
    async with talking([answer]) as (_server, client):
        stream = await client.chat("hi")
        types = [event.type async for event in stream]
        assert types[-1] == "response.failed"
        assert not stream.recorder.result().usable_as_parent
        with pytest.raises(Exception, match="no page free"):
            await stream.collect()


async def test_a_lost_connection_ends_every_answer_with_server_unavailable() -> None:
    answers = [ScriptedAnswer(["a"] * 100, delay_s=0.01), ScriptedAnswer(["b"], drop_after=1)]
    async with ScriptedServer(answers) as server:
        client = await ChatClient.connect(server.url)
        first, second = await client.chat("1"), await client.chat("2")
        for answer in (first, second):
            with pytest.raises(ServerUnavailable, match="connection"):
                await answer.collect()
        with pytest.raises(ServerUnavailable):
            await client.chat("3")
        await client.close()


async def test_no_server_says_so_in_one_sentence() -> None:
    with pytest.raises(ServerUnavailable, match=r"no server answers at ws://127\.0\.0\.1:1/"):
        await ChatClient.connect("ws://127.0.0.1:1")


async def test_something_else_on_the_port_is_no_chat_server() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail ready\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(ServerUnavailable, match="not a chat server"):
            await ChatClient.connect(f"ws://127.0.0.1:{port}")


async def test_a_refused_key_is_the_callers_fault() -> None:
    async with ScriptedServer([ScriptedAnswer()], api_key="right") as server:
        with pytest.raises(CallerError, match="refuses this API key") as caught:
            await ChatClient.connect(server.url, api_key="wrong")
        assert caught.value.code == "invalid_api_key"
        async with await ChatClient.connect(server.url, api_key="right") as client:
            assert (await (await client.chat("hi")).collect()).text == "Hello"
            assert await client.http.conversations() == []


async def test_frames_that_are_not_json_end_the_connection_with_a_sentence() -> None:
    async def talk(connection: ServerConnection) -> None:
        await connection.send("not json")
        await connection.wait_closed()

    async with serve(talk, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        client = await ChatClient.connect(f"ws://127.0.0.1:{port}")
        assert "not JSON" in (await asyncio.wait_for(client.wait_lost(), 5)).message
        await client.close()


async def test_an_unknown_previous_response_is_never_replaced_by_a_new_conversation() -> None:
    async with talking([ScriptedAnswer()]) as (server, client):
        with pytest.raises(NotFound) as caught:
            await (await client.chat("hi", previous_response_id="resp_gone")).collect()
        assert caught.value.code == "previous_response_not_found"
        assert len(server.creates()) == 1


async def test_a_conversation_is_made_listed_renamed_read_and_deleted() -> None:
    async with talking([ScriptedAnswer(["Hi"])]) as (_server, client):
        conversation_id = await client.create_conversation("greeting")
        first = await (await client.chat("hello", conversation=conversation_id)).collect()
        await (await client.chat("bye", previous_response_id=first.response_id)).collect()
        await client.rename_conversation(conversation_id, "farewell")
        (row,) = await client.http.conversations("fare")
        assert (row["title"], row["num_turns"]) == ("farewell", 2)
        texts = [item["content"][0]["text"] for item in await client.http.items(conversation_id)]
        assert texts == ["hello", "Hi", "bye", "Hi"]
        await client.http.delete_conversation(conversation_id)
        with pytest.raises(NotFound):
            await client.http.items(conversation_id)


async def test_health_and_ready_are_false_without_a_server() -> None:
    async with ScriptedServer([ScriptedAnswer()]) as server:
        client = await ChatClient.connect(server.url)
        assert await client.http.health()
        assert await client.http.ready()
        assert (await client.http.models())[0]["id"] == "scripted"
        await client.close()
    assert not await client.http.health()
    with pytest.raises(ServerUnavailable, match="no server answers"):
        await client.http.models()


def test_sampling_goes_where_the_wire_wants_each_name() -> None:
    message = ResponseRequest(
        input=[message_item("system", "be brief"), message_item("user", "hi")],
        sampling={"temperature": 0.0, "top_k": 5, "top_logprobs": 2, "seed": None},
        chatrt={"timing": "token"},
    ).to_message("lane")
    assert message["temperature"] == 0.0
    assert message["top_logprobs"] == 2
    assert message["include"] == ["message.output_text.logprobs"]
    assert message["chatrt"] == {"top_k": 5, "seed": None, "timing": "token"}
    assert "conversation" not in message


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("ws://h:1", "ws://h:1/v1/responses"),
        ("http://h:1/", "ws://h:1/v1/responses"),
        ("https://h/own/responses?model=m", "wss://h/own/responses?model=m"),
    ],
)
def test_addresses_of_all_kinds_name_the_websocket(given: str, address: str) -> None:
    assert websocket_url(given) == address


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ServerUnavailable, match="is not an address like"):
        websocket_url("localhost:8642")
