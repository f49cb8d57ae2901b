"""The terminal client against the real server with the default model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chatrt_tui.app import ChatApp
from tests.chatrt_tui.driving import figures, say, screen_text, state, until

if TYPE_CHECKING:
    from tests.e2e.process import ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]


async def test_a_turn_is_painted_and_its_figures_are_shown(server: ServerProcess) -> None:
    app = ChatApp(server.url, server.api_key)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(lambda: "smollm2" in state(app), within_s=20)
        await say(pilot, "What is the capital of France? One sentence.")
        await until(lambda: "Paris" in screen_text(app), within_s=60)
        await until(lambda: "smollm2" in state(app), within_s=60)
        await until(lambda: "TTFT" in figures(app))
        shown = figures(app)
    assert "tok/s" in shown
