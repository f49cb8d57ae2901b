"""`chatrt kernels` and the kernels' section of `chatrt doctor`, on small sources of our own."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from chatrt.cli.main import app
from chatrt.paths import Paths
from chatrt_kernels.cpu import build
from chatrt_kernels.cpu.binding import NativeLibrary
from tests.chatrt_kernels.cpu_support import NATIVE_PATH, compiled

if TYPE_CHECKING:
    from pathlib import Path

runner = CliRunner()
needs_compiler = pytest.mark.skipif(
    build.find_compiler(os.environ) is None and "CI" not in os.environ,
    reason="there is no C++ compiler",
)


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands compile these, in a second, instead of the kernels."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tiny.cpp").write_text("int tiny() { return 1; }\n", encoding="utf-8")
    for function in (build.built_library, build.ensure_library):
        monkeypatch.setattr(build, function.__name__, partial(function, source=folder))
    return folder


@pytest.fixture
def paths(chatrt_home: Path) -> Paths:
    return Paths.find({"CHATRT_HOME": str(chatrt_home)})


def doctor() -> dict[str, Any]:
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)["kernels"]
    return found


@needs_compiler
def test_kernels_are_compiled_into_the_cache_once_and_then_only_named(paths: Paths) -> None:
    first = runner.invoke(app, ["kernels"])
    (library,) = paths.kernels.iterdir()
    assert first.exit_code == 0
    assert first.stdout == f"CPU kernels: {library}\n"
    assert first.stderr == "compiling the CPU kernels\n"
    second = runner.invoke(app, ["kernels"])
    assert (second.stdout, second.stderr) == (first.stdout, "")


@needs_compiler
def test_quiet_if_present_prints_nothing_when_there_is_nothing_to_do(paths: Paths) -> None:
    assert runner.invoke(app, ["kernels", "--quiet-if-present"]).stdout != ""
    again = runner.invoke(app, ["kernels", "--quiet-if-present"])
    assert (again.exit_code, again.stdout, again.stderr) == (0, "", "")


@needs_compiler
def test_a_source_that_does_not_compile_is_a_sentence_and_no_failure(source: Path) -> None:
    (source / "tiny.cpp").write_text("nonsense\n", encoding="utf-8")
    result = runner.invoke(app, ["kernels"])
    assert result.exit_code == 0
    assert "chatrt: compiling the CPU kernels failed: " in result.stderr
    assert "tiny.cpp:1" in result.stderr
    assert result.stdout == ""


def test_without_a_compiler_set_up_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    result = runner.invoke(app, ["kernels", "--quiet-if-present"])
    assert result.exit_code == 0
    assert result.stderr.startswith("chatrt: no C++ compiler was found")
    assert result.stderr.count("\n") == 1
    found = doctor()
    assert found["compiler"] is None
    assert found["library"].startswith("cannot be compiled here")


@needs_compiler
def test_doctor_says_whether_the_kernels_are_compiled(paths: Paths) -> None:
    before = doctor()
    assert before["library"].startswith("not compiled yet")
    assert before["compiler"] == str(build.find_compiler(os.environ))
    assert before["version"]
    assert "-ffp-contract=off" in before["flags"]
    runner.invoke(app, ["kernels"])
    (library,) = paths.kernels.iterdir()
    after = doctor()
    assert after["library"] == str(library)
    assert after["instructions"] == f"{library} has no function chatrt_path"  # not the kernels


def test_doctor_names_the_instructions_of_the_compiled_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = compiled(NATIVE_PATH)
    monkeypatch.setattr(build, "built_library", lambda _folder: kernels)
    assert doctor()["instructions"] == NativeLibrary(kernels).instruction_path
