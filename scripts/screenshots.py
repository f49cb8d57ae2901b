"""Draws the pictures of the terminal client: `python scripts/screenshots.py`.

Knows: what a person would type to see each screen, where the pictures belong.
Does not know: models, how a server is started; without `--url` a fresh one is, and ended behind it.
Invariant: every picture is of the real client on a real server; nothing in it is drawn by hand.
Cost: a dozen short answers of the default model, some seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from chatrt.cli.bench_server import choose_server, measured_server
from chatrt_tui.app import ChatApp
from chatrt_tui.prompt import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.pilot import Pilot

    from chatrt.launch import Endpoint

OUT = Path(__file__).parents[1] / "docs"
_WITHIN_S = 120.0
_PAUSE_S = 0.05
_FONT = re.compile(r"@font-face\s*\{[^}]*\}\s*")
_EARLIER = (
    "Which planet is the largest?",
    "Why is the sky blue? One sentence.",
    "Name three kinds of tea.",
)
_CODE = "Write a Python function that adds two numbers."


async def until(seen: Callable[[], object]) -> None:
    """Wait for what the screen shows; a picture of half a screen is none."""
    async with asyncio.timeout(_WITHIN_S):
        while not seen():  # noqa: ASYNC110 - what is painted gives no event to wait for
            await asyncio.sleep(_PAUSE_S)


class Photographer:
    """Types into one terminal of `size` and keeps what it shows in `folder`."""

    def __init__(self, app: ChatApp, pilot: Pilot[None], folder: Path) -> None:
        self._app = app
        self._pilot = pilot
        self._folder = folder

    @property
    def _num_turns(self) -> int:
        return len(self._app._chat.conversation.tree)

    async def ask(self, text: str) -> None:
        """One whole turn."""
        before = self._num_turns
        await self.say(text)
        await until(lambda: self._num_turns > before and not self._app._chat.answering)

    async def say(self, text: str) -> None:
        """Type and send, and wait until the client has taken it."""
        self._app.query_one(Prompt).insert(text)
        await self._pilot.press("enter")
        await self._pilot.pause()

    async def press(self, *keys: str) -> None:
        """Press keys."""
        await self._pilot.press(*keys)
        await self._pilot.pause()

    async def keep(self, name: str) -> None:
        """Write the screen as `name`.svg, once its toasts have left."""
        self._app.clear_notifications()
        await self._pilot.pause(0.5)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{name}.svg"
        drawn = self._app.export_screenshot(title="chatrt")
        # A picture that stands by itself: it asks nobody for a font, any monospaced one will do.
        path.write_text(_FONT.sub("", drawn), encoding="utf-8")
        print(path)


async def photograph(endpoint: Endpoint, folder: Path, size: tuple[int, int]) -> None:
    """All pictures, of a terminal of `size` columns and rows."""
    app = ChatApp(endpoint.url, endpoint.api_key, typing_ahead=False)
    async with app.run_test(size=size, notifications=True) as pilot:
        await until(lambda: app._chat.models)
        camera = Photographer(app, pilot, folder)
        await camera.say("/temp 0")
        for question in _EARLIER:
            await camera.ask(question)
            await camera.press("ctrl+n")
        await camera.ask("What is the capital of France?")
        await camera.ask("And of Italy?")
        await camera.say("/edit")
        app.query_one(Prompt).show("")
        await camera.ask("And of Spain?")
        await camera.ask(_CODE)
        await camera.keep("chat")
        await camera.say("/stats")
        await camera.press("ctrl+up", "ctrl+up")
        await camera.keep("details")
        await camera.press("escape", "ctrl+t", "ctrl+o")
        await until(lambda: len(app.screen.query("OptionList")) == 1)
        await camera.keep("conversations")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the pictures")
    parser.add_argument("--size", default="120x40", help="columns x rows of the terminal")
    parser.add_argument("--url", help="a running server; its conversations are added to")
    parser.add_argument("--api-key-file", type=Path, help="the key for --url")
    given = parser.parse_args()
    columns, rows = (int(number) for number in given.size.split("x"))
    choice = choose_server(given.url, given.api_key_file, None)
    with tempfile.TemporaryDirectory() as elsewhere, measured_server(choice) as server:
        os.chdir(elsewhere)  # an export by mistake would land there
        asyncio.run(photograph(server.endpoint, given.out.absolute(), (columns, rows)))


if __name__ == "__main__":
    main()
