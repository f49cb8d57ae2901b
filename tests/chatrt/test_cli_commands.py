from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import chatrt_tui.main
from chatrt.api_keys import ensure_api_keys
from chatrt.cli import chat, common
from chatrt.cli.main import app
from chatrt.launch import Endpoint, register_server
from chatrt.paths import Paths
from chatrt.settings import DEFAULT_MODEL, Settings, describe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

runner = CliRunner()


@pytest.fixture(autouse=True)
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    for name in [name for name in os.environ if name.startswith("CHATRT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CHATRT_HOME", str(tmp_path))
    return Paths.find({"CHATRT_HOME": str(tmp_path)})


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner's pipes count as a terminal."""
    monkeypatch.setattr(common, "require_terminal", lambda: None)


@pytest.fixture
def typing_ahead() -> list[bool]:
    """What each run of the terminal client was told about typing ahead."""
    return []


@pytest.fixture
def chats(
    monkeypatch: pytest.MonkeyPatch, typing_ahead: list[bool]
) -> list[tuple[str, str | None, bool]]:
    """Each run of the terminal client, which is not really started."""
    seen: list[tuple[str, str | None, bool]] = []

    def run(url: str, api_key: str | None = None, *, inline: bool = False, **options: bool) -> None:
        seen.append((url, api_key, inline))
        typing_ahead.append(options["typing_ahead"])

    monkeypatch.setattr(chatrt_tui.main, "run", run)
    return seen


def output(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == 0, result.stderr
    return result.stdout


def json_output(*arguments: str) -> Any:
    return json.loads(output(*arguments))


def configure(paths: Paths, text: str) -> None:
    paths.config.mkdir(parents=True, exist_ok=True)
    paths.config_file.write_text(text, encoding="utf-8")


# models, pull


def test_models_marks_the_default_and_what_is_present(paths: Paths) -> None:
    (paths.cache / "models").mkdir(parents=True)
    (paths.cache / "models" / "own.gguf").write_bytes(b"x" * 2000)
    configure(paths, "model = 'own'\n")
    (line,) = [one for one in output("models").splitlines() if one.startswith("*")]
    assert line.split() == ["*", "own", "2.0", "kB", str(paths.cache / "models" / "own.gguf")]
    listed = {one["name"]: one for one in json_output("models", "--json")}
    assert listed["own"] == {
        "name": "own",
        "default": True,
        "present": True,
        "bytes": 2000,
        "path": str(paths.cache / "models" / "own.gguf"),
    }
    assert not listed[DEFAULT_MODEL]["present"]


def model_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "top_k": 7, "top_p": 0.5}', encoding="utf-8"
    )
    return folder


def test_pull_says_where_a_present_model_lies_and_is_quiet_on_request(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    assert output("pull", str(folder)) == f"tiny: {folder} (1.0 kB)\n"
    assert output("pull", str(folder), "--quiet-if-present") == ""


def test_pull_without_a_terminal_prints_a_line_and_no_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chatrt.models import sources

    fetch = sources.fetch

    def fetch_slowly(source: Any, *, progress: Callable[..., None], **options: Any) -> Any:
        progress(0, 100, "model.safetensors")
        progress(100, 100, "model.safetensors")
        return fetch(source, progress=progress, **options)

    monkeypatch.setattr(sources, "fetch", fetch_slowly)
    folder = model_folder(tmp_path / "tiny")
    result = runner.invoke(app, ["pull", str(folder), "--quiet-if-present"])
    assert result.stderr == "fetching model.safetensors\n"
    assert result.stdout == f"tiny: {folder} (1.0 kB)\n"


def test_pull_of_an_unknown_name_says_what_is_known() -> None:
    result = runner.invoke(app, ["pull", "nonsense"])
    assert result.exit_code == 2
    assert result.stderr.startswith("chatrt: there is no model 'nonsense'")
    assert DEFAULT_MODEL in result.stderr


# config


def test_config_shows_each_value_and_where_it_comes_from(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(paths, "drain_s = '1m'\n[sampling]\ntop_k = 3\n")
    monkeypatch.setenv("CHATRT_PORT", "9")
    shown = json_output("config", "--json")
    assert set(shown["settings"]) == set(describe())
    assert shown["settings"]["port"] == {"value": 9, "origin": "CHATRT_PORT"}
    assert shown["settings"]["drain_s"] == {"value": 60.0, "origin": "config.toml"}
    assert shown["settings"]["host"] == {"value": "127.0.0.1", "origin": "default"}
    assert shown["sampling"]["top_k"] == {"value": 3, "origin": "config.toml"}
    assert shown["sampling"]["temperature"] == {"value": 0.2, "origin": "model"}
    lines = output("config").splitlines()
    assert lines[0] == f"# {paths.config_file}"
    table = {line.split()[0]: line.split()[2:] for line in lines if "=" in line}
    assert table["port"] == ["9", "#", "CHATRT_PORT"]
    assert table["host"] == ['"127.0.0.1"', "#", "default"]
    assert table["store"] == ["true", "#", "default"]
    assert any(line.startswith("# threads ") for line in lines)


def test_what_config_prints_is_a_config_file(paths: Paths) -> None:
    printed = output("config")
    configure(paths, printed)
    again = json_output("config", "--json")
    assert {one["origin"] for one in again["sampling"].values()} == {"config.toml"}
    assert again["settings"]["port"] == {"value": 8642, "origin": "config.toml"}
    assert again["settings"]["threads"] == {"value": None, "origin": "default"}


def test_config_shows_what_a_local_model_recommends(paths: Paths, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    configure(paths, f"model = '{folder}'\n")
    sampling = json_output("config", "--json")["sampling"]
    assert sampling["top_k"] == {"value": 7, "origin": "model"}
    assert sampling["temperature"] == {"value": 1.0, "origin": "default"}


def test_config_of_a_model_that_does_not_exist_still_shows_the_settings(paths: Paths) -> None:
    configure(paths, "model = 'nonsense'\n")
    assert re.search(r'^model +=  *"nonsense"', output("config"), re.MULTILINE)


# doctor


def test_doctor_finds_machine_versions_folders_and_says_what_is_missing(paths: Paths) -> None:
    found = json_output("doctor", "--json")
    assert list(found) == ["machine", "device", "kernels", "model", "versions", "folders", "server"]
    assert found["machine"]["ram_bytes"] > 1 << 28
    assert found["model"] == {
        "name": DEFAULT_MODEL,
        "path": None,
        "state": "not fetched; chatrt pull does it",
    }
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["folders"]["state"] == str(paths.state)
    assert found["server"]["running"] is False


def test_doctor_shows_a_broken_model_as_a_sentence_and_goes_on(
    paths: Paths, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    configure(paths, f"model = '{broken}'\n")
    found = json_output("doctor", "--json")
    assert "broken.gguf" in found["model"]["state"]
    assert "server" in found


def test_doctor_plans_the_memory_of_a_present_model(paths: Paths, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # 2 layers, keys and values, 16 slots, 2 heads of 16, 2 bytes: 4 KiB a page
    configure(paths, f"model = '{folder}'\ndevice = 'cpu'\nkv_memory_bytes = '1MiB'\n")
    plan = json_output("doctor", "--json")["model"]["memory_plan"]
    assert any(line.startswith("KV cache: 256 pages of 16 tokens") for line in plan)
    text = output("doctor")
    assert all(line in text for line in plan)
    assert "ram  " in text


def test_doctor_plans_for_pytorch_where_nothing_can_compile_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    found = json_output("doctor", "--json")
    assert (found["device"]["kernels"], found["device"]["kv_dtype"]) == ("reference", "float32")
    assert found["kernels"]["library"].startswith("cannot be compiled here")


def test_doctor_shows_the_machine_also_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = json_output("doctor", "--json")
    assert found["device"]["state"].startswith("torch is not installed")


# stop, chat


def test_stop_without_a_server_says_so(paths: Paths) -> None:
    assert output("stop") == "no server is running\n"
    register_server(paths, host="127.0.0.1", port=1, model="tiny", started_at=0.0)
    assert output("stop") == "no server is running\n"


def test_chat_attaches_and_passes_address_and_key_on(
    chats: list[tuple[str, str | None, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str | None, float | None]] = []

    def attach(
        model: str | None,
        settings: Settings,
        paths: Paths,
        *,
        report: Callable[[str], None],
        served_name: str | None,
    ) -> Endpoint:
        del paths
        assert served_name == (None if model is None else DEFAULT_MODEL)
        asked.append((model, settings.idle_exit_s))
        report("starting the server")
        return Endpoint("ws://127.0.0.1:1/v1/responses", "secret")

    monkeypatch.setattr(chat, "attach_or_start", attach)
    assert output("chat") == ""
    result = runner.invoke(app, ["chat", DEFAULT_MODEL.upper(), "--idle-exit", "5m", "--inline"])
    assert result.stderr == "starting the server\n"
    assert asked == [(None, None), (DEFAULT_MODEL.upper(), 300.0)]
    assert chats == [
        ("ws://127.0.0.1:1/v1/responses", "secret", False),
        ("ws://127.0.0.1:1/v1/responses", "secret", True),
    ]


@pytest.mark.usefixtures("chats")
def test_typing_ahead_is_on_unless_a_flag_a_variable_or_the_file_turns_it_off(
    paths: Paths, typing_ahead: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "ws://127.0.0.1:9/v1/responses"
    output("chat", address)
    output("chat", address, "--no-typing-ahead")
    monkeypatch.setenv("CHATRT_TYPING_AHEAD", "off")
    output("chat", address)
    output("chat", address, "--typing-ahead")
    monkeypatch.delenv("CHATRT_TYPING_AHEAD")
    configure(paths, "typing_ahead = false\n")
    output("chat", address)
    assert typing_ahead == [True, False, False, True, False]


def test_the_key_of_this_machine_goes_to_this_machine_only(
    paths: Paths, tmp_path: Path, chats: list[tuple[str, str | None, bool]]
) -> None:
    (own,) = ensure_api_keys(paths.api_key)
    (tmp_path / "key").write_text("theirs\n", encoding="utf-8")
    output("chat", "ws://127.0.0.1:9/v1/responses")
    output("chat", "wss://chat.example/v1/responses")
    output("chat", "wss://chat.example/v1/responses", "--api-key-file", str(tmp_path / "key"))
    assert [key for _, key, _ in chats] == [own, None, "theirs"]


def test_chat_with_a_model_that_does_not_exist_starts_nothing(paths: Paths) -> None:
    result = runner.invoke(app, ["chat", "nonsense"])
    assert result.exit_code == 2
    assert result.stderr.startswith("chatrt: there is no model 'nonsense'")
    assert not paths.server_log.exists()


def test_chat_with_a_key_file_that_is_not_there_is_a_usage_error() -> None:
    result = runner.invoke(app, ["chat", "ws://h/", "--api-key-file", "/nowhere/key"])
    assert result.exit_code == 2
    assert result.stderr.startswith("chatrt: the API key file /nowhere/key cannot be read")


def test_chat_in_a_pipe_says_what_to_use_instead() -> None:
    command = (sys.executable, "-m", "chatrt", "chat")
    done = subprocess.run(command, input="hello", capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "chatrt: chatrt chat needs a terminal; in a pipe use: chatrt run PROMPT\n"
    )
    assert done.stdout == ""


def test_chat_pull_models_and_config_never_import_torch(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    code = (
        "import sys, chatrt_tui.app, chatrt_tui.main\n"
        "from chatrt.cli.main import main\n"
        "chatrt_tui.main.run = lambda *_, **__: None\n"
        "import chatrt.cli.common; chatrt.cli.common.require_terminal = lambda: None\n"
        "codes = [main(['chat', 'ws://127.0.0.1:9']), main(['models']), main(['config']),"
        f" main(['pull', {str(folder)!r}]), main(['stop'])]\n"
        "print(codes, [m for m in ('torch', 'transformers') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0] []", done.stderr


def test_sizes_are_in_decimal_units() -> None:
    assert common.size_text(98_200_000) == "98.2 MB"
