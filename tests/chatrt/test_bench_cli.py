"""`chatrt bench` as a person runs it: tables, the last line, Ctrl+C, files."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from chatrt.cli.bench_output import show
from chatrt.cli.main import app
from chatrt.launch import find_server
from chatrt.paths import Paths
from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from tests.support import time_scale

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

    from tests.conftest import ModelCache

runner = CliRunner()
ANSWER = ScriptedAnswer(
    ("a", "b", "c"),
    timing={"ttft_ms": 5.0, "stages": {"queue_ms": 1.0}, "tpot_ms": 2.0},
    usage={"input_tokens": 20, "output_tokens": 3},
)


async def invoke(*arguments: str) -> Result:
    return await asyncio.to_thread(runner.invoke, app, ["bench", *arguments])


async def run_sessions(server: ScriptedServer, *arguments: str) -> Result:
    small = ("--sessions", "2", "--turns", "2")
    return await invoke("sessions", "--url", server.url, *small, *arguments)


def last_line(output: str) -> Any:
    return json.loads(output.splitlines()[-1])


async def test_a_table_comes_first_and_one_line_of_json_last() -> None:
    async with ScriptedServer([ANSWER]) as server:
        result = await run_sessions(server)
    assert result.exit_code == 0, result.stderr
    assert "Time to first token (ms)" in result.stdout
    document = last_line(result.stdout)
    assert document["benchmark"] == "sessions"
    assert {kind: d["n"] for kind, d in document["ttft_ms"].items()} == {
        "cold": 2,
        "warm": 2,
        "forked": 2,
        "restored": 0,
    }
    assert document["model"] == "scripted"
    assert (document["failed"], document["not_run"], document["interrupted"]) == (0, 0, False)
    assert document["warm_up"] == {"excluded": True, "turns": 3}
    assert len(document["samples"]) == 6
    assert document["samples"][0]["gaps_ms"]


def test_a_line_on_a_terminal_leaves_out_what_is_long_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    document = {"benchmark": "b", "samples": [{"ttft_ms": 1.5}] * 100, "n": 100}
    show("the table", document, as_json=False, save=None)
    shown = last_line(capsys.readouterr().out)
    assert shown == {"benchmark": "b", "n": 100, "left_out": ["samples"]}


async def test_json_alone_is_printed_on_request_and_saved_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    async with ScriptedServer([ANSWER]) as server:
        result = await run_sessions(server, "--json", "--save", str(file), "--no-warm-up")
    assert result.stdout.count("\n") == 1
    assert json.loads(result.stdout) == json.loads(file.read_text(encoding="utf-8"))
    assert json.loads(result.stdout)["warm_up"]["turns"] == 0


async def test_the_options_reach_the_server_and_the_document() -> None:
    arguments = ("--seed", "5", "-n", "7", "--no-fork", "--input-tokens", "3-5", "--think-ms", "1")
    async with ScriptedServer([ANSWER]) as server:
        result = await run_sessions(server, *arguments, "--no-warm-up")
        creates = server.creates()
    assert len(creates) == 4
    assert {create["max_output_tokens"] for create in creates} == {7}
    document = last_line(result.stdout)
    assert document["seed"] == 5
    assert document["settings"]["input_tokens"] == {"least": 3, "most": 5}
    assert document["settings"]["think_ms"] == {"least": 1, "most": 1}


async def test_every_turn_is_listed_with_per_session() -> None:
    async with ScriptedServer([ANSWER]) as server:
        result = await run_sessions(server, "--per-session")
    assert "Turns, as session.turn" in result.stdout


async def test_the_key_comes_from_its_file(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("secret\n", encoding="utf-8")
    async with ScriptedServer([ANSWER], api_key="secret") as server:
        refused = await run_sessions(server)
        served = await run_sessions(server, "--api-key-file", str(key_file))
    assert refused.exit_code != 0
    assert served.exit_code == 0
    assert "secret" not in served.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--input-tokens", "many"), "--input-tokens is 'many'"),
        (("--model", "m"), "--url and --model exclude each other"),
    ],
)
async def test_arguments_that_make_no_sense_exit_with_2(
    arguments: tuple[str, ...], sentence: str
) -> None:
    result = await invoke("sessions", "--url", "ws://127.0.0.1:1", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"chatrt: {sentence}")


async def test_no_server_is_one_sentence() -> None:
    async with ScriptedServer([ANSWER]) as server:
        url = server.url
    result = await invoke("sessions", "--url", url)
    assert result.exit_code == 1
    assert result.stderr.startswith("chatrt: no server answers at ")
    assert result.stdout == ""


async def test_ctrl_c_prints_what_was_measured() -> None:
    slow = ("--think-ms", "60000", "--sessions", "1", "--turns", "2", "--no-warm-up")
    async with ScriptedServer([ANSWER]) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "chatrt", "bench", "sessions", "--url", server.url, *slow),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        while not server.creates():  # noqa: ASYNC110 - the server tells nobody of a request
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3 * time_scale())
        process.send_signal(signal.SIGINT)
        stdout, stderr = await process.communicate()
    assert process.returncode == 130, stderr
    assert b"Interrupted" in stdout
    document = last_line(stdout.decode())
    assert document["interrupted"] is True
    assert (document["ttft_ms"]["cold"]["n"], document["not_run"]) == (1, 2)


async def test_bookkeeping_prints_its_bars_and_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    result = await invoke("bookkeeping", "--steps", "3", "--save", str(file))
    assert result.exit_code == 0, result.stderr
    compared = await invoke("bookkeeping", "--compare", str(file), str(file))
    assert last_line(compared.stdout)["entries"]["sessions.1.total_us"]["ratio"] == 1
    document = last_line(result.stdout)
    assert {number: one["at_most_us"] for number, one in document["sessions"].items()} == {
        "1": 100.0,
        "64": 1000.0,
    }
    assert all(one["total_us"] > 0 for one in document["sessions"].values())


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_fresh_server_is_measured_and_ended(
    model_cache: ModelCache, chatrt_home: Path
) -> None:
    model_cache.share_with(chatrt_home)
    small = ("--sessions", "1", "--turns", "2", "-n", "2", "--input-tokens", "8", "--no-warm-up")
    result = await invoke("sessions", *small)
    assert result.exit_code == 0, result.stderr
    document = last_line(result.stdout)
    assert document["failed"] == 0
    assert document["model"] == "smollm2-135m-instruct"
    assert document["num_threads"] >= 1
    assert document["ttft_by_history_tokens"]
    for sample in document["samples"]:
        if sample["kind"] != "cold":
            # what stands behind the history may be known too: the template's glue
            assert sample["cached_tokens"] >= sample["history_tokens"] - 1
    paths = Paths.find({"CHATRT_HOME": str(chatrt_home)})
    assert find_server(paths) is None
    assert not paths.data.exists()
