from __future__ import annotations

import os
import subprocess
import sys

from textual import events
from textual._xterm_parser import XTermParser

from chatrt_tui.main import understand_alt_enter

TIME_SCALE = float(os.environ.get("CHATRT_TEST_TIME_SCALE", "1"))


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
