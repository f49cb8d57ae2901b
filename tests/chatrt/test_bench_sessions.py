from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from chatrt.bench.lengths import Length
from chatrt.bench.sessions import SessionsBench, TurnOptions, TurnSample, run_sessions
from chatrt.bench.workload import PlannedSession, Workload, generate, warm_up_session
from chatrt.errors import ChatrtError, ServerUnavailable
from chatrt.launch import Endpoint
from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from tests.chatrt.bench_support import tiny_server
from tests.chatrt.timed_server_support import timed_server

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = TurnOptions(seed=11)
TIMING = {
    "ttft_ms": 5.0,
    "stages": {"queue_ms": 1.0, "prefill_ms": 4.0},
    "tpot_ms": 2.0,
    "kv": {"typed_ahead_tokens": 6},
}
USAGE = {
    "input_tokens": 20,
    "input_tokens_details": {"cached_tokens": 15},
    "output_tokens": 2,
}


def workload(num_sessions: int, num_turns: int, **fields: Any) -> Workload:
    """Short turns, answered with four tokens each."""
    return Workload(
        num_sessions=num_sessions,
        num_turns=Length(num_turns, num_turns),
        system_tokens=Length(3, 3),
        input_tokens=Length(4, 4),
        output_tokens=Length(4, 4),
        **fields,
    )


async def play(
    url: str, planned: tuple[PlannedSession, ...], warm_up: PlannedSession | None = None
) -> list[TurnSample]:
    samples: list[TurnSample] = []
    await run_sessions(Endpoint(url, None), planned, OPTIONS, samples.append, warm_up=warm_up)
    return samples


def good(message: dict[str, Any]) -> ScriptedAnswer:
    return ScriptedAnswer(("Hel", "lo"), timing=TIMING, usage=USAGE)


async def test_each_session_has_its_cold_warm_and_forked_turns() -> None:
    planned = generate(workload(2, 3), 0)
    async with ScriptedServer(good) as server:
        samples = await play(server.url, planned)
    for index in (0, 1):
        ours = [sample for sample in samples if sample.session_index == index]
        assert [sample.kind for sample in ours] == ["cold", "warm", "warm", "forked"]
        assert [sample.turn_index for sample in ours] == [0, 1, 2, 3]
        assert all(sample.error is None for sample in ours)


async def test_follow_ups_continue_the_tip_and_the_fork_the_first_answer() -> None:
    async with ScriptedServer(good) as server:
        await play(server.url, generate(workload(1, 3), 0))
        creates = server.creates()
    parents = [create.get("previous_response_id") for create in creates]
    assert parents[0] is None
    assert parents[3] == parents[1]
    assert len(set(parents[1:3])) == 2
    assert [item["role"] for item in creates[0]["input"]] == ["system", "user"]
    assert all(isinstance(create["input"], str) for create in creates[1:])


async def test_a_sample_holds_the_clients_times_and_the_servers_figures() -> None:
    async with ScriptedServer(good) as server:
        cold, warm = await play(server.url, generate(workload(1, 2, forks=False), 0))
    assert (cold.history_tokens, warm.history_tokens) == (0, 22)
    assert (warm.input_tokens, warm.cached_tokens, warm.output_tokens) == (20, 15, 2)
    assert (warm.server_ttft_ms, warm.tpot_ms, warm.typed_ahead_tokens) == (5.0, 2.0, 6)
    assert warm.stages_ms == {"queue_ms": 1.0, "prefill_ms": 4.0}
    assert warm.ttft_ms is not None
    assert warm.ttft_ms > 0
    assert len(warm.gaps_ms) == 1
    assert warm.started_ms > cold.started_ms


async def test_every_answer_has_the_length_and_the_seed_that_were_asked_for() -> None:
    async with ScriptedServer(good) as server:
        await play(server.url, generate(workload(2, 1, forks=False), 0))
        creates = server.creates()
    assert {create["max_output_tokens"] for create in creates} == {4}
    assert {create["chatrt"]["ignore_eos"] for create in creates} == {True}
    assert {create["chatrt"]["seed"] for create in creates} == {11, 12}


async def test_the_warm_up_comes_first_and_gives_no_sample() -> None:
    planned = generate(workload(1, 2), 0)
    warm_up = warm_up_session(workload(1, 2), 0)
    async with ScriptedServer(good) as server:
        samples = await play(server.url, planned, warm_up)
        creates = server.creates()
    assert (len(samples), len(creates)) == (3, 6)
    assert creates[0]["input"][0]["content"] == warm_up.system


async def test_nothing_is_measured_when_the_warm_up_fails() -> None:
    refusal = {"code": "model_not_found", "message": "no such model"}
    planned = generate(workload(1, 2), 0)
    async with ScriptedServer(lambda _: ScriptedAnswer(error=refusal)) as server:
        with pytest.raises(ChatrtError, match="model_not_found: no such model"):
            await play(server.url, planned, planned[0])


async def test_a_session_ends_with_its_first_failure_and_the_others_go_on() -> None:
    refusal = {"code": "kv_exhausted", "message": "need 2 pages"}

    def script(message: dict[str, Any]) -> ScriptedAnswer:
        fails = message["chatrt"]["seed"] == 11 and "previous_response_id" in message
        return ScriptedAnswer(error=refusal) if fails else good(message)

    async with ScriptedServer(script) as server:
        samples = await play(server.url, generate(workload(2, 3), 0))
    first = [sample for sample in samples if sample.session_index == 0]
    assert [sample.error for sample in first] == [None, "kv_exhausted: need 2 pages"]
    assert sum(sample.session_index == 1 for sample in samples) == 4


async def test_a_turn_that_fails_half_way_is_a_failure() -> None:
    failure = {"code": "server_error", "message": "the step failed"}
    async with ScriptedServer([ScriptedAnswer(failure=failure)]) as server:
        (sample,) = await play(server.url, generate(workload(1, 2), 0))
    assert sample.error == "server_error: the step failed"


async def test_a_lost_connection_is_a_failure_of_the_turns_that_ran() -> None:
    async with ScriptedServer([ScriptedAnswer(("a", "b"), drop_after=1)]) as server:
        (sample,) = await play(server.url, generate(workload(1, 2), 0))
    assert sample.error == "server_unavailable: the connection to the server was lost"


async def test_no_server_is_an_error_at_once() -> None:
    async with ScriptedServer(good) as server:
        url = server.url
    with pytest.raises(ServerUnavailable, match="no server answers"):
        await play(url, generate(workload(1, 1), 0))


async def test_the_conversations_are_gone_afterwards() -> None:
    async with ScriptedServer(good) as server:
        await play(server.url, generate(workload(3, 1), 0))
        opened = [one for one in server.requests if one["type"] == "chatrt.conversation.create"]
        assert len(opened) == 3
        assert server._list("") == []


async def test_a_server_that_is_gone_is_asked_once_to_forget() -> None:
    samples: list[TurnSample] = []
    bench = SessionsBench(generate(workload(8, 1), 0), OPTIONS, samples.append)
    async with ScriptedServer(good) as server:
        endpoint = Endpoint(server.url, None)
        await bench.run(endpoint)
    num_asked = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        num_asked += 1
        writer.close()

    port = urlsplit(endpoint.url).port
    async with await asyncio.start_server(hang_up, "127.0.0.1", port):
        await bench.delete(endpoint)
    assert num_asked == 1


async def test_follow_ups_wait_for_the_person_to_think() -> None:
    planned = generate(workload(1, 2, think_ms=Length(80, 80), forks=False), 0)
    async with ScriptedServer(good) as server:
        cold, warm = await play(server.url, planned)
    assert warm.started_ms - cold.started_ms >= 80


async def test_samples_of_a_run_that_is_cut_short_are_kept() -> None:
    heard: list[TurnSample] = []
    stop = asyncio.Event()

    def on_sample(sample: TurnSample) -> None:
        heard.append(sample)
        stop.set()

    planned = generate(workload(1, 2, think_ms=Length(60_000, 60_000)), 0)
    async with ScriptedServer(good) as server:
        endpoint = Endpoint(server.url, None)
        run = asyncio.create_task(run_sessions(endpoint, planned, OPTIONS, on_sample))
        await stop.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert server._list("") == []
    assert [sample.kind for sample in heard] == ["cold"]


def test_driving_a_server_needs_no_torch() -> None:
    code = "import sys, chatrt.bench.sessions, chatrt.bench.report; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


async def test_a_real_server_reuses_the_whole_history_of_each_follow_up(tmp_path: Path) -> None:
    async with tiny_server(tmp_path, max_context=512) as endpoint:
        samples = await play(endpoint.url, generate(workload(3, 3), 0))
    assert [sample.error for sample in samples] == [None] * 12
    for sample in samples:
        assert sample.output_tokens == 4
        if sample.kind == "cold":
            assert sample.cached_tokens < 32  # what the template begins with
        else:
            # All rows but the last token's, which no step may have computed yet. What stands behind
            # the history may be known too: the template's glue, a sibling's first words.
            assert sample.history_tokens - 1 <= sample.cached_tokens < sample.input_tokens


async def test_a_context_that_is_full_is_a_failed_turn(tmp_path: Path) -> None:
    async with tiny_server(tmp_path, max_context=160) as endpoint:
        samples = await play(endpoint.url, generate(workload(1, 4), 0))
    error = samples[-1].error
    assert error is not None
    assert error.startswith("context_length_exceeded: ")


async def test_the_stages_of_a_real_server_add_up_to_its_time_to_first_token(
    tmp_path: Path,
) -> None:
    async with timed_server(tmp_path, max_context=512) as endpoint:
        samples = await play(endpoint.url, generate(workload(2, 3, cancel_rate=0.5), 0))
    assert len(samples) == 8
    for sample in samples:
        assert sample.server_ttft_ms is not None
        assert sum(sample.stages_ms.values()) == pytest.approx(sample.server_ttft_ms, abs=0.001)
        assert min(sample.stages_ms.values()) >= 0, sample.stages_ms


async def test_what_all_sessions_share_is_computed_once(tmp_path: Path) -> None:
    async with tiny_server(tmp_path, max_context=1024) as endpoint:
        shared = workload(2, 1, forks=False, prefix_tokens=60)
        warm_up = warm_up_session(shared, 0)
        samples = await play(endpoint.url, generate(shared, 0), warm_up)
        alone = await play(endpoint.url, generate(workload(2, 1, forks=False), 0))
    for with_prefix, without in zip(samples, alone, strict=True):
        computed = with_prefix.input_tokens - with_prefix.cached_tokens
        assert with_prefix.cached_tokens >= 60
        assert computed <= without.input_tokens - without.cached_tokens + 16


async def test_sessions_that_arrive_in_an_open_loop_all_end_well(tmp_path: Path) -> None:
    planned = generate(workload(6, 2, rate_per_s=50.0), 0)
    samples: list[TurnSample] = []
    options = TurnOptions(seed=11, from_due=True)
    async with tiny_server(tmp_path, max_context=512) as endpoint:
        await run_sessions(endpoint, planned, options, samples.append)
    assert [sample.error for sample in samples] == [None] * 18
    for sample in samples:
        if sample.kind == "cold":
            due_ms = planned[sample.session_index].arrives_ms
            assert sample.started_ms - sample.late_ms == pytest.approx(due_ms, abs=0.01)
