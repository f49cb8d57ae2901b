"""`chatrt top` on the command line: which server is meant, tables, JSON, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from chatrt.api_keys import ensure_api_keys
from chatrt.cli.main import app
from chatrt.launch import register_server
from chatrt.paths import Paths
from chatrt.testing.service import ScriptedService
from chatrt.testing.serving import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from typer.testing import Result

    from chatrt.server.server import Server


async def top(*arguments: str) -> Result:
    """The command on a thread of its own, while the loop serves."""
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, ["top", *arguments]))


@asynccontextmanager
async def registered(service: ScriptedService) -> AsyncIterator[Server]:
    """A server that commands find by themselves, with this machine's key."""
    paths = Paths.find(os.environ)
    async with serving(service, api_keys=ensure_api_keys(paths.api_key)) as server:
        await asyncio.to_thread(
            register_server, paths, host="127.0.0.1", port=server.port, model="m", started_at=0.0
        )
        yield server


async def test_the_running_server_is_found_with_its_key_and_printed_as_a_table() -> None:
    async with registered(ScriptedService()):
        result = await top("--once")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("scripted · up 0 s · 0 connections")
    assert "Your turns that run: none" in result.stdout


async def test_json_is_one_document_of_the_same_figures() -> None:
    async with registered(ScriptedService()):
        result = await top("--json")
    document = json.loads(result.stdout)
    assert document["object"] == "chatrt.live"
    assert document["server"]["model"] == "scripted"


async def test_an_address_is_looked_at_instead() -> None:
    async with serving(ScriptedService()) as server:
        result = await top(f"ws://127.0.0.1:{server.port}", "--once")
    assert result.stdout.startswith("scripted")


async def test_without_a_server_none_is_started_and_a_sentence_says_what_helps() -> None:
    result = await top("--once")
    assert result.exit_code == 1
    assert "no server runs on this machine: `chatrt serve` or `chatrt chat`" in result.stderr
    assert not Paths.find(os.environ).server_log.exists()


async def test_a_key_that_is_refused_is_a_sentence_and_no_table() -> None:
    async with serving(ScriptedService(), api_keys=("other",)) as server:
        result = await top(f"ws://127.0.0.1:{server.port}", "--once")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "API key" in result.stderr


async def test_in_a_pipe_the_screen_gives_way_to_a_sentence() -> None:
    async with registered(ScriptedService()):
        result = await top()
    assert result.exit_code == 2
    assert "in a pipe use: chatrt top --once" in result.stderr


async def test_looks_are_not_taken_without_a_pause() -> None:
    result = await top("--interval", "0")
    assert result.exit_code == 2
    assert "0.1" in result.stderr


def test_the_screen_never_imports_torch() -> None:
    modules = "chatrt.cli.top, chatrt_tui.top, chatrt_tui.top_print"
    script = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
