from __future__ import annotations

import asyncio

from textual import events, on
from textual.app import App, ComposeResult
from textual.containers import Vertical

from chatrt_tui.prompt import Prompt


class PromptApp(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.refused = 0

    def compose(self) -> ComposeResult:
        yield Prompt()

    @on(Prompt.Submitted)
    def take(self, event: Prompt.Submitted) -> None:
        self.sent.append(event.text)

    @on(Prompt.NotNow)
    def count(self) -> None:
        self.refused += 1

    @property
    def prompt(self) -> Prompt:
        return self.query_one(Prompt)


async def test_enter_sends_and_empties_the_prompt() -> None:
    app = PromptApp()
    async with app.run_test() as pilot:
        await pilot.press(*"hi", "enter", *"ab")
        await pilot.pause()
        assert app.sent == ["hi"]
        assert app.prompt.text == "ab"


async def test_a_blank_prompt_is_not_sent() -> None:
    app = PromptApp()
    async with app.run_test() as pilot:
        await pilot.press("space", "enter")
        await pilot.pause()
        assert app.sent == []
        assert app.prompt.text == " "


async def test_sending_is_off_until_it_is_allowed_again() -> None:
    app = PromptApp()
    async with app.run_test() as pilot:
        await pilot.press("a", "enter", "b", "enter")
        await pilot.pause()
        assert (app.sent, app.refused, app.prompt.text) == (["a"], 1, "b")
        app.prompt.allow_sending()
        await pilot.press("enter")
        await pilot.pause()
        assert app.sent == ["a", "b"]


async def test_three_keys_make_a_new_line() -> None:
    app = PromptApp()
    async with app.run_test() as pilot:
        await pilot.press("a", "ctrl+j", "b", "alt+enter", "c", "shift+enter", "d")
        assert app.prompt.text == "a\nb\nc\nd"
        assert app.prompt.size.height >= 4
        assert app.sent == []


async def test_a_paste_of_several_lines_arrives_whole_and_is_not_sent() -> None:
    app = PromptApp()
    pasted = "one\ntwo\n\nthree\n"
    async with app.run_test() as pilot:
        await pilot.press("x")
        app.post_message(events.Paste(pasted))
        await pilot.pause()
        assert app.prompt.text == "x" + pasted
        await pilot.press("enter")
        await pilot.pause()
        assert app.sent == ["x" + pasted]


async def test_up_and_down_walk_through_what_was_sent() -> None:
    app = PromptApp()
    async with app.run_test() as pilot:
        app.prompt.remember("first", "two\nlines", "  ")
        await pilot.press("up")
        assert app.prompt.text == "two\nlines"
        await pilot.press("up")  # from the last line to the first one
        assert app.prompt.text == "two\nlines"
        await pilot.press("up")
        assert app.prompt.text == "first"
        await pilot.press("up")
        assert app.prompt.text == "first"
        await pilot.press("down")
        assert app.prompt.text == "two\nlines"
        await pilot.press("down")
        assert app.prompt.text == ""


async def test_history_never_replaces_something_typed() -> None:
    app = PromptApp()
    async with app.run_test() as pilot:
        app.prompt.remember("old")
        await pilot.press(*"new", "up", "down")
        assert app.prompt.text == "new"
        app.prompt.text = ""
        await pilot.press("up", "x", "up", "down")
        assert app.prompt.text == "oldx"


async def test_a_text_given_back_does_not_overwrite_a_new_one() -> None:
    app = PromptApp()
    async with app.run_test() as pilot:
        app.prompt.give_back("unsent")
        assert app.prompt.text == "unsent"
        await pilot.press("x")
        app.prompt.give_back("other")
        assert app.prompt.text == "unsentx"


async def test_ctrl_l_empties_a_prompt_of_any_length_and_up_brings_it_back() -> None:
    app = PromptApp()
    async with app.run_test() as pilot:
        text = "\n".join(f"line {n}" for n in range(1200))
        app.prompt.insert(text)
        await pilot.press("ctrl+l")
        assert app.prompt.text == ""
        await pilot.press("up")
        assert app.prompt.text == text


class BusyApp(PromptApp):
    """The prompt's parent paints for as long as `painting` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.painting = asyncio.Event()

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Prompt()


async def test_a_letter_typed_right_behind_a_backspace_stays_while_an_answer_is_painted() -> None:
    app = BusyApp()
    async with app.run_test() as pilot:
        parent = app.query_one(Vertical)
        parent.call_next(app.painting.wait)
        for key in ("a", "backspace", "b", "left", "c"):
            app.post_message(events.Key(key, key if len(key) == 1 else None))
        marker = asyncio.Event()
        app.call_later(app.prompt.call_later, marker.set)  # behind the keys, on the same way
        await asyncio.wait_for(marker.wait(), 10)
        app.painting.set()
        await pilot.pause()
        assert app.prompt.text == "cb"
