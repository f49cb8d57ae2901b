from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chatrt.bench import own_server as module
from chatrt.bench.own_server import own_server
from chatrt.errors import ServerUnavailable
from chatrt.launch import Endpoint, ServerRecord
from chatrt.paths import Paths
from chatrt.settings import Settings


@pytest.fixture
def paths(chatrt_home: Path) -> Paths:
    found = Paths.find({"CHATRT_HOME": str(chatrt_home)})
    found.config.mkdir(parents=True)
    found.config_file.write_text("threads = 1\n", encoding="utf-8")
    return found


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def start_fake(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, Paths]]:
    """No process is started; what would have been is listed."""
    started: list[tuple[Settings, Paths]] = []

    def attach(_: str, settings: Settings, own: Paths, **__: object) -> Endpoint:
        started.append((settings, own))
        return Endpoint("ws://127.0.0.1:1", "key")

    monkeypatch.setattr(module, "attach_or_start", attach)
    return started


def hear_nothing(_: str) -> None:
    pass


def test_data_and_state_are_its_own_and_cache_and_config_are_shared(
    paths: Paths, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = start_fake(monkeypatch)
    with own_server("m", Settings(), paths, report=hear_nothing, served_name="m"):
        ((settings, own),) = started
        assert own.cache.resolve() == paths.cache.resolve()
        assert own.config_file.read_text(encoding="utf-8") == "threads = 1\n"
        for folder in (own.data, own.state):
            assert folder.is_relative_to(temporary)
        assert settings.port == 0
        assert settings.api_key_file == own.api_key
    assert list(temporary.iterdir()) == []
    assert paths.cache.is_dir()
    assert paths.config_file.exists()


def test_the_folders_go_also_when_the_measurement_fails(
    paths: Paths, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_fake(monkeypatch)
    with (
        pytest.raises(ZeroDivisionError),
        own_server("m", Settings(), paths, report=hear_nothing, served_name="m"),
    ):
        raise ZeroDivisionError
    assert list(temporary.iterdir()) == []


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(
    paths: Paths, temporary: Path
) -> None:
    missing = str(temporary / "missing.gguf")
    with (
        pytest.raises(ServerUnavailable, match=r"the server could not start: .*missing\.gguf"),
        own_server(missing, Settings(), paths, report=hear_nothing, served_name=missing),
    ):
        pass
    assert list(temporary.iterdir()) == []
    assert not paths.state.exists()
    assert os.environ["CHATRT_HOME"] == str(paths.state.parent)


def test_a_restart_kills_the_server_and_starts_it_on_the_same_folders(
    paths: Paths, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = start_fake(monkeypatch)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with own_server("m", Settings(), paths, report=hear_nothing, served_name="m") as server:
        own = started[0][1]
        record = ServerRecord(child.pid, "ws://127.0.0.1:1", "m", 0.0, "0")
        own.state.mkdir(parents=True, exist_ok=True)
        own.server_record.write_bytes(msgspec.json.encode(record))
        server.restart()
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)
    assert [one[1] for one in started] == [own, own]
    assert child.stdin is not None
    child.stdin.close()
    child.wait()
    assert list(temporary.iterdir()) == []


def test_a_server_that_is_not_there_is_not_started_again(
    paths: Paths, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_fake(monkeypatch)
    with (
        own_server("m", Settings(), paths, report=hear_nothing, served_name="m") as server,
        pytest.raises(ServerUnavailable, match="does not run"),
    ):
        server.restart()


def test_further_arguments_end_the_command_line(
    paths: Paths, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[list[str]] = []

    def attach(model: str, settings: Settings, _: Paths, **given: Any) -> Endpoint:
        lines.append(given["command"](model, settings, 0))
        return Endpoint("ws://127.0.0.1:1", "key")

    monkeypatch.setattr(module, "attach_or_start", attach)
    extra = ("--max-gap-ms", "20")
    with own_server("m", Settings(), paths, report=hear_nothing, served_name="m", arguments=extra):
        assert tuple(lines[0][-2:]) == extra
        assert "serve" in lines[0]


def test_kv_pages_lie_in_its_own_folder_although_the_cache_is_shared(
    paths: Paths, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[list[str]] = []

    def attach(model: str, settings: Settings, _: Paths, **given: Any) -> Endpoint:
        lines.append(given["command"](model, settings, 0))
        return Endpoint("ws://127.0.0.1:1", "key")

    monkeypatch.setattr(module, "attach_or_start", attach)
    with own_server("m", Settings(), paths, report=hear_nothing, served_name="m"):
        folder = Path(lines[0][lines[0].index("--kv-dir") + 1])
        assert folder.is_relative_to(temporary)
        assert not folder.resolve().is_relative_to(paths.cache.resolve())
