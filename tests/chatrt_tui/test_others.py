"""Several clients on one conversation: two terminals, or one and a program, on a real server."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from chatrt_tui.clean import clean_text
from chatrt_tui.status import Banner
from tests.chatrt_tui.driving import answer, prompt_text, say, screen_text, state, until
from tests.chatrt_tui.sharing import (
    a_world,
    ask,
    beside_another,
    conversation_of,
    is_idle,
    is_watching,
    num_notes,
    open_first,
    terminal,
    transcript,
)

if TYPE_CHECKING:
    from chatrt.text.tokenizer import Tokenizer
    from chatrt_tui.app import ChatApp

OTHERS_TURN = "another client is being answered"


async def test_two_terminals_on_one_conversation_show_the_same_transcript(
    tokenizer: Tokenizer,
) -> None:
    async with a_world(tokenizer) as world, terminal(world) as (one, pilot_one):
        await ask(one, pilot_one, "first question")
        async with terminal(world) as (two, pilot_two):
            await open_first(two, pilot_two)
            await until(lambda: transcript(two) == transcript(one))
            for app, pilot, text in (
                (one, pilot_one, "second question"),
                (two, pilot_two, "third question"),
                (one, pilot_one, "fourth question"),
            ):
                await ask(app, pilot, text)
                await until(lambda: transcript(one) == transcript(two) and is_idle(one))
                assert transcript(one)[-2] == text
                await until(lambda: is_idle(two))
            conversation_id = conversation_of(one)
            assert conversation_id == conversation_of(two)
        # Each question followed the one before it, whoever asked.
        items = await one._chat.client.http.items(str(conversation_id))
        asked = [item["content"][0]["text"] for item in items if item["role"] == "user"]
        numbers = ("first", "second", "third", "fourth")
        assert asked == [f"{number} question" for number in numbers]
        assert num_notes(one, "branch") == 0


async def test_while_another_is_answered_enter_waits_with_a_sentence_and_follows_then(
    tokenizer: Tokenizer,
) -> None:
    async with beside_another(tokenizer, "mine") as (world, app, pilot, other):
        answering = await world.begun(other, "theirs", conversation=conversation_of(app))
        await until(lambda: state(app) == OTHERS_TURN)
        await until(lambda: answer(app))
        await until(lambda: "asked by another client" in screen_text(app))
        await say(pilot, "me again")
        await until(lambda: "Another client is being answered here" in screen_text(app))
        await pilot.press("escape")  # it stops what is ours only
        assert prompt_text(app) == "me again"
        result = await world.go_on(answering)
        await until(lambda: is_idle(app))
        assert transcript(app)[2:] == ["theirs", clean_text(result.text)]
        await pilot.press("enter")
        await until(lambda: len(transcript(app)) == 6 and is_idle(app))
        items = await other.http.items(str(conversation_of(app)))
        assert [item["response_id"] for item in items][2] == result.response_id
        assert len(items) == 6


async def test_a_client_that_closes_in_mid_answer_harms_nobody(tokenizer: Tokenizer) -> None:
    async with beside_another(tokenizer, "mine") as (world, app, pilot, other):
        answering = await world.begun(other, "theirs", conversation=conversation_of(app))
        await until(lambda: state(app) == OTHERS_TURN)
        other._websocket.transport.abort()
        await other.wait_lost()
        world.chat.service.resume(str(answering.response_id))
        await until(lambda: is_idle(app))
        response = await app._chat.client.http.response(str(answering.response_id))
        assert response["status"] == "incomplete"  # at its longest, not cancelled
        assert transcript(app)[2] == "theirs"
        await ask(app, pilot, "mine")
        assert num_notes(app, "branch") == 0


async def test_an_outage_while_another_is_answered_loses_and_doubles_nothing(
    tokenizer: Tokenizer,
) -> None:
    async with beside_another(tokenizer, "mine") as (world, app, _, other):
        answering = await world.begun(other, "theirs", conversation=conversation_of(app))
        await until(lambda: state(app) == OTHERS_TURN and answer(app))
        await cut(app)
        await until(lambda: state(app) == OTHERS_TURN and answer(app))  # told anew
        result = await world.go_on(answering)
        await until(lambda: is_idle(app))
        assert transcript(app)[2:] == ["theirs", clean_text(result.text)]
        # One that begins and ends while nobody listens is there once the connection is.
        answering = await world.begun(other, "theirs too", conversation=conversation_of(app))
        await until(lambda: state(app) == OTHERS_TURN and answer(app))
        gone = app._chat.client
        gone._call(gone._client._websocket.transport.abort)  # type: ignore[union-attr]
        result = await world.go_on(answering)
        await until(lambda: transcript(app)[4:] == ["theirs too", clean_text(result.text)])
        await until(lambda: is_idle(app))


async def cut(app: ChatApp) -> None:
    """Lose the connection; returns once the terminal has said so and has another."""
    client = app._chat.client
    lost = client._client
    assert lost is not None
    client._call(lost._websocket.transport.abort)
    await until(lambda: client._client not in (None, lost) and is_watching(app))
    await until(lambda: not app.query_one(Banner).has_class("-shown"))


async def test_another_branch_is_told_once_and_takes_nothing_away(tokenizer: Tokenizer) -> None:
    async with beside_another(tokenizer, "one") as (_, app, pilot, other):
        items = await other.http.items(str(conversation_of(app)))
        await ask(app, pilot, "two")
        await until(lambda: is_watching(app))
        before = transcript(app)
        for text in ("fork", "fork again"):
            fork = await other.chat(text, previous_response_id=items[-1]["response_id"])
            await fork.collect()
        await until(lambda: num_notes(app, "goes on in a branch of its own") == 1)
        assert transcript(app) == before
        await ask(app, pilot, "three")  # goes on with what is shown
        items = await other.http.items(str(conversation_of(app)))
        asked = [item["content"][0]["text"] for item in items if item["role"] == "user"]
        assert asked == ["one", "two", "three"]
        assert num_notes(app, "goes on in a branch of its own") == 1


async def test_two_questions_at_the_same_moment_are_two_branches_and_each_keeps_its_own(
    tokenizer: Tokenizer,
) -> None:
    async with beside_another(tokenizer, "one") as (world, app, pilot, other):
        tip_id = (await other.http.items(str(conversation_of(app))))[-1]["response_id"]
        go_on = threading.Event()
        world.chat.host.post(lambda _: go_on.wait(10))  # no answer ends before both have begun
        await say(pilot, "mine")
        await until(lambda: world.chat.service._answers)
        answering = await other.chat("theirs", previous_response_id=tip_id)
        await until(lambda: num_notes(app, "goes on in a branch of its own") == 1)
        go_on.set()
        theirs = await answering.collect()
        await until(lambda: is_idle(app))
        assert transcript(app)[2] == "mine"
        assert len(transcript(app)) == 4
        assert clean_text(theirs.text) not in transcript(app)


async def test_a_conversation_that_was_left_shows_no_more_of_others(tokenizer: Tokenizer) -> None:
    async with beside_another(tokenizer, "one") as (world, app, pilot, other):
        left = conversation_of(app)
        answering = await world.begun(other, "theirs", conversation=left)
        await until(lambda: state(app) == OTHERS_TURN)
        await pilot.press("ctrl+n")
        await until(lambda: transcript(app) == [] and is_idle(app))
        await ask(app, pilot, "elsewhere")
        assert len(transcript(app)) == 2
        # Back again, while it still runs: all of it is there.
        await pilot.press("ctrl+o")
        await pilot.press(*"one")
        await until(lambda: "one  1 turn" in screen_text(app))
        await until(lambda: "elsewhere  1 turn" not in screen_text(app))
        await pilot.press("enter")
        await until(lambda: conversation_of(app) == left)
        await until(lambda: state(app) == OTHERS_TURN)
        result = await world.go_on(answering)
        await until(lambda: is_idle(app))
        assert transcript(app)[2:] == ["theirs", clean_text(result.text)]
