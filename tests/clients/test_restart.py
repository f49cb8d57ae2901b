"""Unmodified SDKs whose server restarts under them: close code 1012, then the next one answers."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from openai import AsyncOpenAI
from openai.lib.responses_websocket import AsyncResponsesWebSocketSession

from tests.clients.lanes import LIMITS, create
from tests.clients.program import NAMES, running
from tests.e2e.process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from openai.lib.responses_websocket import AsyncResponsesWebSocketLane
    from openai.types.websocket_reconnection import ReconnectingEvent

    from tests.conftest import ModelCache

pytestmark = [pytest.mark.model, pytest.mark.slow]
FRANCE, ITALY = "What is the capital of France?", "And what is the capital of Italy?"


class Successive:
    """Servers of the default model, one after the other, at one address and with one home."""

    def __init__(self, home: Path) -> None:
        # A folder of its own: one process has a folder of pages at a time.
        limits = ("--kv-memory-bytes", "256MiB", "--max-context", "1024", "--drain", "60s")
        self._flags = (*limits, "--kv-dir", str(home / "kv"))
        self._home = home
        self.now = ServerProcess.start(home, None, *self._flags)
        self._all = [self.now]

    def next(self) -> None:
        """Start the next one; the one before has ended, or is about to."""
        assert self.now.wait() == 0
        port = self.now.base_url.removesuffix("/v1").rsplit(":", 1)[1]
        self.now = ServerProcess.start(self._home, None, *self._flags, "--port", port)
        self._all.append(self.now)

    def kill(self) -> None:
        """End all of them."""
        for server in self._all:
            server.kill()


@pytest.fixture(scope="module")
def servers(
    model_cache: ModelCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Successive]:
    successive = Successive(model_cache.share_with(tmp_path_factory.mktemp("served") / "home"))
    yield successive
    successive.kill()


def test_every_sdk_goes_on_with_the_next_server(servers: Successive, tmp_path: Path) -> None:
    address = servers.now.base_url, servers.now.api_key
    with ExitStack() as stack:
        programs = [
            stack.enter_context(running(name, *address, tmp_path / f"{name}.log")) for name in NAMES
        ]
        first = [program.ask(FRANCE) for program in programs]
        servers.now.process.send_signal(signal.SIGTERM)
        servers.next()
        for program, said in zip(programs, first, strict=True):
            second = program.ask(ITALY, after=said)
            assert "Rome" in second.text, (program.name, second, program.told())
            if said.id:  # its full pages came back from disk
                assert second.cached_tokens >= said.total_tokens // 16 * 16, program.name
        assert "reconnecting after 1012" in programs[NAMES.index("openai-node")].told()


async def test_openai_python_reads_its_answer_to_the_end_then_reconnects_and_continues_it(
    servers: Successive,
) -> None:
    codes: list[int] = []

    def on_reconnecting(event: ReconnectingEvent) -> None:
        codes.append(event.close_code)

    async def ended(connection: Any) -> Any:
        async for event in connection:
            if event.type in ("response.completed", "response.incomplete"):
                return event.response
        raise AssertionError("the connection ended before the answer did")

    client = AsyncOpenAI(api_key=servers.now.api_key, base_url=servers.now.base_url)
    connecting = client.responses.connect(
        on_reconnecting=on_reconnecting, max_retries=1000, initial_delay=0.05, max_delay=0.2
    )
    async with client, connecting as connection:
        await connection.response.create(input=FRANCE, temperature=0, max_output_tokens=24)
        while (await connection.recv()).type != "response.created":
            pass
        servers.now.process.send_signal(signal.SIGTERM)
        first = await ended(connection)
        assert "Paris" in first.output_text
        next_server = asyncio.create_task(asyncio.to_thread(servers.next))
        # The SDK reconnects while it reads, and holds what is sent to it until it has.
        reading = asyncio.create_task(ended(connection))
        await next_server
        await connection.response.create(
            input=ITALY, previous_response_id=first.id, temperature=0, max_output_tokens=24
        )
        second = await reading
    assert set(codes) == {1012}
    assert "Rome" in second.output_text
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens // 16 * 16


async def test_lanes_of_openai_python_stay_open_and_continue_by_id(servers: Successive) -> None:
    reconnected = asyncio.Event()
    client = AsyncOpenAI(api_key=servers.now.api_key, base_url=servers.now.base_url)
    connecting = client.responses.connect(
        on_reconnecting=lambda _: reconnected.set(),
        max_retries=1000,
        initial_delay=0.05,
        max_delay=0.2,
    )
    async with (
        client,
        connecting as connection,
        AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        lanes = [session.lane("source"), session.lane("fork")]
        await lanes[0].send(create(FRANCE))
        first = await lanes[0].get_final_response()
        assert "Paris" in first.output_text
        servers.now.process.send_signal(signal.SIGTERM)
        await reconnected.wait()
        await asyncio.to_thread(servers.next)
        for lane in lanes:
            await until_sent(lane, create(ITALY, previous_response_id=first.id))
        for lane in lanes:
            assert "Rome" in (await lane.get_final_response()).output_text


async def until_sent(lane: AsyncResponsesWebSocketLane, message: Any) -> None:
    """Send on a lane, which refuses while its connection is being made again."""
    while True:
        try:
            return await lane.send(message)
        except RuntimeError as error:
            if "reconnecting" not in str(error):
                raise
            await asyncio.sleep(0.05)
