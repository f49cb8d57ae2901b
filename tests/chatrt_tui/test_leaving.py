"""Answers that go on while one looks at another conversation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from tests.chatrt.typing_support import ReadingServer
from tests.chatrt_tui.driving import (
    answer,
    app_at,
    has_answered,
    idle,
    prompt_text,
    say,
    screen_text,
    state,
    until,
)

if TYPE_CHECKING:
    from chatrt_tui.app import ChatApp

PIECES = [f"{number} " for number in range(40)]


def toast(app: ChatApp) -> str:
    """What a toast says, without its frame."""
    return " ".join(screen_text(app).replace("▌", " ").split())


async def test_an_answer_goes_on_while_one_chats_elsewhere_and_is_whole_when_one_is_back() -> None:
    go_on = asyncio.Event()
    slow = ScriptedAnswer(PIECES, holds_at=10, go_on=go_on)
    replies = [slow, ScriptedAnswer(["quick"]), ScriptedAnswer(["more"])]
    async with ScriptedServer(replies) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "count")
        await until(lambda: answer(app) == "".join(PIECES[:10]))
        await pilot.press("ctrl+n")
        await until(lambda: "“count” is answered meanwhile." in screen_text(app))
        await say(pilot, "other")
        await until(lambda: has_answered(app, "other"))
        await pilot.press("ctrl+o")
        await until(lambda: "· answering" in screen_text(app))
        await pilot.press(*"count")
        await until(lambda: "other  1 turn" not in screen_text(app))
        await pilot.press("enter")
        await until(lambda: state(app) == "answering · Esc stops")
        await until(lambda: answer(app) == "".join(PIECES[:10]))
        await say(pilot, "and now?")  # it has to wait, as ever
        await until(lambda: "The answer is still coming" in screen_text(app))
        go_on.set()
        await until(lambda: answer(app) == "".join(PIECES) and idle(app))
        assert prompt_text(app) == "and now?"
        await pilot.press("enter")
        await until(lambda: has_answered(app, "and now?"))
        first, _ = app._chat.conversation.tree.path
        assert first.answer == "".join(PIECES)
        assert server.creates()[-1]["previous_response_id"] == first.id
        assert not [m for m in server.requests if m["type"] == "response.cancel"]


async def test_an_answer_that_ends_while_one_is_away_is_told_and_kept() -> None:
    go_on = asyncio.Event()
    slow = ScriptedAnswer(PIECES, holds_at=10, go_on=go_on)
    async with ScriptedServer([slow]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "count")
        await until(lambda: answer(app) == "".join(PIECES[:10]))
        await pilot.press("ctrl+n")
        go_on.set()
        await until(lambda: "“count” has its answer." in screen_text(app))
        assert idle(app)
        assert answer(app) == ""
        await pilot.press("ctrl+o")
        await until(lambda: "count  1 turn" in screen_text(app))
        await pilot.press("enter")
        await until(lambda: answer(app) == "".join(PIECES) and idle(app))


async def test_an_answer_one_has_come_back_to_is_stopped_by_escape() -> None:
    slow = ScriptedAnswer(["word "] * 2000, delay_s=0.01)
    async with ScriptedServer([slow]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "long")
        await until(lambda: answer(app).startswith("word word"))
        await pilot.press("ctrl+n")
        await until(lambda: idle(app))
        await pilot.press("ctrl+o")
        await until(lambda: "· answering" in screen_text(app))
        await pilot.press("enter")
        await until(lambda: state(app) == "answering · Esc stops")
        length = len(answer(app))
        await until(lambda: len(answer(app)) > length)
        await pilot.press("escape")
        await until(lambda: idle(app) and "stopped" in screen_text(app))
        assert set(answer(app).split()) == {"word"}


async def test_a_question_lost_while_one_was_away_is_told_and_can_be_recalled() -> None:
    go_on = asyncio.Event()
    slow = ScriptedAnswer(PIECES, holds_at=10, go_on=go_on, drop_after=12, forgets=True)
    async with ReadingServer([slow]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "count")
        await until(lambda: answer(app) == "".join(PIECES[:10]))
        await pilot.press("ctrl+n")
        go_on.set()
        await until(lambda: "no part of the conversation" in toast(app))
        await until(lambda: idle(app))
        await pilot.press("up")
        assert prompt_text(app) == "count"
