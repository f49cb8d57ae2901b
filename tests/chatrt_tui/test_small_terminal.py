"""What a small terminal still shows: whole sentences, the prompt, a turn's branch, all details."""

from __future__ import annotations

import pytest

from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from chatrt_tui.details import Details
from chatrt_tui.prompt import Prompt
from chatrt_tui.status import StatusLine
from chatrt_tui.transcript import Transcript
from tests.chatrt_tui.driving import app_at, has_answered, prompt_text, say, screen_text, until

TIMING = {
    "ttft_ms": 12.5,
    "decode_tps": 243.0,
    "kv": {"reused_tokens": 17, "resident_pages": 3},
    "speculation": {
        "drafter": "head",
        "drafted": 40,
        "accepted": 30,
        "mean_accepted_length": 2.9,
        "accepted_per_position": [9, 7, 5, 4, 3, 2],
        "depths": [0, 0, 0, 0, 0, 0, 10],
    },
}
USAGE = {
    "input_tokens": 100,
    "total_tokens": 812,
    "input_tokens_details": {"cached_tokens": 96},
}


@pytest.mark.parametrize("width", [60, 80])
async def test_a_toast_shows_its_sentence_to_the_end(width: int) -> None:
    async with (
        ScriptedServer([ScriptedAnswer()]) as server,
        app_at(server.url, size=(width, 24)) as (app, _),
    ):
        for length in range(width // 2, width):
            app.notify("x" * 10 + " y" * ((length - 12) // 2) + " end", markup=False)
            await until(lambda: " end" in screen_text(app))
            app.clear_notifications()
            await until(lambda: " end" not in screen_text(app))


async def test_half_typed_commands_are_listed_without_hiding_what_one_types() -> None:
    async with (
        ScriptedServer([ScriptedAnswer()]) as server,
        app_at(server.url, size=(40, 12)) as (app, pilot),
    ):
        await pilot.press("/")
        await until(lambda: "/help" in screen_text(app))
        prompt = app.query_one(Prompt).region
        assert prompt.height == 3
        assert prompt.bottom <= 12
        assert "│ /" in screen_text(app)


async def test_details_scroll_by_keyboard() -> None:
    async with (
        ScriptedServer([ScriptedAnswer(["x"], timing=TIMING, usage=USAGE)]) as server,
        app_at(server.url, size=(80, 24)) as (app, pilot),
    ):
        await say(pilot, "one")
        await until(lambda: has_answered(app, "one"))
        await pilot.resize_terminal(40, 14)
        await pilot.press("ctrl+t")
        details = app.query_one(Details)
        await until(lambda: details.max_scroll_y > 0)
        while details.scroll_y < details.max_scroll_y:
            before = details.scroll_y
            await pilot.press("alt+down")
            await until(lambda y=before: details.scroll_y > y)  # type: ignore[misc]
        await pilot.press("alt+up")
        await until(lambda: details.scroll_y < details.max_scroll_y)
        assert prompt_text(app) == ""


async def test_a_models_name_of_which_two_letters_would_be_left_is_not_shown() -> None:
    async with (
        ScriptedServer([ScriptedAnswer(["x"], timing=TIMING, usage=USAGE)]) as server,
        app_at(server.url, size=(80, 24)) as (app, pilot),
    ):
        await say(pilot, "one")
        await until(lambda: has_answered(app, "one") and "812" in screen_text(app))
        line = app.query_one(StatusLine)
        await until(lambda: "s…" not in screen_text(app))
        assert "812/8192 tokens" in screen_text(app)
        await pilot.resize_terminal(110, 24)
        await until(lambda: "scripted" in screen_text(app))
        assert not line.has_class("-full")


async def test_behind_a_switch_of_branch_one_sees_which_branch_it_is() -> None:
    tall = ScriptedAnswer([f"line {n}\n\n" for n in range(60)])
    async with (
        ScriptedServer([tall, tall]) as server,
        app_at(server.url, size=(80, 24)) as (app, pilot),
    ):
        await say(pilot, "one")
        await until(lambda: has_answered(app, "one"))
        await pilot.press("ctrl+up", "r")
        await until(lambda: len(server.creates()) == 2 and has_answered(app, "one"))
        for key, place in (("ctrl+up", "‹ 2/2 ›"), ("left", "‹ 1/2 ›"), ("right", "‹ 2/2 ›")):
            await pilot.press(key)
            await until(lambda at=place: at in screen_text(app))  # type: ignore[misc]
            await pilot.pause(0.3)
            assert place in screen_text(app)
        await pilot.press("escape", "ctrl+end")
        await until(lambda: "line 59" in screen_text(app))
        await say(pilot, "/branch previous")
        await until(lambda: "‹ 1/2 ›" in screen_text(app))
        assert app.query_one(Transcript).max_scroll_y > 24
