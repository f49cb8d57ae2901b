"""Servers that end, kindly or not, and what their successors know."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.e2e.process import ServerProcess, environment, output_text, turn
from tests.support import assert_all_cached, time_scale

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow
KV = ("--kv-memory-bytes", "16MiB")
NUM_TOKENS = 2000  # of an answer that is still being written while other things happen


class Servers:
    """Starts servers of the tiny model, one after the other, on the same home."""

    def __init__(self, model: Path, home: Path) -> None:
        self.model = model
        self.home = home
        self.started: list[ServerProcess] = []

    async def start(self, *flags: str) -> ServerProcess:
        server = await asyncio.to_thread(
            ServerProcess.start, self.home, str(self.model), *KV, *flags
        )
        self.started.append(server)
        return server

    def num_page_files(self) -> int:
        """KV pages that lie on disk."""
        return len(list((self.home / "cache" / "kv").rglob("*.kv")))

    def wait_for_page_files(self, count: int) -> None:
        """They are written behind the turn; no event tells when."""
        deadline_s = time.monotonic() + 20 * time_scale()
        while self.num_page_files() < count:
            assert time.monotonic() < deadline_s, f"{self.num_page_files()} of {count} pages"
            time.sleep(0.05)


@pytest.fixture
def servers(tiny_model_folder: Path, tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tiny_model_folder, tmp_path / "home")
    yield servers
    for server in servers.started:
        server.kill()


async def test_sigterm_lets_the_answer_finish_and_a_new_server_continues_it(
    servers: Servers,
) -> None:
    first = await servers.start("--drain", "60s")
    async with first.caller() as caller:
        await caller.create("hello", temperature=0, max_output_tokens=NUM_TOKENS)
        await caller.until(["response.output_text.delta"])
        first.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        await caller.create("too late", stream_id="late")
        events = await caller.until(["response.incomplete"])
        refused = [event for event in events if event["type"] == "error"]
        assert [one["error"]["code"] for one in refused] == ["server_unavailable"]
        ended = events[-1]["response"]
        assert ended["usage"]["output_tokens"] == NUM_TOKENS
        assert await caller.until_closed() == 1012
    assert await asyncio.to_thread(first.wait) == 0
    assert not first.paths.server_record.exists()
    second = await servers.start()
    kept = await asyncio.to_thread(second.get, f"/v1/responses/{ended['id']}")
    assert output_text(kept.body) == output_text(ended)
    assert kept.body["usage"] == ended["usage"]
    num_before = ended["usage"]["total_tokens"]
    async with second.caller() as caller:
        later = await turn(caller, "more", previous_response_id=ended["id"], max_output_tokens=5)
        usage = later["response"]["usage"]
        assert usage["input_tokens"] > num_before
        # All full pages came back from disk: the sequence but its last, partly filled one.
        assert usage["input_tokens_details"]["cached_tokens"] == (num_before - 1) // 16 * 16
        assert later["response"]["chatrt"]["kv"]["prefix"] == "restored"
        last = await turn(
            caller, "more", previous_response_id=later["response"]["id"], max_output_tokens=5
        )
    cached = last["response"]["usage"]["input_tokens_details"]["cached_tokens"]
    assert_all_cached(cached, usage["total_tokens"])


async def test_what_was_answered_before_kill_9_can_be_continued_after_it(
    servers: Servers,
) -> None:
    first = await servers.start()
    async with first.caller() as caller:
        await caller.send({"type": "chatrt.conversation.create", "title": "kept"})
        made = (await caller.until(["chatrt.conversation.created"]))[-1]["conversation"]["id"]
        told = await turn(caller, "hello", conversation=made, max_output_tokens=20)
        first.kill()  # in the same moment as the terminal event
    second = await servers.start()
    items = (await asyncio.to_thread(second.get, f"/v1/conversations/{made}/items")).body["data"]
    assert items[1]["content"][0]["text"] == output_text(told["response"])
    async with second.caller() as caller:
        more = await turn(caller, "more", conversation=made, max_output_tokens=5)
    response = more["response"]
    assert response["previous_response_id"] in (None, told["response"]["id"])
    assert response["usage"]["input_tokens"] > told["response"]["usage"]["total_tokens"]


async def test_pages_that_were_on_disk_at_kill_9_are_not_computed_again(servers: Servers) -> None:
    first = await servers.start()
    async with first.caller() as caller:
        told = (await turn(caller, "hello " * 60, max_output_tokens=20))["response"]
    num_pages = (told["usage"]["total_tokens"] - 1) // 16
    await asyncio.to_thread(servers.wait_for_page_files, num_pages)
    first.kill()
    second = await servers.start()
    async with second.caller() as caller:
        more = await turn(caller, "more", previous_response_id=told["id"], max_output_tokens=5)
    kv = more["response"]["chatrt"]["kv"]
    assert kv["restored_tokens"] == kv["reused_tokens"] == num_pages * 16
    assert kv["restored_from"] == "disk"
    removed = await asyncio.to_thread(second.delete, f"/v1/responses/{told['id']}")
    assert removed.status == 200
    assert servers.num_page_files() == 0


async def test_without_a_data_folder_the_server_chats_and_says_that_nothing_is_kept(
    servers: Servers,
) -> None:
    servers.home.mkdir()
    (servers.home / "data").write_text("a file where the folder should be", encoding="utf-8")
    server = await servers.start()
    async with server.caller() as caller:
        await caller.send({"type": "chatrt.conversation.create", "title": "kept by nobody"})
        await caller.until(["chatrt.conversation.created"])
        ended = await turn(caller, "hello", max_output_tokens=3)
        more = await turn(
            caller, "more", previous_response_id=ended["response"]["id"], max_output_tokens=3
        )
    usage = more["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] > 0
    folder = str(servers.home / "data")
    (warning,) = [line for line in server.log().splitlines() if folder in line]
    assert warning.endswith("conversations are kept in memory only")
    assert "Traceback" not in server.log()


def test_a_port_in_use_is_a_sentence_and_exit_status_1(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "chatrt", "serve", str(tiny_model_folder), "--port", port],
            env=environment(tmp_path / "home"),
            capture_output=True,
            text=True,
            timeout=60 * time_scale(),
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"chatrt: 127.0.0.1 port {port} is in use: stop what listens there or take another port"
    )
    assert "Traceback" not in done.stderr
