"""Typing ahead in the terminal: what leaves before Enter, and that Enter waits for none of it."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from textual import events

from chatrt.client.typist import PAUSE_S
from chatrt.testing.scripted_server import ScriptedAnswer
from chatrt_tui.prompt import Prompt
from tests.chatrt.typing_support import ReadingServer
from tests.chatrt_tui.driving import (
    TIME_SCALE,
    answer,
    app_at,
    idle,
    prompt_text,
    say,
    screen_text,
    until,
)

LONG = ScriptedAnswer(["word "] * 1000, delay_s=0.05)


def has_typed(server: ReadingServer, number: int) -> bool:
    return len(server.partials()) == number


def has_asked(server: ReadingServer, number: int) -> bool:
    return len(server.creates()) == number


async def test_what_is_typed_goes_ahead_of_a_new_conversation_and_makes_none() -> None:
    async with (
        ReadingServer([ScriptedAnswer(["hi"])]) as server,
        app_at(server.url, typing_ahead=True) as (app, pilot),
    ):
        app.query_one(Prompt).insert("hel")  # in one go: no pause within it
        await until(lambda: server.typed() == ["hel"])
        (half,) = server.partials()
        assert "conversation" not in half
        assert "previous_response_id" not in half
        assert all(m["type"] != "chatrt.conversation.create" for m in server.requests)
        await pilot.press("l", "o", "enter")
        await until(lambda: idle(app) and answer(app) == "hi")
        (question,) = server.creates()
        assert question["conversation"] == "conv_1"
        assert question["stream_id"] == half["stream_id"]
        assert "hel\n" not in screen_text(app)


async def test_a_follow_up_is_typed_ahead_of_the_same_parent_as_it_is_asked_of() -> None:
    async with (
        ReadingServer([ScriptedAnswer(["hi"])]) as server,
        app_at(server.url, typing_ahead=True) as (app, pilot),
    ):
        await say(pilot, "one")
        await until(lambda: idle(app) and answer(app) == "hi")
        await pilot.press(*"two")
        await until(lambda: "two" in server.typed())
        await pilot.press("enter")
        await until(lambda: len(server.creates()) == 2)
        half, question = server.partials()[-1], server.creates()[-1]
    same = ("previous_response_id", "model", "truncation", "stream_id", "input")
    assert [half.get(name) for name in same] == [question.get(name) for name in same]
    assert question["previous_response_id"] == "resp_2"


async def test_while_an_answer_runs_nothing_goes_ahead_and_behind_it_what_was_typed() -> None:
    async with (
        ReadingServer([LONG]) as server,
        app_at(server.url, typing_ahead=True) as (app, pilot),
    ):
        await say(pilot, "go")
        await until(lambda: answer(app))
        await pilot.press(*"next")
        await pilot.pause(3 * PAUSE_S)
        assert server.typed() == []
        await pilot.press("escape")
        await until(lambda: server.typed() == ["next"])
        assert server.partials()[0]["previous_response_id"] == "resp_2"
        assert prompt_text(app) == "next"


async def test_enter_is_sent_at_once_though_the_server_is_busy_with_what_was_typed() -> None:
    async with (
        ReadingServer([ScriptedAnswer(["hi"])]) as server,
        app_at(server.url, typing_ahead=True) as (app, pilot),
    ):
        await say(pilot, "0")
        await until(lambda: idle(app) and answer(app) == "hi")
        server.goes_on.clear()
        waits_s = []
        for number in range(1, 6):
            app.query_one(Prompt).insert(f"{number}")
            await until(partial(has_typed, server, number))
            app.query_one(Prompt).insert(" and more")  # waits for the first to be done with
            start_s = time.perf_counter()
            app.post_message(events.Key("enter", "\r"))
            await until(partial(has_asked, server, number + 1), pause_s=0.001)
            waits_s.append(time.perf_counter() - start_s)
            await until(lambda: idle(app))
        # Pauses of the machine itself aside.
        assert sorted(waits_s)[1] < 0.03 * TIME_SCALE
        await pilot.pause(2 * PAUSE_S)
        assert server.typed() == [
            f"{number}" for number in range(1, 6)
        ]  # none follows its question
        assert server.creates()[-1]["input"] == "5 and more"
        server.goes_on.set()


async def test_nothing_goes_ahead_of_blanks_and_commands() -> None:
    async with (
        ReadingServer([ScriptedAnswer(["hi"])]) as server,
        app_at(server.url, typing_ahead=True) as (app, pilot),
    ):
        await pilot.press("space", "space")
        await pilot.pause(2 * PAUSE_S)
        app.query_one(Prompt).text = "/help me"
        await pilot.pause(2 * PAUSE_S)
        app.query_one(Prompt).text = "gone at once"
        app.query_one(Prompt).text = ""
        await pilot.pause(2 * PAUSE_S)
        assert server.requests == []


async def test_the_palette_turns_typing_ahead_off_and_on_for_the_session() -> None:
    async with (
        ReadingServer([ScriptedAnswer(["hi"])]) as server,
        app_at(server.url, typing_ahead=True) as (app, pilot),
    ):
        commands = {c.title: c.callback for c in app.get_system_commands(app.screen)}
        commands["Typing ahead: turn off"]()
        await until(lambda: "nothing is sent before Enter" in screen_text(app))
        app.query_one(Prompt).insert("hi")  # in one go: no pause within it
        await pilot.pause(3 * PAUSE_S)
        assert server.requests == []
        commands = {c.title: c.callback for c in app.get_system_commands(app.screen)}
        commands["Typing ahead: turn on"]()
        await until(lambda: server.typed() == ["hi"])


async def test_a_refused_partial_shows_nowhere_and_the_question_is_answered() -> None:
    async with (
        ReadingServer([ScriptedAnswer(["hi"])]) as server,
        app_at(server.url, typing_ahead=True) as (app, pilot),
    ):
        server.refuses = {"code": "context_length_exceeded", "message": "9 do not fit in 8"}
        await pilot.press(*"hello")
        await until(lambda: server.typed())
        await pilot.pause(PAUSE_S)
        assert "9 do not fit" not in screen_text(app)
        await pilot.press("enter")
        await until(lambda: idle(app) and answer(app) == "hi")


async def test_what_was_typed_while_the_server_was_away_goes_ahead_once_it_is_back() -> None:
    async with (
        ReadingServer([ScriptedAnswer(["hi"])]) as server,
        app_at(server.url, typing_ahead=True) as (app, _),
    ):
        await server.stop()
        await until(lambda: "trying again" in screen_text(app))
        app.query_one(Prompt).insert("hello")  # in one go: no pause within it
        await asyncio.sleep(2 * PAUSE_S)
        await server.start()
        await until(lambda: server.typed() == ["hello"])


async def test_a_draft_goes_ahead_of_the_conversation_that_is_shown_now() -> None:
    async with (
        ReadingServer([ScriptedAnswer(["hi"])]) as server,
        app_at(server.url, typing_ahead=True) as (app, pilot),
    ):
        await say(pilot, "one")
        await until(lambda: idle(app) and answer(app) == "hi")
        app.query_one(Prompt).insert("next")  # in one go: no pause within it
        await until(lambda: server.typed() == ["next"])
        await pilot.press("ctrl+n")
        await until(lambda: server.typed() == ["next", "next"])
        first, second = server.partials()
        assert first["previous_response_id"] == "resp_2"
        assert "previous_response_id" not in second
