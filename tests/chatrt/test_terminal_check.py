"""The script that times the terminal client: it measures the real one, and tells what it missed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals"),
]
SCRIPT = Path(__file__).parents[2] / "scripts" / "terminal_check.py"


def test_every_figure_of_the_terminal_check_is_measured_and_held_against_its_bar() -> None:
    command = [sys.executable, str(SCRIPT), "--samples", "10", "--pairs", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    lines = json.loads(ended.stdout.splitlines()[-1])["lines"]
    assert [line["n"] for line in lines] == [1, 10, 2, 2]
    assert all(line["value"] > 0 for line in lines)
    missed = [line for line in lines if line["value"] > line["at_most"]]
    assert ended.returncode == bool(missed)
    assert ended.stdout.count("MISSED") == len(missed)
