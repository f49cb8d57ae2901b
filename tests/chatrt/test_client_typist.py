"""Typing ahead from the client's side: when a half-typed text is sent, and on which lane."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from chatrt.client import ChatClient, ResponseRequest
from chatrt.client.typed_ahead import is_of_partial
from chatrt.client.typist import LONGEST_WAIT_S, MAX_CHARS, PAUSE_S, Typist
from chatrt.testing.scripted_server import ScriptedAnswer
from chatrt.testing.serving import eventually
from tests.chatrt.typing_support import ReadingServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def typing(
    answers: list[ScriptedAnswer] | None = None,
) -> AsyncIterator[tuple[ReadingServer, ChatClient, Typist]]:
    async with (
        ReadingServer(answers or [ScriptedAnswer(["ok"])]) as server,
        await ChatClient.connect(server.url) as client,
    ):
        typist = Typist(client)
        yield server, client, typist
        typist.drop()


def text(content: str, parent: str | None = None) -> ResponseRequest:
    return ResponseRequest(input=content, previous_response_id=parent)


async def test_a_text_is_sent_once_typing_pauses_and_only_the_newest() -> None:
    async with typing() as (server, _, typist):
        for length in range(1, 6):
            typist.type(text("hello"[:length]))
        await eventually(lambda: server.typed() == ["hello"])
        (partial,) = server.partials()
    assert partial["generate"] is False
    assert partial["chatrt"] == {"partial": True}


async def test_who_types_without_a_pause_is_read_along_all_the_same() -> None:
    async with typing() as (server, _, typist):
        loop = asyncio.get_running_loop()
        start_s, content = loop.time(), ""
        while not server.typed():
            content += "x"
            typist.type(text(content))
            await asyncio.sleep(PAUSE_S / 4)
            assert loop.time() - start_s < 10 * LONGEST_WAIT_S
        typist.drop()
    assert len(server.typed()[0]) > 1


async def test_a_text_that_was_sent_is_not_sent_again() -> None:
    async with typing() as (server, _, typist):
        typist.type(text("hello"))
        await eventually(lambda: server.typed() == ["hello"])
        typist.type(text("hello!"))
        typist.type(text("hello"))  # taken back
        typist.type(text("hello", parent="resp_1"))  # the same words of another question
        await eventually(lambda: len(server.partials()) == 2)
    assert server.typed() == ["hello", "hello"]
    assert server.partials()[1]["previous_response_id"] == "resp_1"


async def test_one_is_outstanding_and_a_newer_text_supersedes_those_that_wait() -> None:
    async with typing() as (server, _, typist):
        server.goes_on.clear()
        typist.type(text("a"))
        await eventually(lambda: server.typed() == ["a"])
        for content in ("ab", "abc"):
            typist.type(text(content))
            await asyncio.sleep(2 * PAUSE_S)
        assert server.typed() == ["a"]
        server.goes_on.set()
        await eventually(lambda: server.typed() == ["a", "abc"])
        lanes = {partial["stream_id"] for partial in server.partials()}
    assert len(lanes) == 1


async def test_nothing_follows_the_question_and_it_goes_out_on_the_lane_of_what_was_typed() -> None:
    async with typing() as (server, client, typist):
        typist.type(text("hel"))
        await eventually(lambda: server.typed() == ["hel"])
        typist.type(text("hello"))
        answer = await client.send(text("hello"), typed=typist.take())
        assert (await answer.collect()).text == "ok"
        await asyncio.sleep(2 * PAUSE_S)
    assert [message["input"] for message in server.requests] == ["hel", "hello"]
    assert server.creates()[0]["stream_id"] == server.partials()[0]["stream_id"]


async def test_a_question_waits_for_no_partial_and_takes_none_of_its_events() -> None:
    async with typing() as (server, client, typist):
        server.goes_on.clear()
        typist.type(text("hel"))
        await eventually(lambda: server.typed() == ["hel"])
        answer = await client.send(text("hello"), typed=typist.take())
        await eventually(server.creates)
        server.goes_on.set()
        events = [event async for event in answer]
    assert events[0].type == "response.created"
    assert all(event.data.get("response", {}).get("id") != "resp_half" for event in events)
    assert answer.recorder.result().text == "ok"


async def test_a_refused_partial_shows_nowhere_and_the_next_one_is_sent() -> None:
    async with typing([ScriptedAnswer(["ok"], first_delay_s=0.2)]) as (server, client, typist):
        server.refuses = {"code": "context_length_exceeded", "message": "9 do not fit in 8"}
        typist.type(text("one"))
        await eventually(lambda: server.typed() == ["one"])
        typist.type(text("two"))
        await eventually(lambda: server.typed() == ["one", "two"])
        server.goes_on.clear()
        typist.type(text("three"))
        await eventually(lambda: len(server.partials()) == 3)
        answer = await client.send(text("three!"), typed=typist.take())
        await eventually(server.creates)
        server.goes_on.set()  # its refusal comes while the answer is awaited
        assert (await answer.collect()).text == "ok"


async def test_partials_use_up_no_lanes() -> None:
    async with typing() as (_, client, typist):
        for number in range(20):
            typed = await client.type_ahead(text(f"{number}"))
            await typed.settled()
            await (await client.send(text(f"{number}?"), typed=typed)).collect()
        assert typist.take() is None
        answers = [await client.send(text("all at once")) for _ in range(16)]
        await asyncio.gather(*(answer.collect() for answer in answers))


async def test_what_was_typed_on_a_lost_connection_is_forgotten() -> None:
    async with typing() as (server, client, typist):
        server.goes_on.clear()
        typed = await client.type_ahead(text("hel"))
        await server.stop()
        async with asyncio.timeout(5):
            await typed.settled()
        await server.start()
        server.goes_on.set()
        async with await ChatClient.connect(server.url) as other:
            answer = await other.send(text("hello"), typed=typed)
            assert (await answer.collect()).text == "ok"
        typist.type(text("hello"))  # the connection's keeper says that it is gone
        await asyncio.sleep(2 * PAUSE_S)


async def test_a_text_longer_than_any_context_is_not_sent_ahead() -> None:
    async with typing() as (server, _, typist):
        typist.type(text("x" * (MAX_CHARS + 1)))
        await asyncio.sleep(2 * PAUSE_S)
        typist.type(text("short"))
        await eventually(lambda: server.typed() == ["short"])


def test_events_of_partials_are_told_by_their_mark() -> None:
    ours = {"id": "resp_1", "metadata": {"typed_ahead": "true"}}
    assert is_of_partial({"type": "response.completed", "response": ours})
    assert is_of_partial({"type": "error", "error": {}, "chatrt": {"partial": True}})
    assert not is_of_partial({"type": "error", "error": {}})
    assert not is_of_partial({"type": "response.created", "response": {"id": "resp_1"}})
    assert not is_of_partial({"type": "response.output_text.delta", "delta": "x"})
