"""The commands as a person types them, with the real default model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import IO, TYPE_CHECKING, Any

import pytest

from tests.e2e.process import environment
from tests.support import time_scale

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import ModelCache
    from tests.e2e.process import ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]
QUESTION = "What is the capital of France?"
CHATRT = (sys.executable, "-m", "chatrt")


def chatrt(home: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CHATRT, *arguments],
        env=environment(home),
        input=text,
        capture_output=True,
        text=True,
        timeout=100 * time_scale(),
    )


@pytest.fixture
def home(model_cache: ModelCache, tmp_path: Path) -> Path:
    """A home where no server runs."""
    return model_cache.share_with(tmp_path / "elsewhere")


def test_run_answers_paris_in_its_own_process_where_no_server_runs(home: Path) -> None:
    done = chatrt(home, "run", QUESTION, "--temperature", "0", "--stats")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stdout.count("\n") == 1
    assert "TTFT" in done.stderr
    assert "tok/s" in done.stderr


def test_run_asks_the_running_server_and_says_the_same(server: ServerProcess) -> None:
    answer = chatrt(server.home, "run", QUESTION, "--temperature", "0")
    assert "Paris" in answer.stdout
    assert answer.stderr == ""
    piped = chatrt(server.home, "run", "-", "--temperature", "0", "--json", text=QUESTION)
    document: dict[str, Any] = json.loads(piped.stdout)
    assert document["text"] == answer.stdout.rstrip("\n")
    assert document["status"] == "completed"
    assert document["usage"]["output_tokens"] > 3
    assert document["chatrt"]["ttft_ms"] > 0


def test_a_reader_that_has_enough_is_no_traceback(server: ServerProcess) -> None:
    running = subprocess.Popen(
        [*CHATRT, "run", "Count to fifty.", "-n", "60", "--temperature", "0"],
        env=environment(server.home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert len(running.stdout.read(5)) == 5
        running.stdout.close()  # what `| head -c 5` does
        assert running.stderr.read() == b""
    assert running.returncode == 1


def test_ctrl_c_ends_run_with_130_and_the_server_goes_on(server: ServerProcess) -> None:
    running = subprocess.Popen(
        [*CHATRT, "run", "Count to a thousand.", "-n", "900", "--temperature", "0"],
        env=environment(server.home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with running:
        first = _read_some(running.stdout)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30 * time_scale())
    assert first
    assert running.returncode == 130
    assert b"Traceback" not in said
    assert server.get("/ready").status == 200


def _read_some(stream: IO[bytes] | None) -> bytes:
    assert stream is not None
    return stream.read(1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("run", ""), "empty"),
        (("run", "x", "--temperature", "-1"), "-1"),
        (("run", "x", "--temperature", "hot"), "--temperature"),
        (("run", "x", "--model", "nonsense"), "nonsense"),
        (("run", "x", "--top-p", "7"), "7"),
        (("serve", "nonsense"), "nonsense"),
        (("serve", "--port", "99999"), "99999"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_a_wrong_command_line_is_a_sentence_and_exit_status_2(
    arguments: tuple[str, ...], named: str, home: Path
) -> None:
    done = chatrt(home, *arguments)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_models_doctor_and_config_describe_what_is_there(server: ServerProcess) -> None:
    models = json.loads(chatrt(server.home, "models", "--json").stdout)
    (default,) = [one for one in models if one["default"]]
    assert default["present"]
    doctor = json.loads(chatrt(server.home, "doctor", "--json").stdout)
    assert doctor["server"]["url"] == server.url
    assert doctor["model"]["state"] == "present"
    config = chatrt(server.home, "config")
    assert config.returncode == 0
    assert "max_output_tokens" in config.stdout
