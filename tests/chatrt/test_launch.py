from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

import chatrt
from chatrt import launch
from chatrt.api_keys import read_api_keys
from chatrt.errors import ServerUnavailable
from chatrt.launch import Endpoint, attach_or_start, find_server, read_record, stop_server
from chatrt.paths import Paths
from chatrt.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the stand-in server needs signals")

# A stand-in for `chatrt serve`: alive at once, ready a little later, ends on SIGTERM.
_SERVER = """
import signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from chatrt.launch import register_server, unregister_server, write_status
from chatrt.paths import Paths

home, model, port, behaviour = sys.argv[1:5]
paths = Paths.find({"CHATRT_HOME": home})
with open(home + "/starts", "a") as starts:
    starts.write("x")
if behaviour == "dies":
    print("chatrt: an older line")
    print("chatrt: model nonsense is not known", flush=True)
    print("an afterthought", flush=True)
    sys.exit(2)
ready = False

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" or ready else 503)
        self.end_headers()
    def log_message(self, *args):
        pass

server = HTTPServer(("127.0.0.1", int(port)), Handler)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
port = server.server_port
register_server(paths, host="127.0.0.1", port=port, model=model, started_at=time.time())

def load():
    global ready
    for status in ("downloading", "loading weights", "warming up"):
        write_status(paths, status)
        time.sleep(0.2 if behaviour == "slow" else 0.02)
    if behaviour == "hangs":
        return
    ready = True

threading.Thread(target=load, daemon=True).start()
server.serve_forever()
unregister_server(paths)
"""


@dataclasses.dataclass
class Stage:
    """Folders, settings and stand-in servers of one test."""

    paths: Paths
    home: Path
    settings: Settings
    behaviour: str = "works"
    reports: list[str] = dataclasses.field(default_factory=list)

    def command(self, model: str, settings: Settings, port: int) -> list[str]:
        del settings
        return [sys.executable, "-c", _SERVER, str(self.home), model, str(port), self.behaviour]

    def attach(self, model: str | None = None) -> Endpoint:
        return attach_or_start(
            model, self.settings, self.paths, report=self.reports.append, command=self.command
        )

    @property
    def num_starts(self) -> int:
        return len((self.home / "starts").read_text(encoding="utf-8"))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    paths = Paths.find({"CHATRT_HOME": str(tmp_path)})
    stage = Stage(paths, tmp_path, Settings(port=free_port(), model="tiny"))
    yield stage
    if record := read_record(paths):
        try:
            os.kill(record.pid, signal.SIGKILL)
            os.waitpid(record.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def test_a_server_is_started_once_and_then_found(stage: Stage) -> None:
    stage.behaviour = "slow"
    endpoint = stage.attach()
    assert endpoint.url == f"ws://127.0.0.1:{stage.settings.port}/v1/responses"
    assert endpoint.api_key == read_api_keys(stage.paths.api_key)[0]
    assert stage.reports == ["starting the server", "downloading", "loading weights", "warming up"]
    assert stage.attach() == endpoint
    assert stage.num_starts == 1
    record = find_server(stage.paths)
    assert record is not None
    assert (record.model, record.version) == ("tiny", chatrt.__version__)


def test_two_terminals_at_once_get_one_server(stage: Stage) -> None:
    found: list[Endpoint] = []
    threads = [threading.Thread(target=lambda: found.append(stage.attach())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert stage.num_starts == 1


def test_a_server_that_dies_at_start_says_why_in_its_own_sentence(stage: Stage) -> None:
    stage.behaviour = "dies"
    with pytest.raises(ServerUnavailable) as caught:
        stage.attach()
    assert caught.value.message == (
        f"the server could not start: model nonsense is not known (log: {stage.paths.server_log})"
    )


def test_the_sentence_of_an_earlier_start_is_not_shown_again(stage: Stage) -> None:
    stage.paths.logs.mkdir(parents=True)
    stage.paths.server_log.write_text("chatrt: an old error\n", encoding="utf-8")
    with pytest.raises(ServerUnavailable, match="could not start: exit status 1, no word"):
        attach_or_start(
            None,
            stage.settings,
            stage.paths,
            report=stage.reports.append,
            command=lambda *_: [sys.executable, "-c", "raise SystemExit(1)"],
        )


def test_a_program_that_is_not_there_is_one_sentence(stage: Stage) -> None:
    with pytest.raises(ServerUnavailable, match="no-such-program cannot be started"):
        attach_or_start(
            None,
            stage.settings,
            stage.paths,
            report=stage.reports.append,
            command=lambda *_: ["no-such-program"],
        )


def test_a_record_of_a_dead_server_counts_as_none(stage: Stage) -> None:
    stage.attach()
    record = find_server(stage.paths)
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    os.waitpid(record.pid, 0)
    assert read_record(stage.paths) == record
    assert find_server(stage.paths) is None
    stage.attach()
    assert stage.num_starts == 2


def test_a_record_of_a_live_process_that_serves_nothing_counts_as_none(stage: Stage) -> None:
    launch.register_server(
        stage.paths, host="127.0.0.1", port=free_port(), model="tiny", started_at=0.0
    )
    assert find_server(stage.paths) is None
    launch.unregister_server(stage.paths)
    assert read_record(stage.paths) is None


def test_half_a_record_counts_as_none(stage: Stage) -> None:
    stage.paths.state.mkdir(parents=True)
    stage.paths.server_record.write_text('{"pid": 1, "url"', encoding="utf-8")
    assert read_record(stage.paths) is None


def test_a_second_server_leaves_the_first_one_to_be_found(stage: Stage) -> None:
    endpoint = stage.attach()
    second = launch.register_server(
        stage.paths, host="127.0.0.1", port=1, model="other", started_at=time.time()
    )
    assert second.url == endpoint.url
    launch.unregister_server(stage.paths)
    found = find_server(stage.paths)
    assert found is not None
    assert found.url == endpoint.url


def test_a_server_on_the_port_of_one_that_still_drains_is_found_by_clients(stage: Stage) -> None:
    # The draining one's process lives, and its address answers: it is its successor that does.
    stage.attach()
    draining = read_record(stage.paths)
    assert draining is not None
    port = stage.settings.port
    ours = launch.register_server(
        stage.paths, host="127.0.0.1", port=port, model="tiny", started_at=time.time()
    )
    assert ours.pid == os.getpid()
    assert find_server(stage.paths) == ours
    stage.paths.server_record.write_bytes(msgspec.json.encode(draining))  # for the stage to end it


def test_a_server_does_not_take_away_the_record_of_its_successor(stage: Stage) -> None:
    launch.register_server(stage.paths, host="::", port=1, model="tiny", started_at=0.0)
    record = read_record(stage.paths)
    assert record is not None
    assert record.url == "ws://[::1]:1/v1/responses"
    successor = msgspec.structs.replace(record, pid=record.pid + 1)
    stage.paths.server_record.write_bytes(msgspec.json.encode(successor))
    launch.unregister_server(stage.paths)
    assert read_record(stage.paths) == successor
    stage.paths.server_record.unlink()


def test_another_model_than_the_one_that_runs_is_refused_with_both_names(stage: Stage) -> None:
    stage.attach("tiny")
    with pytest.raises(ServerUnavailable, match=r"server for tiny is running .* other was asked"):
        stage.attach("other")
    assert stage.attach(None) == stage.attach("tiny")


def test_a_model_file_is_passed_on_as_an_absolute_path(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stage.home / "m.gguf").write_bytes(b"")
    monkeypatch.chdir(stage.home)
    asked: list[str] = []

    def command(model: str, settings: Settings, port: int) -> list[str]:
        asked.append(model)
        return stage.command("m", settings, port)

    for _ in range(2):
        attach_or_start(
            "m.gguf",
            stage.settings,
            stage.paths,
            report=stage.reports.append,
            served_name="m",
            command=command,
        )
    assert asked == [str(stage.home / "m.gguf")]


def test_a_port_that_another_program_has_is_not_waited_for(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", stage.settings.port)):
        endpoint = stage.attach()
    assert f":{stage.settings.port}/" not in endpoint.url
    assert stage.reports[0] == f"port {stage.settings.port} is taken, another one is used"


def test_a_server_that_does_not_get_ready_is_given_up_and_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.behaviour = "hangs"
    monkeypatch.setattr(launch, "STALL_TIMEOUT_S", 0.5)
    with pytest.raises(ServerUnavailable, match="did not get further than “warming up”"):
        stage.attach()
    assert find_server(stage.paths) is None


def test_a_second_terminal_waits_for_a_server_that_is_still_loading(stage: Stage) -> None:
    stage.behaviour = "slow"
    server = subprocess.Popen(stage.command("tiny", stage.settings, stage.settings.port))
    try:
        while find_server(stage.paths) is None:
            time.sleep(0.02)
        stage.attach()
        assert stage.num_starts == 1
        assert "warming up" in stage.reports
    finally:
        server.kill()
        server.wait()


def test_stop_ends_the_server_and_a_second_stop_finds_none(stage: Stage) -> None:
    stage.attach()
    stopped = stop_server(stage.paths)
    assert stopped is not None
    assert find_server(stage.paths) is None
    assert stop_server(stage.paths) is None


def test_a_long_log_is_moved_aside_at_the_next_start(stage: Stage) -> None:
    stage.paths.logs.mkdir(parents=True)
    stage.paths.server_log.write_bytes(b"x" * (launch.MAX_LOG_BYTES + 1))
    stage.attach()
    aside = stage.paths.server_log.with_name("server.log.1")
    assert aside.stat().st_size == launch.MAX_LOG_BYTES + 1
    assert stage.paths.server_log.stat().st_size < 1000


def test_the_command_line_names_what_was_asked_for() -> None:
    settings = Settings(idle_exit_s=60.0, api_key_file=Path("/keys"))
    command = launch.server_command("tiny", settings, 0)
    assert command[:5] == [sys.executable, "-m", "chatrt", "serve", "tiny"]
    options = dict(zip(command[5::2], command[6::2], strict=True))
    assert options == {
        "--host": "127.0.0.1",
        "--port": "0",
        "--idle-exit": "60.0s",
        "--api-key-file": "/keys",
    }
    default = launch.server_command("tiny", Settings(), 1)
    assert default[default.index("--idle-exit") + 1] == "1800.0s"


def test_launch_imports_no_torch() -> None:
    code = "import sys, chatrt.launch, chatrt.store; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
