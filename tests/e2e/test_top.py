"""`chatrt top` beside the real server with the default model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from chatrt.client import ChatClient, HttpRoutes
from chatrt_tui.top import TopApp
from tests.chatrt_tui.driving import until
from tests.chatrt_tui.test_top import painted, rows

if TYPE_CHECKING:
    from tests.e2e.process import ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]


async def test_a_turn_is_seen_while_it_is_answered_and_behind_it(server: ServerProcess) -> None:
    routes = HttpRoutes(server.url, api_key=server.api_key)
    app = TopApp(routes, interval_s=0.1)
    async with (
        app.run_test(size=(80, 24)),
        await ChatClient.connect(server.url, api_key=server.api_key) as client,
    ):
        await until(lambda: "smollm2" in painted(app), within_s=20)
        num_before = len(rows(app, "recent"))
        answer = await client.chat("Tell me a long story about a marmalade factory.")
        await until(lambda: "1 decode" in painted(app), within_s=60)
        await until(lambda: len(rows(app, "live")) == 1)
        await answer.cancel()
        async for _ in answer:
            pass
        await until(lambda: rows(app, "live") == [])
        await until(lambda: len(rows(app, "recent")) > num_before or num_before == 50)
        document = msgspec.json.encode(await routes.live())
    assert b"marmalade" not in document
