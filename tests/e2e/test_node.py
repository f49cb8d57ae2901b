"""The unmodified openai-node SDK against the real server, where Node and npm are present."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import assert_all_cached, time_scale

if TYPE_CHECKING:
    from tests.e2e.process import ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]
SOURCE = Path(__file__).parent / "node"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the script and the packages that npm installed for it."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path / "node"
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("node_modules"))
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install openai: {done.stderr.strip()[-300:]}")
    return folder


def test_responses_ws_of_openai_node_chats_two_turns(
    installed: Path, server: ServerProcess
) -> None:
    prompts = ["My name is Ada. Say hello.", "What is my name?"]
    done = subprocess.run(
        ["node", "chat.mjs", server.base_url, server.api_key, *prompts],
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=60 * time_scale(),
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert first["text"]
    assert second["text"]
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert_all_cached(cached, first["usage"]["total_tokens"])
