"""`chatrt bench step` as a person runs it: tables, the last line, Ctrl+C, bad options."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch
from typer.testing import CliRunner

from chatrt.bench.step import NATIVE_PROBE, NUM_WARM_UP_ROUNDS, TORCH_PROBE
from chatrt.cli.main import app
from chatrt.testing.models import tiny_config
from chatrt.testing.tokenizer import tiny_tokenizer
from tests.chatrt.models_support import random_state, write_safetensors
from tests.support import share_kernels, time_scale

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typer.testing import Result

runner = CliRunner()


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a tokenizer, as files."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = tiny_config(vocab_size=tiny_tokenizer(folder).vocab_size, max_context=512)
    write_safetensors(folder, config, random_state(config))
    return folder


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch, chatrt_home: Path) -> Iterator[None]:
    share_kernels(chatrt_home)
    monkeypatch.setenv("CHATRT_KV_MEMORY_BYTES", "4MiB")
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def invoke(*arguments: str) -> Result:
    return runner.invoke(app, ["bench", "step", *arguments])


@pytest.mark.usefixtures("small_pool")
def test_the_command_prints_tables_and_one_line_of_json_last(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    small = ("--rows", "1,5", "--repeats", "2", "--prefill", "20", "--contexts", "0,100")
    options = ("--model", str(tiny_folder), "--threads", "1", "--seed", "3", "--save", str(file))
    plots = tmp_path / "plots"
    result = invoke(*small, *options, "--plot", str(plots))
    assert result.exit_code == 0, result.stderr
    assert (plots / "step-decode-by-rows-dark.svg").exists()
    assert "Decode of 1 row by context (ms)" in result.stdout
    assert "rounds of warm-up are left out" in result.stdout
    document = json.loads(result.stdout.splitlines()[-1])
    assert document == json.loads(file.read_text(encoding="utf-8"))
    assert document["benchmark"] == "step"
    assert (document["model"], document["num_threads"], document["seed"]) == ("tiny", 1, 3)
    assert document["settings"]["rows"] == [1, 5]
    assert document["warm_up"] == {"excluded": True, "rounds": NUM_WARM_UP_ROUNDS}
    assert document["read_probe"] in (NATIVE_PROBE, TORCH_PROBE)
    for name in ("read_bandwidth_gbs", "step_bytes", "decode_ms", "roofline_fraction", "load_s"):
        assert document[name] > 0, name
    assert document["memory"]["weight_bytes"] > 0
    assert set(document["rows_ms"]) == set(document["rows_ratio"]) == {"1", "5"}
    assert set(document["prefill_tps"]) == {"20"}
    assert set(document["decode_ms_by_context"]) == {"0", "100"}
    assert set(document["overhead_ms"]) == {"greedy", "sampled"}
    assert "stage_ms" in document
    assert document["contended_ratio"] is None
    assert len(document["samples"]["forward_ms"]["rows"]["5"]) == 2
    compared = invoke("--compare", str(file), str(file))
    assert compared.exit_code == 0, compared.stderr
    entries = json.loads(compared.stdout.splitlines()[-1])["entries"]
    assert entries["rows_ms.5"]["ratio"] == 1


@pytest.mark.usefixtures("small_pool")
def test_with_contention_the_speed_beside_a_busy_process_is_there(tiny_folder: Path) -> None:
    small = ("--rows", "1", "--repeats", "1", "--prefill", "0", "--contexts", "0")
    result = invoke(*small, "--contention", "--json", "-m", str(tiny_folder))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    assert json.loads(result.stdout)["contended_ratio"] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--rows", "many"), "--rows is 'many', it must be whole numbers from 1 on"),
        (("--rows", "1,0"), "--rows is '1,0', it must be whole numbers from 1 on"),
        (("--prefill", ""), "--prefill is '', it must be whole numbers from 0 on"),
        (("--contexts", "0;5"), "--contexts is '0;5', it must be whole numbers from 0 on"),
        (("--model", "nobody"), "nobody"),
    ],
)
def test_arguments_that_make_no_sense_exit_with_2(
    arguments: tuple[str, ...], sentence: str
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("chatrt: ")
    assert sentence in result.stderr
    assert result.stdout == ""


@pytest.mark.usefixtures("small_pool")
def test_more_rows_than_a_step_has_are_one_sentence(tiny_folder: Path) -> None:
    result = invoke("--rows", "1,9999", "-m", str(tiny_folder))
    assert result.exit_code == 2
    assert "chatrt: --rows has 9999, a step holds 512 rows" in result.stderr


@pytest.mark.usefixtures("small_pool")
@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_ctrl_c_prints_what_was_measured(tiny_folder: Path) -> None:
    arguments = ("--repeats", "1000000", "--json", "-m", str(tiny_folder))
    command = [sys.executable, "-m", "chatrt", "bench", "step", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while b"warming up" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(3 * time_scale())
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    document = json.loads(stdout)
    assert document["interrupted"] is True
    assert document["decode_ms"] > 0
    assert document["prefill_ms"] == {}
