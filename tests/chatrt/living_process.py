"""A living server in a process of its own, which can be killed for real.

Knows: how to start one and to hear its port. Does not know: what a test asks.
Invariant: it ends with its standard input: a test that dies leaves none behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from chatrt.text.tokenizer import Tokenizer
from tests.chatrt.living_server import LivingServer, Size

_CODE = "from tests.chatrt.living_process import main; main()"


@dataclass
class ServerProcess:
    """One process; `port` is where it listens."""

    process: subprocess.Popen[str]
    port: int

    @classmethod
    def start(cls, tokenizer_folder: Path, folder: Path, *, num_pages: int) -> ServerProcess:
        """Start one and return once it listens."""
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, str(tokenizer_folder), str(folder), str(num_pages)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdout is not None
        return cls(process, int(process.stdout.readline()))

    def kill(self) -> None:
        """SIGKILL: it gets no time for anything."""
        self.process.kill()
        self.process.communicate()


def main() -> None:
    """The process."""
    tokenizer_folder, folder, num_pages = sys.argv[1:]
    tokenizer = Tokenizer.load(Path(tokenizer_folder))
    server = LivingServer(tokenizer, Path(folder), Size(num_pages=int(num_pages)))
    server.start()
    print(server.port, flush=True)  # noqa: T201  (what the test reads)
    sys.stdin.read()
    server.stop()
