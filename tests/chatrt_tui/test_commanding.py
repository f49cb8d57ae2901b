"""Commands, settings, details, help and files of the terminal, against the scripted server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec
from textual.widgets import Input, Select, TextArea

from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from chatrt_tui.details import Details
from chatrt_tui.help import HelpScreen
from chatrt_tui.hints import CommandHints
from chatrt_tui.prompt import Prompt
from chatrt_tui.settings_form import SettingsScreen
from tests.chatrt_tui.driving import (
    answer,
    app_at,
    figures,
    idle,
    prompt_text,
    say,
    screen_text,
    until,
)

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from textual.pilot import Pilot

    from chatrt_tui.app import ChatApp


def saying(app: ChatApp) -> str:
    return str(app.query_one(Prompt).border_subtitle or "")


async def asked(app: ChatApp, pilot: Pilot[None], text: str) -> None:
    before = len(app._chat.conversation.tree)
    await say(pilot, text)
    await until(lambda: len(app._chat.conversation.tree) > before and idle(app))


async def test_an_unknown_command_is_told_and_its_text_stays() -> None:
    async with ScriptedServer([ScriptedAnswer()]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "/etc/hosts is what?")
        await until(lambda: "There is no command /etc/hosts." in screen_text(app))
        assert prompt_text(app) == "/etc/hosts is what?"
        assert server.creates() == []
        app.query_one(Prompt).show("")
        await asked(app, pilot, "//etc/hosts is what?")
        assert [create["input"] for create in server.creates()] == ["/etc/hosts is what?"]


async def test_a_slash_lists_commands_and_tab_completes_them() -> None:
    async with ScriptedServer([ScriptedAnswer()]) as server, app_at(server.url) as (app, pilot):
        hints = app.query_one(CommandHints)
        assert not hints.display
        await pilot.press("/")
        await until(lambda: "/help" in screen_text(app) and "Tab completes" in screen_text(app))
        await pilot.press("s", "y")
        await until(lambda: "/system [TEXT]  Tell the model" in screen_text(app))
        await until(lambda: "/help" not in screen_text(app))
        await pilot.press("tab")
        await until(lambda: prompt_text(app) == "/system ")
        assert not hints.display


async def test_settings_by_command_go_with_the_next_turn_and_stand_below_the_prompt() -> None:
    async with ScriptedServer([ScriptedAnswer()]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "/temp 0.2")
        await until(lambda: saying(app) == "temperature 0.2")
        await say(pilot, "/temp 7")
        await until(lambda: "temperature is 7.0, it must be in" in screen_text(app))
        assert prompt_text(app) == "/temp 7"
        app.query_one(Prompt).show("")
        await asked(app, pilot, "hi")
        assert server.creates()[0]["temperature"] == 0.2
        await say(pilot, "/model gpt")
        await until(lambda: "gpt is not served here, but scripted" in screen_text(app))


async def test_a_system_prompt_is_said_once_and_again_where_a_branch_begins() -> None:
    async with ScriptedServer([ScriptedAnswer()]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "/system Be brief.")
        await until(lambda: saying(app) == "system prompt")
        for text in ("one", "two"):
            await asked(app, pilot, text)
        await until(lambda: "System: Be brief." in screen_text(app))
        first, second = server.creates()
        said = {"type": "message", "role": "system", "content": "Be brief."}
        assert first["input"] == [said, {"type": "message", "role": "user", "content": "one"}]
        assert second["input"] == "two"
        await say(pilot, "/undo")
        await say(pilot, "/undo")
        await asked(app, pilot, "anew")
        assert server.creates()[2]["input"][0] == said
        await say(pilot, "/system Be long.")
        await asked(app, pilot, "more")
        assert server.creates()[3]["input"][0]["content"] == "Be long."


async def test_the_form_says_at_the_field_what_is_wrong_and_applies_what_is_right() -> None:
    async with (
        ScriptedServer([ScriptedAnswer()]) as server,
        app_at(server.url, size=(80, 24)) as (app, pilot),
    ):
        await say(pilot, "/settings")
        await until(lambda: isinstance(app.screen, SettingsScreen))
        await until(lambda: app.screen.focused and app.screen.focused.id == "temperature")
        await pilot.press("3", "enter")
        await until(lambda: "it must be in [0.0, 2.0]" in screen_text(app))
        assert isinstance(app.screen, SettingsScreen)
        await pilot.press("backspace", "1", "tab", "tab", "x")
        await until(lambda: "'x' is not a whole number" in screen_text(app))
        await pilot.press("ctrl+s")
        assert isinstance(app.screen, SettingsScreen)
        await pilot.press("backspace", *"40")
        app.screen.query_one("#system", TextArea).text = "Be kind."
        await pilot.click("Checkbox")
        await pilot.press("ctrl+s")
        told = "temperature 1 · top-k 40 · system prompt · no drafts"
        await until(lambda: saying(app) == told)
        await asked(app, pilot, "hi")
        (create,) = server.creates()
        assert create["temperature"] == 1.0
        assert create["chatrt"] == {"top_k": 40, "speculation": {"enabled": False}}
        assert "model" not in create
        await say(pilot, "/settings")
        await until(lambda: isinstance(app.screen, SettingsScreen))
        await until(lambda: app.screen.query("#top_k"))
        assert app.screen.query_one("#top_k", Input).value == "40"
        system = app.screen.query_one("#system", TextArea)
        assert system.cursor_location == system.document.end == (0, len("Be kind."))
        assert app.screen.query_one("#model", Select).value == "scripted"
        await pilot.press("backspace", "escape")
        await until(lambda: not isinstance(app.screen, SettingsScreen))
        assert saying(app) == told


async def test_details_follow_the_selected_turn_beside_the_transcript_or_below_it() -> None:
    def measured(message: dict[str, Any]) -> ScriptedAnswer:
        kv = {"reused_tokens": 10 * len(message["input"]), "resident_pages": 3}
        speculation = {"drafter": "head", "drafted": 4, "accepted": 3, "depths": [0, 4]}
        speculation["accepted_per_position"] = [3]
        return ScriptedAnswer(["x"], timing={"kv": kv, "speculation": speculation})

    async with (
        ScriptedServer(measured) as server,
        app_at(server.url, size=(120, 40)) as (app, pilot),
    ):
        await asked(app, pilot, "a")
        await asked(app, pilot, "abc")
        await say(pilot, "/stats")
        await until(lambda: "Turn 2 of 2" in screen_text(app))
        await until(lambda: "30 cached" in screen_text(app))
        await until(lambda: "75 % of 4" in screen_text(app))
        await until(lambda: "TTFT by turn" in screen_text(app))
        beside = app.query_one(Details).region
        assert beside.x > 60
        await pilot.press("ctrl+up", "ctrl+up")
        await until(lambda: "Turn 1 of 2" in screen_text(app) and "10 cached" in screen_text(app))
        await pilot.resize_terminal(80, 24)
        await until(lambda: app.query_one(Details).region.x == 0)
        await until(lambda: "10 cached" in screen_text(app))
        await pilot.press("ctrl+t")
        await until(lambda: "10 cached" not in screen_text(app))


async def test_details_of_a_conversation_of_before_come_from_the_server() -> None:
    timing = {"ttft_ms": 12.5, "kv": {"reused_tokens": 17}}
    async with (
        ScriptedServer([ScriptedAnswer(["x"], timing=timing)]) as server,
        app_at(server.url) as (app, pilot),
    ):
        await asked(app, pilot, "first")
        await pilot.press("ctrl+n", "ctrl+t")
        await until(lambda: "There is no turn yet." in screen_text(app))
        await pilot.press("ctrl+o")
        await until(lambda: "first  1 turn" in screen_text(app))
        await pilot.press("enter")
        await until(lambda: "17 cached" in screen_text(app) and "TTFT 12 ms" in screen_text(app))
        await until(lambda: figures(app).startswith("TTFT 12 ms"))


async def test_the_help_lists_keys_and_all_commands() -> None:
    async with (
        ScriptedServer([ScriptedAnswer()]) as server,
        app_at(server.url, size=(80, 70)) as (app, pilot),
    ):
        await pilot.press("f1")
        await until(lambda: isinstance(app.screen, HelpScreen))
        await until(lambda: "/quit" in screen_text(app))
        await until(lambda: "Ctrl+J, Alt+Enter new line" in screen_text(app))
        await until(lambda: "/branch [next|previous|NUMBER]" in screen_text(app))
        await pilot.press("escape")
        await until(lambda: not isinstance(app.screen, HelpScreen))
        await say(pilot, "/help")
        await until(lambda: isinstance(app.screen, HelpScreen))


async def test_the_keys_fit_into_80_columns() -> None:
    async with (
        ScriptedServer([ScriptedAnswer(["word "] * 500, delay_s=0.01)]) as server,
        app_at(server.url, size=(80, 24)) as (app, pilot),
    ):
        await say(pilot, "hi")
        await until(lambda: "esc Stop" in screen_text(app))
        footer = screen_text(app).splitlines()[-1]
        for key in ("esc Stop", "^↑ Turns", "^n New", "^o Chats", "^t Details", "f1 Help"):
            assert key in footer
        assert "^p palette" in footer


async def test_a_conversation_is_exported_and_nothing_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with ScriptedServer([ScriptedAnswer()]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "/export")
        await until(lambda: "there is no turn yet" in screen_text(app))
        await asked(app, pilot, "What now?")
        await say(pilot, "/regen")
        await until(lambda: len(app._chat.conversation.tree) == 2 and idle(app))
        await say(pilot, "/export")
        await until(lambda: (tmp_path / "what-now.md").exists())
        assert "## You\n\nWhat now?" in (tmp_path / "what-now.md").read_text()
        await say(pilot, "/export json")
        json = tmp_path / "what-now.json"
        await until(lambda: json.exists() and json.read_bytes().endswith(b"}\n"))
        await until(lambda: "Written:" in screen_text(app))
        document = msgspec.json.decode(json.read_bytes())
        assert len(document["turns"]) == 2
        await say(pilot, "/export what-now.md")
        await until(lambda: (tmp_path / "what-now-2.md").exists())
        await say(pilot, "/export notes.txt")
        await until(lambda: "notes.txt should end in .md or .json" in screen_text(app))
        assert prompt_text(app) == "/export notes.txt"


async def test_a_conversation_gets_another_title() -> None:
    async with ScriptedServer([ScriptedAnswer()]) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "first")
        await say(pilot, "/title A better one")
        await until(lambda: "The title is “A better one” now." in screen_text(app))
        await say(pilot, "/title")
        await until(lambda: prompt_text(app) == "/title A better one")
        await pilot.press("ctrl+o")
        await until(lambda: "A better one  1 turn" in screen_text(app))


async def test_a_theme_is_remembered_the_next_time(tmp_path: Path) -> None:
    state_file = tmp_path / "state" / "terminal.json"
    async with ScriptedServer([ScriptedAnswer()]) as server:
        async with app_at(server.url, state_file=state_file) as (app, pilot):
            before = app.theme
            await say(pilot, "/theme nord")
            await until(lambda: app.theme == "nord")
            await say(pilot, "/theme pink")
            await until(lambda: "pink is none of" in screen_text(app))
        async with app_at(server.url, state_file=state_file) as (app, _):
            assert app.theme == "nord"
        state_file.write_bytes(b"not json")
        async with app_at(server.url, state_file=state_file) as (app, _):
            assert app.theme == before


async def test_typing_ahead_is_turned_off_and_on_by_command() -> None:
    async with ScriptedServer([ScriptedAnswer()]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "/typing on")
        await until(lambda: app._chat.typing_ahead)
        await say(pilot, "/typing")
        await until(lambda: not app._chat.typing_ahead)
        await say(pilot, "/typing maybe")
        await until(lambda: "maybe is neither on nor off" in screen_text(app))


async def test_without_an_editor_a_sentence_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    assert "EDITOR" not in os.environ
    async with ScriptedServer([ScriptedAnswer()]) as server, app_at(server.url) as (app, pilot):
        app.query_one(Prompt).insert("half")
        await pilot.press("ctrl+g")
        await until(lambda: "set $VISUAL or $EDITOR" in screen_text(app))
        assert prompt_text(app) == "half"


async def test_quit_leaves() -> None:
    async with ScriptedServer([ScriptedAnswer()]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "/quit")
        await until(lambda: not app.is_running)


async def test_a_thought_is_open_while_it_comes_and_closed_behind_it() -> None:
    pieces = ["<thi", "nk>\nLet me ", "see.\n", "</think>\n\n", "It is **Paris**."]
    async with (
        ScriptedServer([ScriptedAnswer(pieces, delay_s=0.3)]) as server,
        app_at(server.url) as (app, pilot),
    ):
        await say(pilot, "why?")
        await until(lambda: "Thinking …" in screen_text(app) and "see." in screen_text(app))
        await until(lambda: "It is Paris." in screen_text(app) and idle(app))
        await until(lambda: "Thought for 3 words" in screen_text(app))
        await until(lambda: "Let me see." not in screen_text(app))
        await until(lambda: "think>" not in screen_text(app))
        assert answer(app).startswith("<think>")
        await pilot.press("ctrl+up", "t")
        await until(lambda: "Let me see." in screen_text(app))
