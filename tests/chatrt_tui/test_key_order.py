"""Keys that arrive at once, as a fast typist or a slow line sends them, act in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from textual import events

from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from chatrt_tui.prompt import Prompt
from chatrt_tui.transcript import Transcript
from tests.chatrt_tui.driving import app_at, has_answered, prompt_text, say, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from textual.pilot import Pilot

    from chatrt_tui.app import ChatApp


def burst(app: ChatApp, *keys: str) -> None:
    """Have all of these in the app's queue before it looks at the first."""
    for key in keys:
        app.post_message(events.Key(key, key if len(key) == 1 else None))


def questions(app: ChatApp) -> list[str]:
    return [view.turn.question for view in app.query_one(Transcript).views]


def selected(app: ChatApp) -> str | None:
    return None if app._chat.selected is None else app._chat.selected.turn.question


def numbered(message: dict[str, Any]) -> ScriptedAnswer:
    asked = message["input"]
    return ScriptedAnswer([f"to {asked if isinstance(asked, str) else asked[-1]['content']}"])


@pytest.fixture
async def three_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[ChatApp, Pilot[None], ScriptedServer]]:
    """Three turns that were answered; the last but one is selected."""
    monkeypatch.chdir(tmp_path)  # what is exported goes there
    async with ScriptedServer(numbered) as server, app_at(server.url) as (app, pilot):
        for text in ("one", "two", "three"):
            await say(pilot, text)
            await until(lambda question=text: has_answered(app, question))  # type: ignore[misc]
        await pilot.press("ctrl+up", "ctrl+up")
        await until(
            lambda: (view := app._chat.selected) is not None and view.turn.question == "two"
        )
        yield app, pilot, server


async def test_letters_right_behind_the_escape_of_a_selected_turn_regenerate_nothing(
    three_turns: tuple[ChatApp, Pilot[None], ScriptedServer],
) -> None:
    app, pilot, server = three_turns
    burst(app, "escape", *"referee")
    await until(lambda: prompt_text(app) == "referee")
    await pilot.pause()
    assert len(server.creates()) == 3
    assert app.focused is app.query_one(Prompt)
    assert not app._chat.editing


async def test_a_word_typed_on_a_selected_turn_is_in_the_prompt_as_it_was_typed(
    three_turns: tuple[ChatApp, Pilot[None], ScriptedServer],
) -> None:
    app, pilot, server = three_turns
    burst(app, *"why refer", "left", "x")
    await until(lambda: prompt_text(app) == "why refexr")
    await pilot.pause()
    assert len(server.creates()) == 3


async def test_what_is_pasted_on_a_selected_turn_is_in_the_prompt(
    three_turns: tuple[ChatApp, Pilot[None], ScriptedServer],
) -> None:
    app, _, _ = three_turns
    app.post_message(events.Paste("e r f\rpasted\r\n\x1b]0;title\x07\x9b31m"))
    burst(app, "!")
    await until(lambda: prompt_text(app) == "e r f\npasted\n!")


async def test_letters_right_behind_e_are_added_to_the_question_and_not_to_the_draft(
    three_turns: tuple[ChatApp, Pilot[None], ScriptedServer],
) -> None:
    app, pilot, _ = three_turns
    app.query_one(Prompt).show("draft")
    burst(app, "e", *"?r", "enter")
    await until(lambda: has_answered(app, "two?r"))
    await until(lambda: prompt_text(app) == "draft")
    await pilot.pause()
    assert questions(app) == ["one", "two?r"]


async def test_moves_between_branches_pressed_at_once_are_all_made(
    three_turns: tuple[ChatApp, Pilot[None], ScriptedServer],
) -> None:
    app, _, server = three_turns
    for letter, question in (("b", "twob"), ("c", "twobc")):
        burst(app, "e", letter, "enter")
        await until(lambda asked=question: has_answered(app, asked))  # type: ignore[misc]
        burst(app, "ctrl+up")
        await until(lambda: app._chat.selected is not None)
    # from twobc: to twob, to two, which is edited
    burst(app, "left", "left", "e", "z")
    await until(lambda: prompt_text(app) == "twoz")
    assert questions(app) == ["one", "two", "three"]
    assert len(server.creates()) == 5


async def test_what_is_typed_right_behind_r_waits_for_the_answer_in_the_prompt(
    three_turns: tuple[ChatApp, Pilot[None], ScriptedServer],
) -> None:
    app, _, server = three_turns
    burst(app, "r", *"refine")
    await until(lambda: len(server.creates()) == 4 and has_answered(app, "two"))
    await until(lambda: prompt_text(app) == "refine")
    assert questions(app) == ["one", "two"]


@pytest.mark.parametrize(
    ("opening", "keys"),
    [
        ("ctrl+o", ("enter", "enter")),
        ("ctrl+o", ("enter", "escape")),
        ("f1", ("escape", "escape")),
        ("/settings", ("enter", "enter")),
        ("/settings", ("escape", "escape")),
        ("/theme", ("enter", "enter")),
        ("ctrl+p", ("enter", "enter")),
    ],
)
async def test_a_screen_left_by_two_keys_at_once_is_left_once(
    three_turns: tuple[ChatApp, Pilot[None], ScriptedServer], opening: str, keys: tuple[str, str]
) -> None:
    app, pilot, _ = three_turns
    await pilot.press("escape")
    await (say(pilot, opening) if opening.startswith("/") else pilot.press(opening))
    await until(lambda: len(app.screen_stack) == 2)
    app.query_one(Prompt).show("half typed")
    await pilot.pause(0.1)
    burst(app, *keys)
    await until(lambda: len(app.screen_stack) == 1)
    await pilot.pause()
    assert app.is_running
    if keys == ("escape", "escape"):
        assert prompt_text(app) == "half typed"


@pytest.mark.parametrize("keys", ["x", "", "ctrl+e", "ctrl+r"])
async def test_the_list_of_conversations_left_while_it_works_harms_nothing(
    three_turns: tuple[ChatApp, Pilot[None], ScriptedServer], keys: str
) -> None:
    app, pilot, _ = three_turns
    await pilot.press("escape")
    for _ in range(8):
        await pilot.press("ctrl+o")
        await until(lambda: len(app.screen_stack) == 2)
        burst(app, *filter(None, [keys]), "escape", "escape")
        await until(lambda: len(app.screen_stack) == 1)
    await pilot.pause(0.2)
    assert app.is_running
    await pilot.press(*"still")
    await until(lambda: prompt_text(app) == "still")
