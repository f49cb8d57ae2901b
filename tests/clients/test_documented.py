"""The programs in docs/clients.md, run as they stand there, and what that page says beside them."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.clients.program import FOLDER, NODE_MODULES, environment, node, python
from tests.support import time_scale

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.process import ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]
PAGE = (FOLDER.parents[1] / "docs" / "clients.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(python|js)\n(.*?)^```$", PAGE, re.M | re.S)
# Node 22 has one of its own, Node 20 takes the package that openai-node needs.
BROWSER = "import WebSocket from 'ws';\n"


def titled(block: tuple[str, str]) -> str:
    """The heading that a program stands under."""
    before = PAGE[: PAGE.index(block[1])]
    headings: list[str] = re.findall(r"^## (.+)$", before, re.M)
    return headings[-1].replace(" ", "-")


@pytest.mark.parametrize("block", BLOCKS, ids=map(titled, BLOCKS))
def test_a_program_of_the_page_answers(
    block: tuple[str, str], server: ServerProcess, tmp_path: Path
) -> None:
    language, text = block
    address = server.base_url.removeprefix("http://").removesuffix("/v1")
    text = text.replace("127.0.0.1:8642", address)
    if language == "python":
        script = tmp_path / "program.py"
        command = [python(), str(script)]
    else:
        script = tmp_path / "program.mjs"
        (tmp_path / "node_modules").symlink_to(NODE_MODULES)
        command = node(str(script))
        if "openai'" not in text:
            text = BROWSER + text.replace("'…'", "process.env.OPENAI_API_KEY")
    script.write_text(text, encoding="utf-8")
    done = subprocess.run(
        command,
        env=environment(server.api_key),
        capture_output=True,
        text=True,
        timeout=60 * time_scale(),
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout, done.stderr


def test_the_versions_of_the_page_are_those_that_are_installed() -> None:
    pinned = (FOLDER / "requirements.txt").read_text(encoding="utf-8")
    packages = json.loads((FOLDER / "node" / "package.json").read_text(encoding="utf-8"))
    found = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==([\d.]+)", pinned, re.M))
    project = (FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"openai=={found["openai"]}"' in project
    named = {
        "openai-python": found["openai"],
        "openai-node": packages["dependencies"]["openai"],
        "openai-agents": found["openai-agents"],
        "Pipecat": found["pipecat-ai"],
    }
    for name, version in named.items():
        assert f"| {name} {version} |" in PAGE
