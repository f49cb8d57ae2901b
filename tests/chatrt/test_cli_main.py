from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import chatrt
from chatrt.cli import stop
from chatrt.cli.main import COMMANDS, app, main
from chatrt.errors import InvalidValue, ModelFileError, SettingsError
from chatrt.settings import CLIENT_NAMES, describe

if TYPE_CHECKING:
    from pathlib import Path

runner = CliRunner()
TIME_SCALE = float(os.environ.get("CHATRT_TEST_TIME_SCALE", "1"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("CHATRT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CHATRT_HOME", str(tmp_path))
    return tmp_path


def stop_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def raises(*_: object) -> None:
        raise error

    monkeypatch.setattr(stop, "stop_server", raises)


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (SettingsError("port is 'x'"), 2, "chatrt: port is 'x'\n"),
        (InvalidValue("top_p is 2"), 2, "chatrt: top_p is 2\n"),
        (ModelFileError("the file is truncated"), 1, "chatrt: the file is truncated\n"),
        (KeyboardInterrupt(), 130, "\n"),
        (OSError(28, "No space left on device"), 1, "chatrt: [Errno 28] No space left on device\n"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            1,
            "chatrt: the serving part of chatrt is not installed (torch is missing): "
            "install it with its extra [serve], as `make chat` does\n",
        ),
        (
            ValueError("a bug"),
            1,
            "chatrt: internal error: ValueError: a bug (CHATRT_DEBUG=1 shows where)\n",
        ),
    ],
)
def test_an_error_becomes_a_sentence_on_stderr_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, sentence: str
) -> None:
    stop_raises(monkeypatch, error)
    result = runner.invoke(app, ["stop"])
    assert (result.exit_code, result.stderr, result.stdout) == (code, sentence, "")


def test_with_chatrt_debug_the_error_itself_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_raises(monkeypatch, ValueError("a bug"))
    monkeypatch.setenv("CHATRT_DEBUG", "1")
    assert isinstance(runner.invoke(app, ["stop"]).exception, ValueError)


@pytest.mark.parametrize("arguments", [["frob"], ["stop", "now"], ["models", "--frob"]])
def test_a_command_line_that_makes_no_sense_exits_with_2(arguments: list[str]) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr


def test_main_returns_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"chatrt {chatrt.__version__}\n"
    assert main(["frob"]) == 2


def test_every_command_stands_in_the_help_with_a_sentence_that_is_not_cut() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2].replace("_", "-")
        (line,) = [one for one in result.stdout.splitlines() if one.startswith(f"  {name} ")]
        assert line.endswith(".")
        assert not line.endswith("...")


def test_a_bad_config_file_is_one_sentence_for_every_command_that_reads_it(home: Path) -> None:
    (home / "config").mkdir()
    (home / "config" / "config.toml").write_text("prot = 1\n", encoding="utf-8")
    for name in ("models", "config", "doctor", "pull", "chat"):
        result = runner.invoke(app, [name])
        assert result.exit_code == 2
        assert result.stderr.startswith("chatrt: prot is not a setting")
        assert result.stderr.count("\n") == 1


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chatrt", *arguments],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def test_python_dash_m_chatrt_is_the_command_line() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"chatrt {chatrt.__version__}\n")
    assert run("frob").returncode == 2


def test_every_setting_is_a_flag_of_serve_or_of_chat_with_its_own_words() -> None:
    helps = {
        name: " ".join(runner.invoke(app, [name, "--help"]).stdout.split())
        for name in ("serve", "chat")
    }
    for name, setting in describe().items():
        text = helps["chat" if name in CLIENT_NAMES else "serve"]
        flag = "model" if name == "model" else f"--{name.removesuffix('_s').replace('_', '-')}"
        assert f" {flag} " in text
        assert setting.doc[1:] in text


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    # Processor time, not wall time: a busy machine says nothing about what is imported.
    code = (
        "import sys, time; from chatrt.cli.main import main; main(['--help']);"
        "print([m for m in ('torch', 'textual', 'websockets', 'rich') if m in sys.modules]);"
        "print(time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy, cpu_s = done.stdout.splitlines()[-2:]
    assert heavy == "[]"
    assert float(cpu_s) < 0.3 * TIME_SCALE


@pytest.mark.skipif(os.name != "posix", reason="pipes break differently on Windows")
def test_a_reader_that_goes_away_is_no_reason_for_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "chatrt", "models"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
