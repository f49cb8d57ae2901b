from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from chatrt.bench.stall import PromptSample, StallBench, StallOptions, StreamSample
from chatrt.bench.stall_figures import sorted_gaps, stall_figures
from chatrt.bench.stall_report import stall_report
from chatrt.bench.turn_figures import TurnFigures
from chatrt.errors import ChatrtError, InvalidValue
from chatrt.launch import Endpoint
from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from tests.chatrt.bench_support import tiny_server

if TYPE_CHECKING:
    from pathlib import Path

QUICK = StallOptions(
    num_streams=2,
    prompt_tokens=64,
    num_prompts=2,
    min_gaps=1,
    quiet_chunks=5,
    stream_tokens=200,
)
LONG = ScriptedAnswer(("x",), first_delay_s=0.05, usage={"input_tokens": 64, "output_tokens": 4})
STREAM = ScriptedAnswer(tuple("abcdefgh" * 50), delay_s=0.002)


def is_stream(message: dict[str, Any]) -> bool:
    return (message.get("chatrt") or {}).get("timing") == "token"


def answer(message: dict[str, Any]) -> ScriptedAnswer:
    return STREAM if is_stream(message) else LONG


async def run(
    server: ScriptedServer | Endpoint, options: StallOptions = QUICK
) -> tuple[StallBench, int]:
    rounds: list[None] = []
    bench = StallBench(options, lambda: rounds.append(None))
    endpoint = server if isinstance(server, Endpoint) else Endpoint(server.url, None)
    await bench.run(endpoint)
    return bench, len(rounds)


async def test_prompts_alone_and_beside_streams_take_turns() -> None:
    async with ScriptedServer(answer) as server:
        bench, rounds = await run(server)
    assert [prompt.beside_streams for prompt in bench.prompts] == [False, True, False, True]
    assert rounds == 2
    assert {(one.round_index, one.stream_index) for one in bench.streams} >= {
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    }
    for prompt in bench.prompts:
        ours = [s for s in bench.streams if s.round_index == prompt.round_index]
        if prompt.beside_streams:
            for index in (0, 1):
                early = [
                    at
                    for s in ours
                    if s.stream_index == index
                    for at in s.delta_ms
                    if at < prompt.sent_ms
                ]
                assert len(early) >= QUICK.quiet_chunks
        else:
            assert prompt.first_ms is not None
            assert all(s.sent_ms > prompt.first_ms for s in ours)


async def test_no_two_long_prompts_begin_alike() -> None:
    async with ScriptedServer(answer) as server:
        await run(server)
        texts = [one["input"] for one in server.creates() if one.get("max_output_tokens") == 4]
    assert len(texts) == 4
    assert len({text[:3] for text in texts}) == 4


async def test_streams_end_with_their_round_and_the_conversations_are_gone() -> None:
    async with ScriptedServer(answer) as server:
        await run(server)
        assert server._running == {}
        assert server._list("") == []


async def test_more_prompts_are_sent_until_there_are_enough_gaps_beside_them() -> None:
    options = dataclasses.replace(QUICK, num_prompts=1, min_gaps=60)
    async with ScriptedServer(answer) as server:
        bench, rounds = await run(server, options)
    assert rounds > 1
    assert len(sorted_gaps(bench.streams, bench.prompts).busy) >= 60


async def test_a_stream_that_ends_starts_the_next_answer_and_leaves_no_gap_between() -> None:
    short = ScriptedAnswer(("a", "b", "c"), delay_s=0.001)
    async with ScriptedServer(lambda one: short if is_stream(one) else LONG) as server:
        bench, _ = await run(server)
    assert len(bench.streams) > 4
    gaps = sorted_gaps(bench.streams, bench.prompts)
    num_gaps = sum(max(0, len(stream.delta_ms) - 1) for stream in bench.streams)
    assert len(gaps.quiet) + len(gaps.busy) + len(gaps.starting) == num_gaps


async def test_a_long_prompt_that_is_refused_is_counted_and_the_run_goes_on() -> None:
    refusal = {"code": "kv_exhausted", "message": "need 2 pages"}

    def script(message: dict[str, Any]) -> ScriptedAnswer:
        is_long = message.get("max_output_tokens") == 4
        return ScriptedAnswer(error=refusal) if is_long else answer(message)

    options = dataclasses.replace(QUICK, num_prompts=1, min_gaps=1)
    async with ScriptedServer(script) as server:
        bench, _ = await run(server, options)
    figures = stall_figures(bench.streams, bench.prompts, max_gap_ms=20.0)
    assert figures.failed == len(bench.prompts) > 0
    assert {prompt.error for prompt in bench.prompts} == {"kv_exhausted: need 2 pages"}
    assert figures.prompt_delay_ratio is None


async def test_a_stream_that_fails_is_one_sentence() -> None:
    refusal = {"code": "model_not_found", "message": "no such model"}
    async with ScriptedServer(
        lambda one: ScriptedAnswer(error=refusal) if is_stream(one) else LONG
    ) as server:
        with pytest.raises(ChatrtError, match="no such model"):
            await run(server)


async def test_samples_of_a_run_that_is_cut_short_are_kept() -> None:
    endless = dataclasses.replace(QUICK, quiet_chunks=100_000)
    async with ScriptedServer(answer) as server:
        bench = StallBench(endless, lambda: None)
        task = asyncio.create_task(bench.run(Endpoint(server.url, None)))
        while not any(len(one.delta_ms) > 2 for one in bench.streams):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert stall_figures(bench.streams, bench.prompts, max_gap_ms=20.0).gap_ms_quiet.n > 0


async def test_a_prompt_that_the_context_cannot_hold_is_refused_before_anything_is_measured() -> (
    None
):
    options = dataclasses.replace(QUICK, prompt_tokens=8_190)
    async with ScriptedServer(answer) as server:
        with pytest.raises(InvalidValue, match=r"--prompt-tokens needs 8194 tokens, .* holds 8192"):
            await run(server, options)
        assert server.creates() == []


async def test_a_real_server_is_measured(tmp_path: Path) -> None:
    options = dataclasses.replace(QUICK, prompt_tokens=200, stream_tokens=300)
    async with tiny_server(tmp_path, max_context=512) as endpoint:
        bench, rounds = await run(endpoint, options)
    figures = stall_figures(bench.streams, bench.prompts, max_gap_ms=None)
    assert rounds >= 2
    assert figures.failed == 0
    assert figures.gap_ms_quiet.n >= QUICK.quiet_chunks
    assert figures.gap_ms_busy.n >= 1
    assert figures.prompt_tokens == pytest.approx(200, rel=0.4)
    assert figures.cached_tokens is not None
    assert figures.cached_tokens < 48  # what the template begins with
    assert figures.tpot_ms.quiet is not None


def test_driving_a_server_needs_no_torch() -> None:
    modules = "chatrt.bench.stall, chatrt.bench.stall_report, chatrt.bench.comparison"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# Figures


def stream(sent_ms: float, *delta_ms: float, index: int = 0, tokens: int = 1) -> StreamSample:
    return StreamSample(0, index, sent_ms, list(delta_ms), [tokens] * len(delta_ms))


def prompt(
    sent_ms: float, first_ms: float, *, beside: bool = True, round_index: int = 0
) -> PromptSample:
    figures = TurnFigures(
        input_tokens=4096, ttft_ms=first_ms - sent_ms, stages_ms={"prefill_ms": 1.0}
    )
    return PromptSample(round_index, beside, sent_ms, first_ms, figures)


def lengths(gaps: Any) -> list[float]:
    return [gap.length_ms for gap in gaps]


def test_a_gap_is_busy_if_a_long_prompt_was_at_work_in_any_part_of_it() -> None:
    gaps = sorted_gaps(
        [stream(0.0, 10.0, 15.0, 35.0, 66.0, 70.0)],
        [prompt(30.0, 60.0), prompt(0, 9, beside=False)],
    )
    assert lengths(gaps.busy) == [20.0, 31.0]
    assert lengths(gaps.quiet) == [5.0, 4.0]
    assert lengths(gaps.starting) == []


def test_a_gap_beside_another_streams_own_short_prompt_is_neither_quiet_nor_busy() -> None:
    gaps = sorted_gaps([stream(0.0, 1.0, 2.0, 12.0), stream(5.0, 9.0, 13.0, index=1)], [])
    assert lengths(gaps.starting) == [10.0]
    assert lengths(gaps.quiet) == [1.0, 4.0]


def test_time_per_token_counts_the_tokens_of_each_chunk() -> None:
    figures = stall_figures([stream(0.0, 10.0, 20.0, 30.0, tokens=4)], [], max_gap_ms=20.0)
    assert figures.tpot_ms.quiet == pytest.approx(2.5)
    assert figures.tpot_ms.busy is None


def test_a_prompts_delay_is_held_against_the_one_alone_in_the_same_round() -> None:
    prompts = [
        prompt(0, 100, beside=False),
        prompt(200, 350),
        prompt(400, 600, beside=False, round_index=1),
        prompt(700, 1_200, round_index=1),
    ]
    figures = stall_figures([], prompts, max_gap_ms=20.0)
    assert figures.prompt_delay_ratio == pytest.approx((1.5 + 2.5) / 2)
    assert figures.within_delay is True
    assert (figures.prefill_ms.alone.max, figures.prefill_ms.busy.max) == (200, 500)
    assert figures.rounds == 2


@pytest.mark.parametrize(("budget", "within"), [(19.9, False), (20.0, True), (None, None)])
def test_the_budget_is_kept_if_the_p99_of_busy_gaps_is_within_it(
    budget: float | None, within: bool | None
) -> None:
    figures = stall_figures([stream(0.0, 10.0, 30.0)], [prompt(5.0, 50.0)], max_gap_ms=budget)
    assert figures.within_gap is within


def test_a_streams_question_beside_a_long_prompt_is_told_apart() -> None:
    streams = [stream(0.0, 4.0), stream(30.0, 75.0, index=1)]
    times = stall_figures(streams, [prompt(20.0, 90.0)], max_gap_ms=20.0).short_prompt_ms
    assert (times.quiet.max, times.busy.max) == (4.0, 45.0)


def test_the_tables_have_a_row_for_each_budget_and_say_what_failed() -> None:
    failed = dataclasses.replace(prompt(1, 2), error="gone")
    runs = [
        stall_figures([stream(0.0, 10.0, 30.0)], [prompt(5.0, 50.0), failed], max_gap_ms=budget)
        for budget in (15.0, None)
    ]
    console = Console(width=160)
    with console.capture() as capture:
        console.print(stall_report(runs, ["a note"]))
    lines = capture.get().splitlines()
    busy = [line.split() for line in lines if line.split()[1:2] == ["busy"]]
    assert [(row[0], row[2], row[-1]) for row in busy] == [("15", "1", "no"), ("none", "1", "-")]
    assert "2 long prompts failed" in lines
    assert "a note" in lines
