"""A measurement as a process of its own, for commands that make several of them.

Knows: how a command of `chatrt bench` is started, interrupted and ended.
Does not know: what is measured. Invariant: when a call returns its process has ended; a first
Ctrl+C, or a signal to end, has it show what it has, a second one kills it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Ended:
    """How a measurement ended: its exit code, its tables, whether it was cut short."""

    code: int
    tables: str
    interrupted: bool


def measure_apart(
    arguments: Sequence[str], save: Path, env: Mapping[str, str] | None = None
) -> Ended:
    """Run `chatrt bench` with these arguments; its document goes to `save`.

    `env` are variables besides those of this process. A second Ctrl+C raises KeyboardInterrupt.
    """
    command = [sys.executable, "-m", "chatrt", "bench", *arguments, "--save", str(save)]
    # In a session of its own, so that Ctrl+C reaches it once, through us.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **(env or {})},
    ) as process:
        output, interrupted = _until_ended(process)
    tables, _, _ = output.rstrip("\n").rpartition("\n")
    return Ended(process.returncode, tables, interrupted)


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Signals that end a program are told to what is measured, as Ctrl+C is: nothing runs on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (getattr(signal, name) for name in names)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _until_ended(process: subprocess.Popen[str]) -> tuple[str, bool]:
    """What it printed, and whether it was interrupted."""
    try:
        return process.communicate()[0], False
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
    try:
        return process.communicate()[0], True
    except KeyboardInterrupt:
        process.kill()
        raise
