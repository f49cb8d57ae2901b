"""`chatrt bench peers` and `bench histories --peer` as a person runs them."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from typer.testing import CliRunner

from chatrt.bench.histories import HistoriesOptions
from chatrt.bench.histories_peer import LlamaPeer
from chatrt.cli.main import app
from chatrt.errors import InvalidValue
from chatrt.launch import find_server
from chatrt.paths import Paths
from tests.chatrt.bench_peers_support import (
    PYTHON,
    bare_python,
    install_fake_llama,
    write_tiny_model,
)
from tests.support import share_kernels

if TYPE_CHECKING:
    from typer.testing import Result

    from tests.conftest import ModelCache

runner = CliRunner()
HERE = ("--peer-python", sys.executable)
QUICK = (
    *("--histories", "64,128", "--repetitions", "1", "--prefill-tokens", "96"),
    # So many that not all of them come in one piece, however busy the machine is.
    *("--decode-tokens", "64", "--message-words", "3", "--think-ms", "0"),
)
SHORT = HistoriesOptions(histories=(64,), repetitions=1, message_words=3, max_output_tokens=4)


async def invoke(*arguments: str) -> Result:
    return await asyncio.to_thread(runner.invoke, app, ["bench", *arguments])


def last_line(output: str) -> Any:
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--histories", "260,x"), "--histories is '260,x'"),
        (("--model", "no-such-model"), "no model"),
    ],
)
async def test_arguments_that_make_no_sense_exit_with_2(
    arguments: tuple[str, ...], sentence: str
) -> None:
    result = await invoke("peers", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stdout == ""


async def test_a_model_that_is_not_fetched_yet_is_said_with_the_command_that_fetches_it() -> None:
    result = await invoke("peers", *HERE)
    assert result.exit_code == 2
    assert (
        "chatrt: bench peers needs the model's file on this machine: chatrt pull" in result.stderr
    )


async def test_an_interpreter_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    result = await invoke("peers", "--model", str(model), "--peer-python", "/nowhere/python")
    assert result.exit_code == 2
    assert result.stderr.startswith("chatrt: --peer-python is /nowhere/python, which cannot be run")


async def test_no_peer_at_all_is_one_sentence_that_says_how_they_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(tmp_path / "model")
    bare = bare_python(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    result = await invoke("peers", "--model", str(model), "--peer-python", str(bare))
    assert result.exit_code == 2
    assert result.stderr.startswith("chatrt: there is no peer to measure: llama.cpp is left out")
    assert "make bench-peers installs the peers" in result.stderr
    assert result.stdout == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_fresh_server_and_transformers_are_held_side_by_side_and_ended(
    tmp_path: Path, chatrt_home: Path
) -> None:
    share_kernels(chatrt_home)
    model = write_tiny_model(tmp_path / "model")
    file = tmp_path / "a.json"
    where = ("--model", str(model), *HERE, "--save", str(file))
    result = await invoke("peers", *QUICK, *where)
    assert result.exit_code == 0, result.stderr
    assert "transformers ÷ chatrt" in result.stdout
    document = last_line(result.stdout)
    assert document["benchmark"] == "peers"
    assert document["device"] == "cpu"
    for name in ("decode", "prefill_96", "ttft_cold", "ttft_warm"):
        ratio = document["ratio"][name]
        assert ratio["transformers"]["n"] >= 1
        assert ratio["transformers"]["min"] > 0
        assert ratio["llama_cpp"] is None
    assert list(document["by_history"]) == ["64", "128"]
    assert document["gap_ms"]["chatrt"]["beside_a_prompt"]["n"] >= 1
    assert document["gap_ms"]["transformers"] is None
    assert any("llama.cpp" in line for line in document["left_out"])
    assert document["versions"]["peers"]["transformers"]["torch"]
    assert len(document["samples"]["turns"]) == 13
    assert document["samples"]["streams"]
    assert find_server(Paths.find({"CHATRT_HOME": str(chatrt_home)})) is None
    compared = await invoke("peers", "--compare", str(file), str(file))
    assert compared.exit_code == 0, compared.stderr
    assert last_line(compared.stdout)["entries"]["ratio.decode.transformers.median"]["ratio"] == 1.0


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_ctrl_c_while_a_peer_computes_prints_what_had_ended_and_leaves_no_process(
    tmp_path: Path, model_cache: ModelCache, chatrt_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_cache.share_with(chatrt_home)
    fake = tmp_path / "fake"
    install_fake_llama(fake, monkeypatch)
    monkeypatch.setenv("FAKE_LLAMA_HANGS_AT", "0.128:")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "chatrt", "bench", "peers", *QUICK, "--no-gaps", "--per-round"),
        *HERE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    while not (fake / "hanging").exists():
        assert process.returncode is None
        await asyncio.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = await process.communicate()
    assert process.returncode == 130, stderr
    assert b"Traceback" not in stderr
    assert b"Interrupted" in stdout
    assert b"Every turn, by round" in stdout
    document = last_line(stdout.decode())
    assert document["interrupted"] is True
    # The first length had ended in all of them, the second one not yet in this one.
    rows = document["by_history"]
    assert rows["64"]["ratio"]["ttft_warm"]["llama_cpp"]["n"] == 1
    assert "128" not in rows or rows["128"]["ratio"]["ttft_cold"]["llama_cpp"]["n"] == 0
    assert document["gap_ms"]["chatrt"] is None
    assert find_server(Paths.find({"CHATRT_HOME": str(chatrt_home)})) is None
    workers = [one for one in psutil.process_iter(["cmdline"]) if _is_worker(one, fake)]
    assert workers == []


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_peer_that_is_lost_on_the_way_is_no_success(
    model_cache: ModelCache, tmp_path: Path, chatrt_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_cache.share_with(chatrt_home)
    install_fake_llama(tmp_path / "fake", monkeypatch)
    monkeypatch.setenv("FAKE_LLAMA_CRASHES_AT", "0.128:")
    result = await invoke("peers", *QUICK, "--no-gaps", *HERE)
    assert result.exit_code == 1
    assert "not all peers that are installed came to the end: llama.cpp" in result.stderr
    document = last_line(result.stdout)
    assert document["by_history"]["64"]["ratio"]["ttft_warm"]["llama_cpp"]["n"] == 1


def _is_worker(process: psutil.Process, fake: Path) -> bool:
    """Whether it is a peer's process of this test, by its environment."""
    try:
        is_one = any("peers_worker.py" in part for part in process.info["cmdline"] or ())
        return is_one and process.environ().get("PYTHONPATH") == str(fake)
    except psutil.Error:
        return False


def test_llama_cpp_beside_histories_is_measured_in_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_llama(tmp_path / "fake", monkeypatch)
    peer = LlamaPeer(Path("m.gguf"), SHORT, python=PYTHON, num_threads=1)
    try:
        peer.measure(64, 0)
        (sample,) = peer.samples
        assert (sample.history, sample.history_tokens) == (64, 13)
        assert sample.cold_ms >= 0
        assert sample.ttft_ms >= 0
    finally:
        peer.close()
    # It is gone: what is asked now costs nothing but its own figures.
    peer.measure(64, 1)
    assert len(peer.samples) == 1
    assert peer.failure is not None
    assert peer.failure.startswith("llama.cpp's process ended with")


def test_histories_need_a_gguf_file_and_the_package_for_their_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(InvalidValue, match="--peer needs a GGUF file, the model is"):
        LlamaPeer(tmp_path, SHORT, python=PYTHON, num_threads=1)
    bare = bare_python(tmp_path)
    with pytest.raises(
        InvalidValue, match=r"--peer needs llama-cpp-python, which the peers' Python lacks"
    ):
        LlamaPeer(Path("m.gguf"), SHORT, python=bare, num_threads=1)
