"""`chatrt bench histories` and `bench stall` as a person runs them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from chatrt.cli.bench_stall import budgets_of
from chatrt.cli.main import app
from chatrt.errors import InvalidValue
from chatrt.launch import find_server
from chatrt.paths import Paths
from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from tests.chatrt.bench_support import ANSWER

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

    from tests.conftest import ModelCache

runner = CliRunner()
SHORT_HISTORIES = (
    *("--histories", "64,256", "--repetitions", "1", "--message-words", "3", "-n", "4"),
    *("--think-ms", "0", "--type-ms", "1"),
)
SHORT_STALL = (
    *("--prompt-tokens", "64", "--prompts", "1", "--min-gaps", "1"),
    *("--quiet-chunks", "20", "--stream-tokens", "100"),
)
STREAM = ScriptedAnswer(tuple("abcdefgh" * 20), delay_s=0.002)


async def invoke(*arguments: str) -> Result:
    return await asyncio.to_thread(runner.invoke, app, ["bench", *arguments])


def last_line(output: str) -> Any:
    return json.loads(output.splitlines()[-1])


def stalled(message: dict[str, Any]) -> ScriptedAnswer:
    is_stream = (message.get("chatrt") or {}).get("timing") == "token"
    return STREAM if is_stream else ScriptedAnswer(("x",), first_delay_s=0.05)


async def test_histories_are_told_by_length_and_case() -> None:
    async with ScriptedServer([ANSWER]) as server:
        result = await invoke("histories", "--url", server.url, *SHORT_HISTORIES)
        assert server._list("") == []
    assert result.exit_code == 0, result.stderr
    assert "Time to first token by history" in result.stdout
    document = last_line(result.stdout)
    assert document["failures"] == {}, document["failures"]
    assert document["benchmark"] == "histories"
    assert list(document["ttft_by_history_tokens"]) == ["64", "256"]
    row = document["ttft_by_history_tokens"]["64"]
    assert row["follow_up"]["ttft_ms"]["n"] == row["typed_ahead"]["ttft_ms"]["n"] == 1
    assert row["typed_ahead"]["typed_ahead_tokens"] == 6
    assert row["decode_step_ms"] == 2.0
    assert row["typed_ahead"]["decode_steps"] == 2.5
    assert {kind: one["n"] for kind, one in document["ttft_ms"].items()} == {
        "cold": 2,
        "warm": 4,
        "forked": 4,
        "restored": 0,
    }
    assert (document["failed"], document["not_run"]) == (0, 0)
    assert document["settings"]["restart"] is False
    assert len(document["samples"]) == 14


async def test_stall_tells_gaps_quiet_and_busy_and_what_the_prompts_waited() -> None:
    async with ScriptedServer(stalled) as server:
        result = await invoke("stall", "--url", server.url, *SHORT_STALL)
    assert result.exit_code == 0, result.stderr
    assert "Chunk gaps of the running streams" in result.stdout
    document = last_line(result.stdout)
    assert document["max_gap_ms"] == 20.0
    assert document["gap_ms_busy"]["n"] >= 1
    assert document["gap_ms_quiet"]["n"] >= 6
    assert document["gap_ms_quiet"]["p99"] > 0
    assert document["prefill_ms"]["alone"]["n"] == document["rounds"]
    assert document["prompt_delay_ratio"] > 0
    assert document["tpot_ms"]["quiet"] > 0
    assert len(document["budgets"]) == len(document["samples"]) == 1


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib, the extra [bench]"
)
async def test_plots_are_drawn_and_two_saved_runs_are_held_side_by_side(tmp_path: Path) -> None:
    file, plots = tmp_path / "a.json", tmp_path / "plots"
    async with ScriptedServer(stalled) as server:
        where = ("--url", server.url, "--save", str(file), "--plot", str(plots), "--json")
        result = await invoke("stall", *where, *SHORT_STALL)
    assert result.exit_code == 0, result.stderr
    assert f"drawn: {plots / 'stall-gaps-dark.png'}" in result.stderr
    assert (plots / "stall-gaps-light.svg").exists()
    compared = await invoke("stall", "--compare", str(file), str(file))
    assert compared.exit_code == 0, compared.stderr
    entries = last_line(compared.stdout)["entries"]
    assert entries["gap_ms_quiet.p50"]["ratio"] == 1.0
    refused = await invoke("histories", "--compare", str(file), str(file))
    assert refused.exit_code == 2
    assert "two documents of bench histories" in refused.stderr


async def test_a_stream_that_fails_ends_with_what_had_been_measured() -> None:
    refusal = {"code": "kv_exhausted", "message": "need 2 pages"}

    def script(message: dict[str, Any]) -> ScriptedAnswer:
        is_stream = (message.get("chatrt") or {}).get("timing") == "token"
        return ScriptedAnswer(error=refusal) if is_stream else ANSWER

    async with ScriptedServer(script) as server:
        result = await invoke("stall", "--url", server.url, *SHORT_STALL)
    assert result.exit_code == 1
    assert result.stderr.strip().endswith("chatrt: need 2 pages")
    document = last_line(result.stdout)
    assert document["failure"] == "need 2 pages"
    assert document["prefill_ms"]["alone"]["n"] == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("histories", "--histories", "260,x"), "--histories is '260,x'"),
        (("histories", "--histories", "8"), "--histories is '8'"),
        (("histories", "--peer"), "--url and --peer exclude each other"),
        (("histories", "--model", "m"), "--url and --model exclude each other"),
        (("stall", "--budgets", "10,20"), "--url and --budgets exclude each other"),
        (("stall", "--max-gap-ms", "soon"), "--max-gap-ms is 'soon'"),
    ],
)
async def test_arguments_that_make_no_sense_exit_with_2(
    arguments: tuple[str, ...], sentence: str
) -> None:
    result = await invoke(*arguments, "--url", "ws://127.0.0.1:1")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"chatrt: {sentence}")


async def test_no_server_is_one_sentence() -> None:
    async with ScriptedServer([ANSWER]) as server:
        url = server.url
    for name in ("histories", "stall"):
        result = await invoke(name, "--url", url)
        assert result.exit_code == 1
        assert result.stderr.startswith("chatrt: no server answers at ")
        assert result.stdout == ""


def test_budgets_are_milliseconds_or_none_each_once() -> None:
    assert budgets_of("10,20,none,10", param="--budgets") == (10.0, 20.0, None)
    for wrong in ("", "0", "-5", "10,", "nan", "inf"):
        with pytest.raises(InvalidValue, match="--budgets is"):
            budgets_of(wrong, param="--budgets")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_fresh_server_is_killed_started_again_and_ended(
    model_cache: ModelCache, chatrt_home: Path
) -> None:
    model_cache.share_with(chatrt_home)
    result = await invoke("histories", *SHORT_HISTORIES, "--settle-s", "0")
    assert result.exit_code == 0, result.stderr
    document = last_line(result.stdout)
    assert (document["failed"], document["not_run"]) == (0, 0)
    assert document["ttft_ms"]["restored"]["n"] == 2
    for sample in document["samples"]:
        figures = sample["figures"]
        if sample["case"] == "cold":
            assert abs(figures["input_tokens"] - sample["history"]) < 16
        elif sample["case"] != "restored":
            assert figures["cached_tokens"] >= sample["history_tokens"] - 1
    assert find_server(Paths.find({"CHATRT_HOME": str(chatrt_home)})) is None


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_each_budget_has_a_fresh_server_with_it(
    model_cache: ModelCache, chatrt_home: Path
) -> None:
    model_cache.share_with(chatrt_home)
    result = await invoke("stall", *SHORT_STALL, "--budgets", "30,none")
    assert result.exit_code == 0, result.stderr
    document = last_line(result.stdout)
    assert [run["max_gap_ms"] for run in document["budgets"]] == [30.0, None]
    assert all(run["gap_ms_busy"]["n"] >= 1 for run in document["budgets"])
    assert document["failed"] == 0
