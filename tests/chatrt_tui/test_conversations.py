"""The list of conversations, against the scripted server."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from textual.widgets import Input, OptionList

from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from tests.chatrt_tui.driving import app_at, has_answered, say, screen_text, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest
    from textual.pilot import Pilot

    from chatrt_tui.app import ChatApp


@asynccontextmanager
async def the_list(
    question: str, *, size: tuple[int, int] = (90, 30)
) -> AsyncIterator[tuple[ChatApp, Pilot[None]]]:
    """The list, in which the conversation that began with this question is the only one."""
    async with (
        ScriptedServer([ScriptedAnswer(["x"])]) as server,
        app_at(server.url, size=size) as (app, pilot),
    ):
        await say(pilot, question)
        await until(lambda: has_answered(app, question))
        await pilot.press("ctrl+o")
        await until(lambda: "  1 turn" in screen_text(app))
        yield app, pilot


async def test_a_conversation_is_deleted_at_the_second_press_only() -> None:
    async with the_list("keep me") as (app, pilot):
        await pilot.press("ctrl+d")
        await until(lambda: "This one is open" in screen_text(app))
        await pilot.press("escape", "ctrl+n", "ctrl+o")
        await until(lambda: "keep me  1 turn" in screen_text(app))
        await pilot.press("ctrl+d")
        await until(lambda: "again deletes" in screen_text(app))
        await pilot.press("ctrl+d")
        await until(lambda: "No conversations yet" in screen_text(app))


async def test_a_conversation_is_renamed_in_the_list_and_escape_leaves_the_old_title() -> None:
    async with the_list("old title") as (app, pilot):
        await pilot.press("ctrl+r")
        await until(lambda: "Enter gives it this title" in screen_text(app))
        await pilot.press("x", "escape")
        await until(lambda: "Enter opens" in screen_text(app))
        assert "old title  1 turn" in screen_text(app)
        await pilot.press("ctrl+r", "ctrl+u", "enter")
        await until(lambda: "A title has 1 to 256 characters, this one has 0." in screen_text(app))
        await pilot.press(*"new", "enter")
        await until(lambda: "Renamed to “new”." in screen_text(app))
        await until(lambda: "new  1 turn" in screen_text(app))
        await pilot.press("ctrl+d")
        assert app.screen.query_one(Input).value == ""  # the search is as it was


async def test_a_conversation_is_exported_from_the_list_in_both_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with the_list("keep me") as (app, pilot):
        await pilot.press("ctrl+e")
        await until(lambda: "Written: " in screen_text(app))
        await pilot.press("ctrl+e")
        wanted = {"keep-me.md", "keep-me-2.md", "keep-me.json", "keep-me-2.json"}
        await until(lambda: wanted <= {path.name for path in tmp_path.iterdir()})
        assert "## You\n\nkeep me" in (tmp_path / "keep-me.md").read_text()


async def test_a_long_title_is_cut_with_an_ellipsis_instead_of_leaving_a_word_alone() -> None:
    async with the_list(
        "a question that is much longer than the list is wide, by far", size=(60, 30)
    ) as (app, pilot):
        await until(lambda: "…  1 turn · now · open" in screen_text(app))
        assert app.screen.query_one(OptionList).virtual_size.height == 1
        cut = len(title_shown(screen_text(app)))
        await pilot.resize_terminal(70, 30)
        await until(lambda: len(title_shown(screen_text(app))) > cut)
        assert "…  1 turn · now · open" in screen_text(app)


def title_shown(painted: str) -> str:
    return next((line for line in painted.splitlines() if "1 turn" in line), "").partition("…")[0]


async def test_conversations_are_listed_where_the_folder_one_is_in_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    async with the_list("keep me") as (app, pilot):
        await pilot.press("escape")
        await until(lambda: len(app.screen_stack) == 1)
        assert app.is_running
