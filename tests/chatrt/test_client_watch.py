"""Watching a conversation: a real server over a real tiny engine, and two clients of it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.client import ChatClient, ClientThread, ResponseRequest
from chatrt.client.batches import (
    OtherTurnBegan,
    OtherTurnDone,
    OtherTurnText,
    TurnInterrupted,
    Watching,
)
from chatrt.errors import NotFound, Overloaded, ServerUnavailable
from chatrt.testing.serving import calling, eventually
from chatrt.testing.serving import serving as serving_port
from tests.chatrt.service_support import Chat, serving
from tests.chatrt.test_client_thread import Recorder, deltas, quick_pauses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from chatrt.client import Answer, TurnResult, Watch, WatchedEvent
    from chatrt.client.batches import ThreadEvent
    from chatrt.server.server import Server
    from chatrt.text.tokenizer import Tokenizer

LONG = {"max_output_tokens": 100, "ignore_eos": True}


@asynccontextmanager
async def running(tokenizer: Tokenizer, **settings: Any) -> AsyncIterator[tuple[Chat, Server]]:
    """A server over a real engine; `settings` are the server's."""
    async with (
        serving(tokenizer) as chat,
        serving_port(chat.service, insecure_no_auth=True, **settings) as server,
    ):
        yield chat, server


async def connected(server: Server) -> ChatClient:
    return await ChatClient.connect(f"ws://127.0.0.1:{server.port}")


@asynccontextmanager
async def on_a_thread(server: Server) -> AsyncIterator[tuple[ClientThread, Recorder]]:
    seen = Recorder()
    url = f"ws://127.0.0.1:{server.port}"
    client = ClientThread(url, api_key=None, post=seen, pauses=quick_pauses)
    client.start()
    try:
        yield client, seen
    finally:
        await asyncio.to_thread(client.close)


async def begun(chat: Chat, client: ChatClient, **fields: Any) -> Answer:
    """An answer that has begun, and is held where it is until `go_on`."""
    answer = await client.send(ResponseRequest(input="hello", sampling=LONG, **fields))
    async for event in answer:
        if event.delta:
            break
    assert answer.response_id is not None
    chat.service.pause(answer.response_id)
    return answer


async def go_on(chat: Chat, answer: Answer) -> TurnResult:
    assert answer.response_id is not None
    chat.service.resume(answer.response_id)
    return await answer.collect()


async def until_the_end(watch: Watch) -> list[WatchedEvent]:
    """The events of the next answer that ends."""
    events = [await anext(watch)]
    while events[-1].event.type not in ("response.completed", "response.incomplete"):
        events.append(await anext(watch))
    return events


def text_of(events: list[WatchedEvent]) -> str:
    return "".join(watched.event.delta for watched in events)


async def test_a_watch_begins_with_the_running_answer_and_never_has_ones_own(
    tokenizer: Tokenizer,
) -> None:
    async with (
        running(tokenizer) as (chat, server),
        await connected(server) as asks,
        await connected(server) as watches,
    ):
        conversation_id = await asks.create_conversation()
        answer = await begun(chat, asks, conversation=conversation_id)
        own, watch = (
            await asks.subscribe(conversation_id),
            await watches.subscribe(conversation_id),
        )
        result = await go_on(chat, answer)
        events = await until_the_end(watch)
        assert {watched.response_id for watched in events} == {result.response_id}
        assert text_of(events) == result.text
        # The other way round, the one that asked before is the one that watches.
        answer = await begun(chat, watches, previous_response_id=result.response_id)
        second = await go_on(chat, answer)
        events = await until_the_end(own)
        assert {watched.response_id for watched in events} == {second.response_id}
        assert text_of(events) == second.text


async def test_a_conversation_watched_again_has_its_running_answer_whole(
    tokenizer: Tokenizer,
) -> None:
    async with (
        running(tokenizer) as (chat, server),
        await connected(server) as asks,
        await connected(server) as watches,
    ):
        conversation_id = await asks.create_conversation()
        watch = await watches.subscribe(conversation_id)
        answer = await begun(chat, asks, conversation=conversation_id)
        while not (await anext(watch)).event.delta:
            pass
        watch.close()
        again = await watches.subscribe(conversation_id)
        result = await go_on(chat, answer)
        events = await until_the_end(again)
        assert events[0].event.type == "response.created"
        assert text_of(events) == result.text
        again.close()
        # An answer that ended while nobody looked is forgotten.
        await go_on(chat, await begun(chat, asks, conversation=conversation_id))
        await eventually(lambda: not watches._subscriptions[conversation_id]._running)


async def test_a_watch_of_no_conversation_is_refused_and_harms_nothing(
    tokenizer: Tokenizer,
) -> None:
    async with (
        running(tokenizer, max_subscriptions=1) as (_, server),
        await connected(server) as client,
    ):
        with pytest.raises(NotFound, match="conv_missing does not exist"):
            await client.subscribe("conv_missing")
        ids = [await client.create_conversation() for _ in range(2)]
        await client.subscribe(ids[0])
        with pytest.raises(Overloaded, match="views 1 conversations, at most 1"):
            await client.subscribe(ids[1])
        await client.subscribe(ids[0])  # once more is no further one
        assert (await (await client.chat("hi", conversation=ids[1])).collect()).text


async def test_a_watch_ends_with_its_connection(tokenizer: Tokenizer) -> None:
    async with running(tokenizer) as (_, server), await connected(server) as client:
        watch = await client.subscribe(await client.create_conversation())
        client._websocket.transport.abort()
        with pytest.raises(ServerUnavailable):
            await anext(watch)
        with pytest.raises(ServerUnavailable):
            await client.subscribe("conv_any")


async def test_however_many_conversations_one_has_looked_at_the_next_one_can_be_watched(
    tokenizer: Tokenizer,
) -> None:
    async with (
        running(tokenizer) as (chat, server),
        await connected(server) as asks,
        await connected(server) as watches,
    ):
        first = await asks.create_conversation()
        (await watches.subscribe(first)).close()
        kept = await asks.create_conversation()
        kept_watch = await watches.subscribe(kept)
        for _ in range(40):
            (await watches.subscribe(await asks.create_conversation())).close()
        again = await watches.subscribe(first)
        for conversation_id, watch in ((first, again), (kept, kept_watch)):
            result = await go_on(chat, await begun(chat, asks, conversation=conversation_id))
            assert (await until_the_end(watch))[-1].response_id == result.response_id


async def test_a_conversation_that_is_unsubscribed_is_told_of_no_more(
    tokenizer: Tokenizer,
) -> None:
    async with running(tokenizer) as (_, server), await connected(server) as asks:
        conversation_id = await asks.create_conversation()
        async with calling(server) as viewer:
            for kind in ("subscribe", "unsubscribe", "unsubscribe"):
                message = {"type": f"chatrt.conversation.{kind}", "id": conversation_id}
                await viewer.send({**message, "stream_id": "view"})
                reply = await viewer.receive()
                assert reply == {
                    "type": f"chatrt.conversation.{kind}d",
                    "id": conversation_id,
                    "stream_id": "view",
                }
            await (await asks.chat("hi", conversation=conversation_id)).collect()
            await viewer.create("hello", max_output_tokens=1)
            assert all("stream_id" not in frame for frame in await viewer.until())


# On a thread --------------------------------------------------------------------------------------


def cut(client: ClientThread) -> None:
    """Lose the connection, as a network does that fails for a moment."""
    connection = client._client
    assert connection is not None
    client._call(connection._websocket.transport.abort)


def of(kind: type) -> Callable[[ThreadEvent], bool]:
    return lambda event: isinstance(event, kind)


def all_of(seen: Recorder, kind: type) -> list[Any]:
    return [event for event in seen.events if isinstance(event, kind)]


async def test_turns_of_others_are_told_with_their_question_at_the_end(
    tokenizer: Tokenizer,
) -> None:
    async with (
        running(tokenizer) as (chat, server),
        on_a_thread(server) as (client, seen),
        await connected(server) as other,
    ):
        conversation_id = await other.create_conversation()
        first = await (await other.chat("one", conversation=conversation_id)).collect()
        client.watch(conversation_id)
        await seen.wait(of(Watching))
        follow_up = {"previous_response_id": first.response_id}
        result = await go_on(chat, await begun(chat, other, **follow_up))
        done = await seen.wait(of(OtherTurnDone))
        (watching,), (began,) = all_of(seen, Watching), all_of(seen, OtherTurnBegan)
        assert [turn["id"] for turn in watching.turns] == [first.response_id]
        assert began == OtherTurnBegan(conversation_id, result.response_id or "", first.response_id)
        assert "".join(one.text for one in all_of(seen, OtherTurnText)) == result.text
        assert isinstance(done, OtherTurnDone)
        assert done.result.text == result.text
        assert done.result.ttft_ms == done.result.timing["ttft_ms"]
        assert done.conversation_id == conversation_id
        assert done.turns[-1]["input"][0]["content"][0]["text"] == "hello"
        assert done.turns[-1]["previous_response_id"] == first.response_id
        assert seen.threads == {"chatrt-client"}


async def test_a_first_turn_of_others_in_a_branch_of_its_own_is_told_as_such(
    tokenizer: Tokenizer,
) -> None:
    async with (
        running(tokenizer) as (_, server),
        on_a_thread(server) as (client, seen),
        await connected(server) as other,
    ):
        conversation_id = await other.create_conversation()
        await (await other.chat("one", conversation=conversation_id)).collect()
        client.watch(conversation_id)
        await seen.wait(of(Watching))
        for options in ({"new_branch": True}, {}):
            await (await other.chat("x", conversation=conversation_id, chatrt=options)).collect()
        await eventually(lambda: len(all_of(seen, OtherTurnDone)) == 2)
        began = all_of(seen, OtherTurnBegan)
        assert [(one.parent_id, one.begins_branch) for one in began] == [
            (None, True),
            (None, False),
        ]


async def test_a_conversation_is_renamed_over_the_threads_connection(tokenizer: Tokenizer) -> None:
    async with (
        running(tokenizer) as (_, server),
        on_a_thread(server) as (client, _seen),
        await connected(server) as other,
    ):
        conversation_id = await other.create_conversation("old")
        await eventually(lambda: client._client)
        await asyncio.wrap_future(client.rename(conversation_id, "new"))
        assert [one["title"] for one in await other.http.conversations()] == ["new"]
        with pytest.raises(NotFound, match="conv_unknown"):
            await asyncio.wrap_future(client.rename("conv_unknown", "x"))


async def test_without_a_connection_a_new_title_is_refused_at_once() -> None:
    client = ClientThread("ws://127.0.0.1:1", api_key=None, post=Recorder())
    client.start()
    try:
        with pytest.raises(ServerUnavailable, match="no connection"):
            await asyncio.wrap_future(client.rename("conv", "never"))
    finally:
        await asyncio.to_thread(client.close)


async def test_a_conversation_that_is_left_is_told_of_no_more(tokenizer: Tokenizer) -> None:
    async with (
        running(tokenizer) as (_, server),
        on_a_thread(server) as (client, seen),
        await connected(server) as other,
    ):
        left, shown = [await other.create_conversation() for _ in range(2)]
        client.watch(left)
        await seen.wait(of(Watching))
        client.watch(shown)
        await eventually(lambda: len(all_of(seen, Watching)) == 2)
        for conversation_id in (left, shown):
            await (await other.chat("hi", conversation=conversation_id)).collect()
        await seen.wait(of(OtherTurnDone))
        assert [one.conversation_id for one in all_of(seen, OtherTurnBegan)] == [shown]


async def test_an_own_answer_cut_off_is_resumed_before_the_conversation_is_watched_again(
    tokenizer: Tokenizer,
) -> None:
    async with (
        running(tokenizer) as (chat, server),
        on_a_thread(server) as (client, seen),
        await connected(server) as other,
    ):
        conversation_id = await other.create_conversation()
        client.watch(conversation_id)
        await seen.wait(of(Watching))
        client.ask(1, ResponseRequest(input="hi", conversation=conversation_id, sampling=LONG))
        await eventually(lambda: deltas(seen.events))
        (response_id,) = chat.service._answers
        chat.service.pause(response_id)
        cut(client)
        await seen.wait(of(TurnInterrupted))
        await eventually(lambda: len(all_of(seen, Watching)) == 2)
        chat.service.resume(response_id)
        result = await seen.done(1)
        assert result.status == "incomplete"  # at its longest, not stopped
        assert "".join(deltas(seen.events)) == result.text
        assert all_of(seen, OtherTurnBegan) == []


async def test_what_others_asked_during_an_outage_is_among_the_messages_told_behind_it(
    tokenizer: Tokenizer,
) -> None:
    async with (
        running(tokenizer) as (chat, server),
        on_a_thread(server) as (client, seen),
        await connected(server) as other,
    ):
        conversation_id = await other.create_conversation()
        client.watch(conversation_id)
        await seen.wait(of(Watching))
        answer = await begun(chat, other, conversation=conversation_id)
        await seen.wait(of(OtherTurnText))
        cut(client)
        await eventually(lambda: len(all_of(seen, Watching)) == 2)
        await eventually(lambda: len(all_of(seen, OtherTurnBegan)) == 2)  # it runs: all of it again
        cut(client)
        result = await go_on(chat, answer)
        await eventually(lambda: len(all_of(seen, Watching)) == 3)
        # By then it has ended, or its end is told.
        await eventually(lambda: all_of(seen, Watching)[-1].turns or all_of(seen, OtherTurnDone))
        told = all_of(seen, OtherTurnDone) or all_of(seen, Watching)
        assert told[-1].turns[-1]["id"] == result.response_id
