"""Keys, commands and toasts of the app, against the scripted server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from chatrt_tui.commands import COMMANDS
from chatrt_tui.prompt import Prompt
from tests.chatrt_tui.driving import answer, app_at, idle, say, screen_text, until

if TYPE_CHECKING:
    from chatrt_tui.app import ChatApp

LONG = ScriptedAnswer(["word "] * 1000, delay_s=0.01)


def commands(app: ChatApp) -> set[str]:
    return {command.title for command in app.get_system_commands(app.screen)}


def rows_with(app: ChatApp, text: str) -> list[int]:
    return [row for row, line in enumerate(screen_text(app).splitlines()) if text in line]


async def test_every_action_is_in_the_command_palette() -> None:
    async with (
        ScriptedServer([ScriptedAnswer(["**x**"])]) as server,
        app_at(server.url) as (app, pilot),
    ):
        await say(pilot, "hi")
        await until(lambda: idle(app) and answer(app))
        assert {"New chat", "Conversations", "Details", "Copy answer", "Quit"} <= commands(app)
        shown = {title.partition(":")[0] for title in commands(app)}
        assert {command.title for command in COMMANDS} <= shown
        await say(pilot, "/copy")
        await until(lambda: app.clipboard == "**x**")


async def test_the_palette_offers_stop_only_while_an_answer_runs() -> None:
    async with ScriptedServer([LONG]) as server, app_at(server.url) as (app, pilot):
        assert "Stop" not in commands(app)
        await say(pilot, "hi")
        await until(lambda: answer(app))
        assert "Stop" in commands(app)
        await pilot.press("escape")
        await until(lambda: idle(app))
        assert "Stop" not in commands(app)


async def test_toasts_do_not_stack_nor_cover_the_end_of_the_answer() -> None:
    async with ScriptedServer([LONG]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "hi")
        await until(lambda: answer(app))
        app.query_one(Prompt).insert("more")
        await pilot.press("enter")
        await until(lambda: rows_with(app, "The answer is still coming.") == [2])
        await pilot.press("enter", "enter")
        await pilot.pause(0.3)
        # Before the first toasts would leave by themselves.
        await until(lambda: rows_with(app, "The answer is still coming.") == [2], within_s=2)
        assert max(rows_with(app, "word")) > 10
