"""`chatrt bench terminal` against the default model: real keys, real painting."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from chatrt.bench.terminal import CASES
from tests.e2e.process import environment
from tests.support import time_scale

if TYPE_CHECKING:
    from tests.e2e.process import ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_enter_to_the_first_painted_character_is_measured_in_a_terminal(
    server: ServerProcess,
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "chatrt", "bench", "terminal", "--repetitions", "1"),
            *("--url", server.url, "--api-key-file", str(server.paths.api_key), "--json"),
        ],
        env=environment(server.home),
        capture_output=True,
        text=True,
        timeout=60 * time_scale(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["prompt_ms"]["n"] == 1
    assert document["prompt_ms"]["p50"] > 0
    for case in CASES:
        painted, own = document["painted_ttft_ms"][case], document["client_ttft_ms"][case]
        assert painted["n"] == own["n"] == 1
        assert painted["p50"] > own["p50"] > 0
    assert str(server.paths.api_key.read_text().strip()) not in done.stdout
