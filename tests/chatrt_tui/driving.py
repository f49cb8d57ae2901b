"""Helpers that run the app against the scripted server and wait for what they want to see."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from chatrt_tui.app import ChatApp
from chatrt_tui.prompt import Prompt
from chatrt_tui.status import StatusLine
from chatrt_tui.transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from textual.pilot import Pilot

TIME_SCALE = float(os.environ.get("CHATRT_TEST_TIME_SCALE", "1"))


@asynccontextmanager
async def app_at(
    url: str,
    *,
    size: tuple[int, int] = (90, 30),
    connected: bool = True,
    typing_ahead: bool = False,
    state_file: Path | None = None,
) -> AsyncIterator[tuple[ChatApp, Pilot[None]]]:
    app = ChatApp(url, typing_ahead=typing_ahead, state_file=state_file)
    async with app.run_test(size=size, notifications=True) as pilot:
        if connected:
            await until(lambda: "scripted" in state(app))
        yield app, pilot


async def until(
    seen: Callable[[], object], *, within_s: float = 10.0, pause_s: float = 0.01
) -> None:
    """Wait until `seen()` is true; the app goes on by itself meanwhile."""
    async with asyncio.timeout(within_s * TIME_SCALE):
        while not seen():  # noqa: ASYNC110 - what is painted gives no event to wait for
            await asyncio.sleep(pause_s)


async def say(pilot: Pilot[None], text: str) -> None:
    """Type `text` at once and send it."""
    pilot.app.query_one(Prompt).insert(text)
    await pilot.press("enter")


def screen_text(app: ChatApp) -> str:
    """What is painted, as lines of text."""
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips)


def state(app: ChatApp) -> str:
    return str(app.query_one(StatusLine).query_one("#state").render())


def figures(app: ChatApp) -> str:
    return str(app.query_one(StatusLine).query_one("#figures").render())


def prompt_text(app: ChatApp) -> str:
    return app.query_one(Prompt).text


def answer(app: ChatApp) -> str:
    return app.query_one(Transcript).last_answer()


def idle(app: ChatApp) -> bool:
    return "scripted" in state(app)


def has_answered(app: ChatApp, question: str) -> bool:
    """Whether the last turn shown is this one, and over."""
    tip = app._chat.conversation.tree.tip
    return tip.question == question and bool(tip.answer) and not app._chat.is_busy
