"""A process that keeps one core busy, for measuring beside it.

Knows: processes. Does not know: what is measured.
Invariant: it ends with its context, and by itself should this process be killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Says that it has started, then computes; now and then it looks whether its parent still lives.
_PROGRAM = """
import os, sys
parent = int(sys.argv[1])
print(flush=True)
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextmanager
def busy_process() -> Iterator[int]:
    """Keep a core busy until the context ends; gives the process id.

    Raises:
        OSError: No process can be started.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.communicate()
