from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from textual import events
from textual._xterm_parser import XTermParser

from chatrt_tui.main import understand_alt_enter

if TYPE_CHECKING:
    from collections.abc import Iterator

TIME_SCALE = float(os.environ.get("CHATRT_TEST_TIME_SCALE", "1"))
_WELCOME = "A new conversation."
_PLACEHOLDER = "rite a message."  # its first letter is under the cursor


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout


def test_the_terminal_never_imports_torch_or_transformers() -> None:
    loaded = run_python(
        "import sys, chatrt_tui.app, chatrt_tui.main, chatrt.client;"
        "print([m for m in ('torch', 'transformers', 'triton', 'numpy') if m in sys.modules])"
    )
    assert loaded.strip() == "[]"


def test_the_package_itself_loads_nothing_and_the_app_loads_quickly() -> None:
    told = run_python(
        "import sys, time; t = time.perf_counter(); import chatrt_tui, chatrt_tui.main;"
        "print('textual' in sys.modules); import chatrt_tui.app; print(time.perf_counter() - t)"
    ).split()
    assert told[0] == "False"
    assert float(told[1]) < 2.0 * TIME_SCALE


def test_alt_enter_of_an_old_terminal_is_a_new_line_and_enter_still_sends() -> None:
    understand_alt_enter()
    parser = XTermParser()
    keys = [e.key for e in parser.feed("\x1b\r") if isinstance(e, events.Key)]
    keys += [e.key for e in parser.feed("\r") if isinstance(e, events.Key)]
    assert keys == ["ctrl+j", "enter"]


@contextmanager
def in_a_terminal(code: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A program in a terminal of 100 x 30 that controls nothing; our side of it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield ours, process
    finally:
        process.kill()
        process.wait()
        with suppress(OSError):  # a test may have closed it
            os.close(ours)


def read_until(ours: int, *texts: bytes) -> bytes:
    """What is written to a terminal until all of these came, or for 15 s."""
    written = b""
    end_s = time.monotonic() + 15 * TIME_SCALE
    while not all(text in written for text in texts) and time.monotonic() < end_s:
        if select.select([ours], [], [], 0.1)[0]:
            written += os.read(ours, 65536)
    return written


def test_inline_shows_the_transcript_and_the_prompt_and_not_only_the_keys() -> None:
    code = "from chatrt_tui.main import run; run('ws://127.0.0.1:1', inline=True)"
    with in_a_terminal(code) as (ours, _):
        painted = read_until(ours, _WELCOME.encode(), _PLACEHOLDER.encode())
    assert _WELCOME.encode() in painted
    assert _PLACEHOLDER.encode() in painted
    assert b"\x1b[?1049h" not in painted, "the shell has to stay visible"


def test_a_client_whose_terminal_is_gone_ends_and_does_not_take_a_core_for_ever() -> None:
    with in_a_terminal("from chatrt_tui.main import run; run('ws://127.0.0.1:1')") as (
        ours,
        client,
    ):
        assert _PLACEHOLDER.encode() in read_until(ours, _PLACEHOLDER.encode())
        os.close(ours)
        assert client.wait(timeout=5 * TIME_SCALE) == -signal.SIGHUP
