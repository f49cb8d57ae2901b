"""A client of some SDK in a process of its own, told by lines of JSON what to do.

The SDKs live apart from chatrt (other packages than its own, or another language), so each has a
small program that uses it as its documentation says. A line in: `say` and `max_tokens`, perhaps
`previous`, `model`, `stop`, `options`. A line out: what became of the turn (`Said`).

Knows: how such a program is started, asked and ended. Does not know: the SDKs, servers.
Invariant: a program that a test started has ended when its context is left.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent
PYTHON = FOLDER.parents[1] / ".venv-clients" / "bin" / "python"
NODE_MODULES = FOLDER / "node" / "node_modules"
NAMES = ("openai-node", "openai-agents", "pipecat")


@dataclass(frozen=True, slots=True)
class Said:
    """A turn as the SDK showed it to its program.

    What an SDK does not show is empty or 0: Pipecat has no ids, nor the status of a response.
    `error` is its sentence about a turn that gave no answer.
    """

    text: str = ""
    id: str = ""
    status: str = ""
    input_tokens: int = 0
    cached_tokens: int = 0
    total_tokens: int = 0
    code: str = ""
    error: str = ""


@dataclass(slots=True)
class Program:
    """One running program; `log` is where its standard error goes."""

    name: str
    process: subprocess.Popen[str]
    log: Path

    def ask(
        self, text: str, *, after: Said | None = None, max_tokens: int = 48, **more: Any
    ) -> Said:
        """One greedy turn; returns once the SDK says that it is over.

        It continues `after`, or begins a conversation. `stop` ends the answer at its first delta;
        `model` is another one than the server's; `options` are fields of ours.
        """
        command = {"say": text, "max_tokens": max_tokens, **more}
        if after is not None:
            command["previous"] = after.id
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"{self.name} ended: {self.told()}"
        return Said(**json.loads(line))

    def told(self) -> str:
        """The end of its standard error."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]


@contextmanager
def running(name: str, base_url: str, api_key: str, log: Path) -> Iterator[Program]:
    """The program of an SDK, connected to a server; skips the test where the SDK is missing."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*_command(name), base_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment(api_key),
        )
    try:
        yield Program(name, process, log)
    finally:
        process.kill()
        process.communicate()


def node(script: str) -> list[str]:
    """The command that runs a script of the folder `node`; skips where it cannot be run."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not installed")
    _need(NODE_MODULES)
    return [found, str(FOLDER / "node" / script)]


def environment(api_key: str) -> dict[str, str]:
    """This process's variables without what would lead the program to chatrt's own packages."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "OPENAI_API_KEY": api_key, "PYTHONUNBUFFERED": "1"}


def python() -> str:
    """The interpreter that has Python's SDKs; skips where it is missing."""
    _need(PYTHON)
    return str(PYTHON)


def _command(name: str) -> list[str]:
    if name == "openai-node":
        return node("chat.mjs")
    script = {"openai-agents": "agents_chat.py", "pipecat": "pipecat_chat.py"}[name]
    return [python(), str(FOLDER / "programs" / script)]


def _need(path: Path) -> None:
    if path.exists():
        return
    sentence = f"{path} is not there: `make clients` installs the clients"
    if os.environ.get("CHATRT_TEST_REQUIRE_CLIENTS"):
        pytest.fail(sentence)
    pytest.skip(sentence)
