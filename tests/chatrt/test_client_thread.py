"""ClientThread: batches, reconnecting, what becomes of a turn in an outage."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from chatrt.client import ClientThread, ResponseRequest, TurnResult
from chatrt.client.batches import (
    ConnectionState,
    ConversationMade,
    ThreadEvent,
    TurnDone,
    TurnEvent,
    TurnInterrupted,
)
from chatrt.client.thread import pauses_s
from chatrt.errors import CallerError, ServerUnavailable, StillLoading
from chatrt.service.deferred import DeferredService
from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from chatrt.testing.serving import eventually
from chatrt.testing.serving import serving as serving_port
from tests.chatrt.service_support import serving
from tests.chatrt.typing_support import ReadingServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from chatrt.text.tokenizer import Tokenizer


class Recorder:
    """Takes batches with their times, as a program that paints would."""

    def __init__(self) -> None:
        self.batches: list[tuple[float, Sequence[ThreadEvent]]] = []
        self.threads: set[str] = set()

    def __call__(self, batch: Sequence[ThreadEvent]) -> None:
        self.threads.add(threading.current_thread().name)
        self.batches.append((time.monotonic(), batch))

    @property
    def events(self) -> list[ThreadEvent]:
        return [event for _, batch in self.batches for event in batch]

    async def wait(self, found: Callable[[ThreadEvent], bool]) -> ThreadEvent:
        for _ in range(1000):
            for event in self.events:
                if found(event):
                    return event
            await asyncio.sleep(0.01)
        raise AssertionError(f"not seen, the last events: {self.events[-5:]}")

    async def done(self, turn_id: int) -> TurnResult:
        event = await self.wait(lambda e: isinstance(e, TurnDone) and e.turn_id == turn_id)
        assert isinstance(event, TurnDone)
        return event.result


def quick_pauses() -> Iterator[float]:
    while True:
        yield 0.05


@asynccontextmanager
async def running(
    server: ScriptedServer, api_key: str | None = None
) -> AsyncIterator[tuple[ClientThread, Recorder]]:
    recorder = Recorder()
    client = ClientThread(server.url, api_key=api_key, post=recorder, pauses=quick_pauses)
    client.start()
    try:
        yield client, recorder
    finally:
        await asyncio.to_thread(client.close)


def deltas(events: Sequence[ThreadEvent]) -> list[str]:
    return [e.event.delta for e in events if isinstance(e, TurnEvent) and e.event.delta]


async def test_the_first_turn_opens_a_conversation_and_followups_name_the_parent_only() -> None:
    async with (
        ScriptedServer([ScriptedAnswer(["hi"])]) as server,
        running(server) as (client, seen),
    ):
        client.ask(1, ResponseRequest(input="one"), title="a title")
        first = await seen.done(1)
        client.ask(2, ResponseRequest(input="two", previous_response_id=first.response_id))
        await seen.done(2)
        opened, follow_up = server.creates()
    made = next(e for e in seen.events if isinstance(e, ConversationMade))
    assert opened["conversation"] == made.conversation_id
    assert "previous_response_id" not in opened
    assert follow_up["previous_response_id"] == first.response_id
    assert "conversation" not in follow_up
    assert server.requests[0] == {"type": "chatrt.conversation.create", "title": "a title"}
    assert seen.threads == {"chatrt-client"}


async def test_a_question_asked_while_the_server_loads_is_answered_once_it_has(
    tokenizer: Tokenizer,
) -> None:
    loading, seen = DeferredService(), Recorder()
    async with serving(tokenizer) as chat, serving_port(loading, insecure_no_auth=True) as server:
        url = f"ws://127.0.0.1:{server.port}"
        client = ClientThread(url, api_key=None, post=seen, pauses=quick_pauses)
        client.start()
        try:
            client.ask(1, ResponseRequest(input="hi", sampling={"max_output_tokens": 3}))
            lost = await seen.wait(lambda e: isinstance(e, ConnectionState) and e.kind == "lost")
            assert isinstance(lost, ConnectionState)
            assert lost.message == StillLoading().message
            loading.begin(chat.service)
            result = await seen.done(1)
        finally:
            await asyncio.to_thread(client.close)
    assert result.error is None
    assert result.usage["output_tokens"] == 3


async def test_the_first_delta_comes_at_once_and_later_ones_at_most_30_times_a_second() -> None:
    answer = ScriptedAnswer(["x"] * 200, delay_s=0.0025)
    async with ScriptedServer([answer]) as server, running(server) as (client, seen):
        client.ask(1, ResponseRequest(input="hi"))
        result = await seen.done(1)
    with_text = [(at, batch) for at, batch in seen.batches if deltas(batch)]
    assert len(deltas(with_text[0][1])) == 1
    assert "".join(deltas(seen.events)) == result.text == "x" * 200
    length_s = with_text[-1][0] - with_text[0][0]
    assert len(with_text) <= length_s * 30 + 3


async def test_a_turn_asked_before_there_is_a_connection_waits_for_it() -> None:
    server = ScriptedServer([ScriptedAnswer(["late"])])
    await server.start()
    await server.stop()
    async with running(server) as (client, seen):
        client.ask(1, ResponseRequest(input="early"))
        await seen.wait(lambda e: isinstance(e, ConnectionState) and e.kind == "lost")
        await server.start()
        result = await seen.done(1)
        assert result.text == "late"
        assert result.ttft_ms is not None
        assert result.ttft_ms < 1000  # counted from the connection, not from the outage
    await server.stop()


async def test_an_answer_cut_off_by_the_connection_is_found_again() -> None:
    answer = ScriptedAnswer(["a ", "b ", "c "], delay_s=0.02, drop_after=2)
    async with (
        ScriptedServer([answer, ScriptedAnswer(["go on"])]) as server,
        running(server) as (client, seen),
    ):
        client.ask(1, ResponseRequest(input="hi"))
        result = await seen.done(1)
        assert (result.status, result.text) == ("cancelled", "a b ")
        assert result.usable_as_parent
        client.ask(2, ResponseRequest(input="2", previous_response_id=result.response_id))
        assert (await seen.done(2)).text == "go on"
        assert len(server.creates()) == 2
    kinds = [e.kind for e in seen.events if isinstance(e, ConnectionState)]
    assert kinds == ["connecting", "connected", "lost", "connecting", "connected"]
    assert any(isinstance(e, TurnInterrupted) for e in seen.events)


async def test_an_answer_goes_on_where_the_connection_cut_it_off() -> None:
    pieces = [f"{number} " for number in range(12)]
    answer = ScriptedAnswer(pieces, delay_s=0.02, drop_after=4, survives=True)
    async with (
        ScriptedServer([answer, ScriptedAnswer(["next"])]) as server,
        running(server) as (client, seen),
    ):
        client.ask(1, ResponseRequest(input="hi"))
        result = await seen.done(1)
        assert (result.status, result.text) == ("completed", "".join(pieces))
        assert "".join(deltas(seen.events)) == result.text  # none lost, none twice
        assert any(isinstance(event, TurnInterrupted) for event in seen.events)
        (resume,) = [m for m in server.requests if m["type"] == "chatrt.resume"]
        assert resume["response_id"] == result.response_id
        assert len(server.creates()) == 1
        client.ask(2, ResponseRequest(input="2", previous_response_id=result.response_id))
        assert (await seen.done(2)).text == "next"


def has_words(seen: Recorder, number: int) -> bool:
    return len("".join(deltas(seen.events)).split()) >= number


async def test_an_answer_outlives_several_connections() -> None:
    answer = ScriptedAnswer(["word "] * 300, delay_s=0.005, survives=True)
    async with ReadingServer([answer]) as server, running(server) as (client, seen):
        client.ask(1, ResponseRequest(input="hi"))
        for num_words in (5, 60, 61):
            await eventually(partial(has_words, seen, num_words))
            server.cut()
        assert (await seen.done(1)).text == "word " * 300
        assert "".join(deltas(seen.events)) == "word " * 300


async def test_a_stop_while_cut_off_cancels_the_answer_once_the_connection_is_back() -> None:
    answer = ScriptedAnswer(["word "] * 1000, delay_s=0.01, drop_after=3, survives=True)
    async with ScriptedServer([answer]) as server, running(server) as (client, seen):
        client.ask(1, ResponseRequest(input="hi"))
        await seen.wait(lambda event: isinstance(event, TurnInterrupted))
        client.stop(1)
        result = await seen.done(1)
        assert (result.status, result.reason) == ("cancelled", "cancelled")
        assert result.text == "".join(deltas(seen.events))
        assert result.usable_as_parent
        assert [m["type"] for m in server.requests if m["type"] == "response.cancel"]


async def test_a_second_stop_while_cut_off_gives_up_with_the_part_that_came() -> None:
    answer = ScriptedAnswer(["word "] * 1000, delay_s=0.01, survives=True)
    async with ScriptedServer([answer]) as server, running(server) as (client, seen):
        client.ask(1, ResponseRequest(input="hi"))
        await seen.wait(lambda event: isinstance(event, TurnEvent) and bool(event.event.delta))
        await server.stop()
        await seen.wait(lambda event: isinstance(event, TurnInterrupted))
        client.stop(1)
        client.stop(1)
        result = await seen.done(1)
    assert result.text.startswith("word ")
    assert isinstance(result.error, ServerUnavailable)
    assert not result.usable_as_parent


async def test_an_answer_that_the_server_forgot_keeps_its_text_but_is_no_parent() -> None:
    answer = ScriptedAnswer(["a ", "b "], drop_after=1, forgets=True)
    async with ScriptedServer([answer]) as server, running(server) as (client, seen):
        client.ask(1, ResponseRequest(input="hi"))
        result = await seen.done(1)
        assert len(server.creates()) == 1  # nothing is ever sent twice
    assert (result.text, result.status) == ("a ", "error")
    assert isinstance(result.error, ServerUnavailable)
    assert not result.usable_as_parent


async def test_stop_works_while_waiting_for_the_connection_and_in_mid_answer() -> None:
    server = ScriptedServer([ScriptedAnswer(["word "] * 1000, delay_s=0.01)])
    await server.start()
    await server.stop()
    async with running(server) as (client, seen):
        client.ask(1, ResponseRequest(input="never sent"))
        client.stop(1)
        assert (await seen.done(1)).reason == "cancelled"
        await server.start()
        client.ask(2, ResponseRequest(input="stopped"))
        await seen.wait(lambda e: isinstance(e, TurnEvent) and bool(e.event.delta))
        client.stop(2)
        result = await seen.done(2)
        assert result.status == "cancelled"
        assert result.text.startswith("word ")
    assert [create["input"] for create in server.creates()] == ["stopped"]
    await server.stop()


async def test_a_stop_right_after_the_question_is_not_lost() -> None:
    async with (
        ScriptedServer([ScriptedAnswer(["x"] * 2000, delay_s=0.01)]) as server,
        running(server) as (client, seen),
    ):
        await seen.wait(lambda e: isinstance(e, ConnectionState) and e.kind == "connected")
        client.ask(1, ResponseRequest(input="hi"))
        client.stop(1)
        assert (await seen.done(1)).status in ("cancelled", "error")


async def test_a_refused_key_is_final_and_ends_waiting_turns() -> None:
    async with (
        ScriptedServer([ScriptedAnswer()], api_key="right") as server,
        running(server, api_key="wrong") as (client, seen),
    ):
        client.ask(1, ResponseRequest(input="hi"))
        assert isinstance((await seen.done(1)).error, CallerError)
        await asyncio.sleep(0.2)
    kinds = [e.kind for e in seen.events if isinstance(e, ConnectionState)]
    assert kinds == ["connecting", "refused"]


async def test_close_ends_the_thread_in_mid_answer() -> None:
    async with (
        ScriptedServer([ScriptedAnswer(["x"] * 1000, delay_s=0.01)]) as server,
        running(server) as (client, seen),
    ):
        client.ask(1, ResponseRequest(input="hi"))
        await seen.wait(lambda e: isinstance(e, TurnEvent) and bool(e.event.delta))
    assert all(thread.name != "chatrt-client" for thread in threading.enumerate())


def test_pauses_double_up_to_five_seconds() -> None:
    pauses = pauses_s()
    assert [round(next(pauses), 1) for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
