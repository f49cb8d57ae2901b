"""An answer as it grows: what is painted first, and that nothing of it is lost or shown twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from textual.widgets import Markdown

from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from chatrt_tui.answer_view import AnswerView, Note
from chatrt_tui.transcript import Transcript
from chatrt_tui.turn_view import UserMessage
from tests.chatrt_tui.driving import app_at, screen_text, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from chatrt_tui.app import ChatApp


@pytest.fixture
async def app() -> AsyncIterator[ChatApp]:
    async with ScriptedServer([ScriptedAnswer()]) as server, app_at(server.url) as (running, _):
        yield running


async def asked(app: ChatApp) -> AnswerView:
    """The answer, empty so far, to a question in the transcript."""
    here = app._chat.conversation
    turn = here.new_turn("why?", here.tree.root)
    return await app.query_one(Transcript).add_turn(turn)


def placeholder(view: AnswerView) -> str | None:
    notes = view.query(Note)
    return str(notes.first().render()) if notes else None


async def test_the_first_text_is_painted_before_markdown_is_made_of_it(app: ChatApp) -> None:
    view = await asked(app)
    await view.append("Because it")
    assert (placeholder(view), len(view.query(Markdown))) == ("Because it", 0)
    await view.append(" is **so**.")
    assert view.text == "Because it is **so**."
    await until(lambda: "Because it is so." in screen_text(app))
    assert placeholder(view) is None
    assert screen_text(app).count("Because") == 1


@pytest.mark.parametrize(
    "text", ["# Heading", "- one", "2. two", "a *b*", "`x`", "two\nlines", "a | b", "&amp;", " "]
)
async def test_text_that_markdown_changes_is_not_painted_as_it_is(app: ChatApp, text: str) -> None:
    view = await asked(app)
    await view.append(text)
    assert placeholder(view) in (None, "…")
    await view.append(" and more")
    await until(lambda: "and more" in screen_text(app))
    assert view.text == text + " and more"


async def test_an_answer_that_ends_at_once_is_whole(app: ChatApp) -> None:
    view = await asked(app)
    await view.append("Yes")
    await view.finish_old(stopped=False)
    await until(lambda: view.query(Markdown) and placeholder(view) is None)
    await until(lambda: screen_text(app).count("Yes") == 1)
    assert view.text == "Yes"


async def test_a_question_and_its_answer_come_in_this_order(app: ChatApp) -> None:
    view = await asked(app)
    assert app.query_one(Transcript).views == [view]
    question, answer = view.children
    assert isinstance(question, UserMessage)
    assert answer is view.query_one(Note)
    assert placeholder(view) == "…"
