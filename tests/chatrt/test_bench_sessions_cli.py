"""`chatrt bench sessions` as a person runs it: rates, arrivals, real texts, targets, two Ctrl+C."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from chatrt.cli.main import app
from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from chatrt.testing.service import ScriptedService
from chatrt.testing.serving import serving
from tests.chatrt.bench_support import ANSWER, tiny_server

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request

    from tests.conftest import ModelCache

runner = CliRunner()
SMALL = ("--sessions", "2", "--turns", "2", "--no-warm-up")


async def invoke(*arguments: str) -> Result:
    return await asyncio.to_thread(runner.invoke, app, ["bench", "sessions", *arguments])


def document_of(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


async def test_the_usual_run_is_eight_sessions_of_four_turns_and_a_fork() -> None:
    async with ScriptedServer([ANSWER]) as server:
        document = document_of(await invoke("--url", server.url, "--json"))
    assert {kind: one["n"] for kind, one in document["ttft_ms"].items()} == {
        "cold": 8,
        "warm": 24,
        "forked": 8,
        "restored": 0,
    }
    assert document["settings"]["num_turns"] == 4
    assert document["settings"]["max_output_tokens"] == 32
    assert document["settings"]["loop"] == "closed"
    assert document["failure"] is None


class LoadingService(ScriptedService):
    """Is ready when it has been asked three times."""

    num_asked = 0

    def ready(self) -> bool:
        self.num_asked += 1
        return self.num_asked > 3


async def test_a_server_that_is_still_loading_is_waited_for() -> None:
    async with serving(LoadingService()) as server:
        result = await invoke("--url", f"ws://127.0.0.1:{server.port}", *SMALL, "--json")
    assert document_of(result)["failed"] == 0
    assert result.stderr.count("waiting for the server to be ready") == 1


async def test_goodput_late_and_every_session_stand_in_the_document() -> None:
    targets = ("--ttft-target-ms", "5000", "--tpot-target-ms", "1")
    async with ScriptedServer([ANSWER]) as server:
        document = document_of(await invoke("--url", server.url, *SMALL, *targets))
    goodput = document["goodput"]
    assert (goodput["ttft_target_ms"], goodput["tpot_target_ms"]) == (5000, 1)
    # the scripted answers take two milliseconds a token
    assert (goodput["turns"], goodput["good_turns"], goodput["turns_per_s"]) == (6, 0, 0)
    assert (goodput["sessions"], goodput["good_sessions"]) == (2, 0)
    assert document["late_ms"]["n"] == 6
    assert [one["session_index"] for one in document["by_session"]] == [0, 1]
    assert all(one["ttft_worst_ms"] >= one["ttft_p50_ms"] for one in document["by_session"])


async def test_rates_are_played_and_said(tmp_path: Path) -> None:
    rates = ("--cancel-rate", "0.5", "--fork-rate", "1", "--typed-ahead-rate", "1")
    more = ("--type-ms", "10", "--abandon-rate", "0.4", "--prefix-tokens", "20", "-n", "4-8")
    async with tiny_server(tmp_path, max_context=1024) as endpoint:
        shape = ("--sessions", "4", "--turns", "2-4", "--input-tokens", "6~0.3")
        result = await invoke("--url", endpoint.url, *shape, *rates, *more, "--per-session")
    document = document_of(result)
    assert document["failed"] == document["not_run"] == 0
    assert document["cancelled"] > 0
    assert document["abandoned"] > 0
    assert document["ttft_ms"]["forked"]["n"] > 0
    assert any(sample["typed_ahead_tokens"] for sample in document["samples"])
    settings = document["settings"]
    assert settings["input_tokens"] == {"least": 2, "most": 15, "median": 6, "sigma": 0.3}
    assert settings["turns"] == {"least": 2, "most": 4}
    assert settings["output_tokens"] == {"least": 4, "most": 8}
    assert (settings["num_turns"], settings["max_output_tokens"]) == (4, 8)
    assert (settings["prefix_tokens"], settings["cancel_rate"]) == (20, 0.5)
    assert "left in mid-answer, as planned" in result.stdout
    assert "Sessions (ms)" in result.stdout


async def test_an_open_loop_says_its_rate_and_from_when_its_times_count() -> None:
    async with ScriptedServer([ANSWER]) as server:
        result = await invoke("--url", server.url, *SMALL, "--rate", "40")
    document = document_of(result)
    assert "arriving at 40 a second (TTFT from when a turn was due)" in result.stdout
    assert (document["settings"]["loop"], document["settings"]["rate_per_s"]) == ("open", 40)
    assert all(sample["from_due"] for sample in document["samples"])


MT_BENCH = "\n".join(
    json.dumps({"question_id": number, "category": "writing", "turns": turns})
    for number, turns in enumerate((["first", "second"], ["third", "fourth"]))
)
SHARE_GPT = json.dumps(
    [
        {"id": name, "conversations": [{"from": "human", "value": text} for text in texts]}
        for name, texts in (("a", ["first", "second", "too many"]), ("b", ["third", "fourth"]))
    ]
)


@pytest.mark.parametrize("contents", [MT_BENCH, SHARE_GPT], ids=["MT-Bench", "ShareGPT"])
async def test_the_messages_of_a_file_are_played_up_to_the_turns_asked_for(
    tmp_path: Path, contents: str
) -> None:
    file = tmp_path / "conversations"
    file.write_text(contents, encoding="utf-8")
    async with ScriptedServer([ANSWER]) as server:
        result = await invoke("--url", server.url, *SMALL, "--prompts", str(file), "--no-fork")
        creates = server.creates()
    assert document_of(result)["settings"]["prompts"] == str(file)
    said = {create["input"] for create in creates if "previous_response_id" in create}
    began = {
        create["input"][1]["content"] for create in creates if "previous_response_id" not in create
    }
    assert (began, said) == ({"first", "third"}, {"second", "fourth"})


async def test_bundled_conversations_are_played_turn_by_turn() -> None:
    async with ScriptedServer([ANSWER]) as server:
        result = await invoke("--url", server.url, *SMALL, "--prompts", "bundled")
    kinds = [sample["kind"] for sample in document_of(result)["samples"]]
    assert sorted(kinds) == ["cold", "cold", "forked", "forked", "warm", "warm"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--restart",), "--url and --restart exclude each other"),
        (("--prompts", "bundled", "--input-tokens", "9"), "--prompts and --input-tokens exclude"),
        (("--prompts", "/nowhere.jsonl"), "/nowhere.jsonl cannot be read: No such file"),
        (("-n", "48~9"), "--max-output-tokens is '48~9'"),
        (("--turns", "0"), "--turns is '0', it must rise from at least 1"),
    ],
)
async def test_arguments_that_make_no_sense_exit_with_2(
    arguments: tuple[str, ...], sentence: str
) -> None:
    result = await invoke("--url", "ws://127.0.0.1:1", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"chatrt: {sentence}")


async def test_a_rate_that_is_no_share_is_refused() -> None:
    result = await invoke("--url", "ws://127.0.0.1:1", "--cancel-rate", "1.5")
    assert result.exit_code == 2
    assert "--cancel-rate" in result.stderr


class Stubborn(ScriptedServer):
    """Answers no request to delete a conversation before `released`."""

    def __init__(self, answer: ScriptedAnswer) -> None:
        super().__init__([answer, replace(answer, first_delay_s=600)])
        self.asked, self.released = asyncio.Event(), asyncio.Event()

    def _http(self, connection: ServerConnection, request: Request) -> Any:
        answer = super()._http(connection, request)
        if getattr(request, "method", "GET") != "DELETE":
            return answer
        self.asked.set()
        return self._when_released(answer)

    async def _when_released(self, answer: Any) -> Any:
        await self.released.wait()
        return answer


async def test_a_second_ctrl_c_while_the_first_is_tidied_up_prints_what_was_measured() -> None:
    one = ("--sessions", "1", "--turns", "2", "--no-warm-up")
    async with Stubborn(ANSWER) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "chatrt", "bench", "sessions", "--url", server.url, *one),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        while len(server.creates()) < 2:  # noqa: ASYNC110 - the server tells nobody of a request
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        await server.asked.wait()
        process.send_signal(signal.SIGINT)
        server.released.set()
        stdout, stderr = await process.communicate()
    assert process.returncode == 130, stderr
    assert b"Traceback" not in stderr
    assert b"Interrupted" in stdout
    document = json.loads(stdout.decode().splitlines()[-1])
    assert document["interrupted"] is True
    assert document["ttft_ms"]["cold"]["n"] == 1
    assert document["not_run"] == 2


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_restart_of_the_own_server_measures_restored_turns(
    model_cache: ModelCache, chatrt_home: Path
) -> None:
    model_cache.share_with(chatrt_home)
    shape = ("--sessions", "2", "--turns", "2", "-n", "4", "--no-warm-up", "--no-fork")
    document = document_of(await invoke(*shape, "--restart", "--settle-s", "3"))
    assert {kind: one["n"] for kind, one in document["ttft_ms"].items()} == {
        "cold": 2,
        "warm": 2,
        "forked": 0,
        "restored": 2,
    }
    assert (document["failed"], document["restored_nothing"]) == (0, 0)
    for sample in document["samples"]:
        total = sum(sample["stages_ms"].values())
        assert total == pytest.approx(sample["server_ttft_ms"], abs=0.01)
        assert (sample["restored_tokens"] > 0) == (sample["kind"] == "restored")
