from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.bench.histories import HistoriesBench, HistoriesOptions, HistorySample, num_planned
from chatrt.errors import InvalidValue, ServerUnavailable
from chatrt.launch import Endpoint
from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from tests.chatrt.bench_support import ANSWER, tiny_server

if TYPE_CHECKING:
    from pathlib import Path

QUICK = HistoriesOptions(
    histories=(64, 256),
    repetitions=2,
    message_words=3,
    max_output_tokens=4,
    think_ms=0,
    type_ms=20,
)
ORDER = ("cold", "follow_up", "typed_ahead", "regenerate", "fork", "branch_switch", "plain")
ODD_ORDER = ("cold", "typed_ahead", "follow_up", "regenerate", "fork", "branch_switch", "plain")


async def play(endpoint: Endpoint, options: HistoriesOptions = QUICK) -> list[HistorySample]:
    samples: list[HistorySample] = []
    await HistoriesBench(options, samples.append).run(endpoint)
    return samples


def at(server: ScriptedServer) -> Endpoint:
    return Endpoint(server.url, None)


def real_creates(server: ScriptedServer) -> list[dict[str, Any]]:
    """Creates that want an answer, those of the scale left out."""
    return [create for create in server.creates() if create.get("generate") is not False]


def is_partial(create: dict[str, Any]) -> bool:
    return (create.get("chatrt") or {}).get("partial") is True


async def test_every_length_has_every_case_and_the_first_two_change_places() -> None:
    async with ScriptedServer([ANSWER]) as server:
        samples = await play(at(server))
    cells = {
        (length, turn): tuple(
            s.case for s in samples if (s.history, s.repetition) == (length, turn)
        )
        for length in QUICK.histories
        for turn in (0, 1)
    }
    assert cells == {(64, 0): ORDER, (256, 0): ORDER, (64, 1): ODD_ORDER, (256, 1): ODD_ORDER}
    assert len(samples) == num_planned(QUICK, restored=False)
    assert all(sample.error is None for sample in samples)


async def test_regenerate_says_the_same_behind_the_same_parent_and_a_fork_something_else() -> None:
    options = dataclasses.replace(QUICK, histories=(64,), repetitions=1)
    async with ScriptedServer([ANSWER]) as server:
        await play(at(server), options)
        creates = real_creates(server)
    cold, follow_up, typed, again, fork, switch, plain = creates
    assert cold.get("previous_response_id") is None
    assert typed["previous_response_id"] != follow_up["previous_response_id"]
    assert again["previous_response_id"] == typed["previous_response_id"]
    assert again["input"] == typed["input"]
    assert fork["previous_response_id"] == typed["previous_response_id"]
    assert fork["input"] != typed["input"]
    assert switch["previous_response_id"] not in (
        fork["previous_response_id"],
        follow_up["previous_response_id"],
    )
    assert plain["chatrt"]["speculation"] == {"enabled": False}
    assert len(follow_up["input"].split()) == options.message_words


async def test_what_is_typed_ahead_grows_on_the_lane_of_the_message_and_ends_before_it() -> None:
    async with ScriptedServer([ANSWER]) as server:
        await play(at(server))
        creates = server.creates()
    first = next(index for index, one in enumerate(creates) if is_partial(one))
    partials = [one for one in creates[first : first + 4] if is_partial(one)]
    message = creates[first + len(partials)]
    assert 1 <= len(partials) <= QUICK.message_words
    assert not is_partial(message)
    for partial in partials:
        assert message["input"].startswith(partial["input"])
        assert partial["previous_response_id"] == message["previous_response_id"]
        assert partial["stream_id"] == message["stream_id"]


async def test_a_restored_turn_continues_the_last_tip_of_each_conversation() -> None:
    samples: list[HistorySample] = []
    bench = HistoriesBench(QUICK, samples.append)
    async with ScriptedServer([ANSWER]) as server:
        await bench.run(at(server))
        last = [one for one in real_creates(server) if "speculation" in one["chatrt"]]
        await server.stop()
        await server.start()
        await bench.run_restored(at(server))
        restored = real_creates(server)[-4:]
        parents = {one["previous_response_id"] for one in restored}
        assert len(parents) == len(last) == 4
        assert parents <= set(server._turns)
    assert [sample.case for sample in samples[-4:]] == ["restored"] * 4
    assert len(samples) == num_planned(QUICK, restored=True)


async def test_a_conversation_ends_with_its_first_failure_and_the_next_one_begins() -> None:
    refusal = {"code": "kv_exhausted", "message": "need 2 pages"}

    def script(message: dict[str, Any]) -> ScriptedAnswer:
        fails = message["chatrt"].get("seed") == 0 and "previous_response_id" in message
        return ScriptedAnswer(error=refusal) if fails else ANSWER

    def answer(message: dict[str, Any]) -> ScriptedAnswer:
        return ANSWER if message.get("generate") is False else script(message)

    async with ScriptedServer(answer) as server:
        samples = await play(at(server))
    failed = [sample for sample in samples if sample.error is not None]
    assert [sample.error for sample in failed] == ["kv_exhausted: need 2 pages"] * 2
    assert {sample.repetition for sample in failed} == {0}
    assert sum(sample.repetition == 1 for sample in samples) == 14


async def test_the_conversations_of_a_persons_server_are_deleted_on_request() -> None:
    bench = HistoriesBench(QUICK, lambda _: None)
    async with ScriptedServer([ANSWER]) as server:
        await bench.run(at(server))
        assert len(server._list("")) == 4
        await bench.delete(at(server))
        assert server._list("") == []


async def test_what_is_measured_beside_takes_its_turn_before_every_conversation() -> None:
    turns: list[tuple[int, int]] = []
    bench = HistoriesBench(QUICK, lambda _: None, beside=lambda *turn: turns.append(turn))
    async with ScriptedServer([ANSWER]) as server:
        await bench.run(at(server))
    assert turns == [(64, 0), (256, 0), (256, 1), (64, 1)]


async def test_a_history_that_the_context_cannot_hold_is_refused_before_anything_is_measured() -> (
    None
):
    long = HistoriesOptions(histories=(8_190,), repetitions=1)
    async with ScriptedServer([ANSWER]) as server:
        with pytest.raises(InvalidValue, match=r"8190 tokens and about \d+ .* holds 8192"):
            await play(at(server), long)
        assert real_creates(server) == []


async def test_no_server_is_an_error_at_once() -> None:
    async with ScriptedServer([ANSWER]) as server:
        endpoint = at(server)
    with pytest.raises(ServerUnavailable, match="no server answers"):
        await play(endpoint)


async def test_a_real_server_computes_only_what_is_new(tmp_path: Path) -> None:
    async with tiny_server(tmp_path, max_context=1024) as endpoint:
        samples = await play(endpoint)
    assert [sample.error for sample in samples] == [None] * num_planned(QUICK, restored=False)
    for sample in samples:
        figures = sample.figures
        if sample.case == "cold":
            # Words differ in length and this tokenizer counts bytes: a history is about as long.
            assert sample.history_tokens == figures.input_tokens
            assert abs(figures.input_tokens - sample.history) < sample.history / 2
        else:
            assert figures.cached_tokens >= sample.history_tokens - 1
        if sample.case == "regenerate":
            assert figures.computed_tokens == 1
        assert (figures.typed_ahead_tokens > 0) == (sample.case == "typed_ahead")


def test_driving_a_server_needs_no_torch() -> None:
    modules = "chatrt.bench.histories, chatrt.bench.histories_report, chatrt.bench.histories_peer"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
