"""One session as its person plays it: cancels, leaves, types ahead, comes when it is due."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chatrt.bench.player import LEAST_CANCELLED_TOKENS, TurnOptions
from chatrt.bench.sessions import SessionsBench, run_sessions
from chatrt.bench.typist import half_typed
from chatrt.bench.workload import PlannedSession, PlannedTurn
from chatrt.launch import Endpoint
from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from tests.chatrt.bench_support import ANSWER, tiny_server
from tests.chatrt.timed_server_support import timed_server

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.bench.turn_sample import TurnSample

LONG = replace(ANSWER, pieces=tuple("abcdefghijkl"), delay_s=0.02)


def turn(text: str = "a few words", follows: int | None = None, **fields: Any) -> PlannedTurn:
    return PlannedTurn(text, 0, follows, **{"max_output_tokens": 4, **fields})


async def play(
    url: str, *sessions: PlannedSession, options: TurnOptions | None = None
) -> list[TurnSample]:
    samples: list[TurnSample] = []
    endpoint = Endpoint(url, None)
    await run_sessions(endpoint, sessions, options or TurnOptions(type_ms=0), samples.append)
    return sorted(samples, key=lambda sample: (sample.session_index, sample.turn_index))


async def test_a_cancelled_turn_is_no_failure_and_its_text_is_continued() -> None:
    planned = PlannedSession("system", (turn(cancel_after=2), turn(follows=0)))
    async with ScriptedServer(lambda m: ANSWER if "previous_response_id" in m else LONG) as server:
        cut, next_one = await play(server.url, planned)
        creates = server.creates()
    assert (cut.status, cut.error, cut.kind) == ("cancelled", None, "cold")
    assert cut.ttft_ms is not None
    assert cut.cancel_ms is not None
    assert cut.cancel_ms > 0
    assert 1 <= len(cut.gaps_ms) < len(LONG.pieces) - 1
    assert (next_one.kind, next_one.error) == ("warm", None)
    assert creates[1]["previous_response_id"]


async def test_the_time_per_token_of_a_cancelled_answer_counts_from_eight_tokens_on() -> None:
    planned = PlannedSession("system", (turn(cancel_after=1),))
    for num_tokens, counts in ((LEAST_CANCELLED_TOKENS - 1, False), (LEAST_CANCELLED_TOKENS, True)):
        usage = {"input_tokens": 20, "output_tokens": num_tokens}
        async with ScriptedServer([replace(LONG, usage=usage)]) as server:
            (sample,) = await play(server.url, planned)
        assert (sample.tpot_ms is not None) is counts


async def test_an_answer_that_ends_before_its_cancel_is_a_turn_like_others() -> None:
    planned = PlannedSession("system", (turn(cancel_after=99),))
    async with ScriptedServer([ANSWER]) as server:
        (sample,) = await play(server.url, planned)
    assert (sample.status, sample.error, sample.cancel_ms) == ("completed", None, None)


async def test_a_turn_that_somebody_else_cancels_is_a_failure() -> None:
    def script(message: dict[str, Any]) -> ScriptedAnswer:
        stranger = {"stream_id": message["stream_id"]}
        asyncio.get_running_loop().call_later(0.05, server._cancel, stranger)
        return LONG

    async with ScriptedServer(script) as server:
        (sample,) = await play(server.url, PlannedSession("system", (turn(), turn(follows=0))))
    assert sample.error == "the turn ended as cancelled"


async def test_whoever_leaves_in_mid_answer_is_gone_and_disturbs_nobody() -> None:
    leaving = PlannedSession("system", (turn(), turn(follows=0, leave_after=2)))
    staying = PlannedSession("system", (turn(), turn(follows=0)))
    async with ScriptedServer([LONG]) as server:
        ours, left, *others = await play(server.url, leaving, staying)
        assert server._list("") == []
    assert (ours.status, ours.error) == ("completed", None)
    assert (left.status, left.error) == ("abandoned", None)
    assert left.ttft_ms is not None
    assert left.server_ttft_ms is None
    assert [sample.status for sample in others] == ["completed", "completed"]


async def test_an_answer_that_ended_before_its_person_left_is_a_turn_like_others() -> None:
    leaving = PlannedSession("system", (turn(leave_after=99),))
    async with ScriptedServer([ANSWER]) as server:
        (sample,) = await play(server.url, leaving)
    assert (sample.status, sample.error, sample.server_ttft_ms) == ("completed", None, 5.0)


async def test_only_the_connection_of_the_one_who_leaves_goes() -> None:
    plain = PlannedSession("system", (turn(),))
    leaving = PlannedSession("system", (turn(leave_after=1),))
    async with ScriptedServer([LONG]) as server:
        await play(server.url, plain)
        usual = server.num_connections
        await play(server.url, leaving)
        assert server.num_connections - usual == usual + 1


async def test_an_answer_that_fails_before_its_person_leaves_is_a_failure() -> None:
    failure = {"code": "server_error", "message": "the step failed"}
    planned = PlannedSession("system", (turn(leave_after=9),))
    async with ScriptedServer([ScriptedAnswer(failure=failure)]) as server:
        (sample,) = await play(server.url, planned)
    assert (sample.status, sample.error) == ("failed", "server_error: the step failed")


async def test_a_fork_continues_the_answer_that_was_drawn_and_the_line_goes_on() -> None:
    turns = (
        turn("one"),
        turn("two", 0),
        turn("three", 1),
        turn("aside", 1, is_fork=True),
        turn("four", 2),
    )
    async with ScriptedServer([ANSWER]) as server:
        samples = await play(server.url, PlannedSession("system", turns))
        creates = server.creates()
        parents = {m["input"]: m["previous_response_id"] for m in creates[1:]}
    assert [sample.kind for sample in samples] == ["cold", "warm", "warm", "forked", "warm"]
    assert parents["aside"] == parents["three"]
    assert parents["four"] not in (parents["aside"], parents["two"], parents["three"])


async def test_each_answer_has_the_length_that_was_drawn_for_it() -> None:
    turns = (turn(max_output_tokens=3), turn(follows=0, max_output_tokens=9))
    async with ScriptedServer([ANSWER]) as server:
        await play(server.url, PlannedSession("system", turns))
        assert [create["max_output_tokens"] for create in server.creates()] == [3, 9]


async def test_a_follow_up_is_restored_if_the_server_says_that_pages_came_back() -> None:
    timing = {**ANSWER.timing, "kv": {"restored_tokens": 64}}
    turns = (turn(), turn(follows=0))
    async with ScriptedServer([replace(ANSWER, timing=timing)]) as server:
        cold, restored = await play(server.url, PlannedSession("system", turns))
    assert (cold.kind, cold.restored_tokens) == ("cold", 64)
    assert (restored.kind, restored.after_restart) == ("restored", False)


async def test_in_a_closed_loop_the_time_counts_from_when_a_turn_was_sent() -> None:
    async with ScriptedServer([ANSWER]) as server:
        samples = await play(server.url, PlannedSession("system", (turn(), turn(follows=0))))
    for sample in samples:
        assert sample.late_ms >= 0
        assert not sample.from_due
        assert sample.ttft_ms is not None
        assert sample.started_ms + sample.ttft_ms <= sample.ended_ms


async def test_in_an_open_loop_a_client_that_is_late_has_the_delay_in_its_figures() -> None:
    sessions = [
        PlannedSession("first", (turn(),)),
        PlannedSession("second", (turn(),), arrives_ms=50),
    ]

    def script(message: dict[str, Any]) -> ScriptedAnswer:
        if isinstance(message["input"], list) and message["input"][0]["content"] == "first":
            time.sleep(0.25)  # in this process: the client is busy when the second one arrives
        return ANSWER

    async with ScriptedServer(script) as server:
        _, sample = await play(server.url, *sessions, options=TurnOptions(from_due=True))
    assert sample.late_ms > 100
    assert sample.ttft_ms is not None
    assert sample.ttft_ms > sample.late_ms
    assert sample.client_minus_server_ms == (
        sample.ttft_ms - sample.late_ms - ANSWER.timing["ttft_ms"]
    )


async def test_a_client_that_is_late_while_it_types_has_the_delay_in_its_figures() -> None:
    turns = (turn(), turn("one two three", 0, typed_ahead=True))

    def script(message: dict[str, Any]) -> ScriptedAnswer:
        if "previous_response_id" not in message:
            # In this process: the client is busy when the typing begins.
            asyncio.get_running_loop().call_later(0.1, time.sleep, 0.3)
        return ANSWER

    options = TurnOptions(type_ms=60, from_due=True)
    async with ScriptedServer(script) as server:
        _, typed = await play(server.url, PlannedSession("system", turns), options=options)
    assert typed.error is None
    assert typed.late_ms > 100
    assert typed.ttft_ms is not None
    assert typed.ttft_ms > typed.late_ms


async def test_a_turn_that_fails_was_sent_when_it_was_sent() -> None:
    lost = replace(ANSWER, first_delay_s=0.3, drop_after=1)
    async with ScriptedServer([lost]) as server:
        (sample,) = await play(server.url, PlannedSession("system", (turn(),)))
    assert sample.error is not None
    assert sample.started_ms < 250
    assert sample.ended_ms - sample.started_ms > 250


async def test_sessions_come_when_they_arrive_and_follow_ups_behind_the_answer() -> None:
    sooner = PlannedSession("system", (turn(), replace(turn(follows=0), think_ms=30)))
    later = PlannedSession("system", (turn(),), arrives_ms=150)
    async with ScriptedServer([ANSWER]) as server:
        first, second, other = await play(server.url, sooner, later)
    assert other.started_ms >= 150
    assert second.started_ms >= first.ended_ms + 30


def test_what_stands_there_while_one_types_is_the_beginning_of_what_is_sent() -> None:
    text = "two words\n\n  and more\n"
    assert half_typed(text) == ["two", "two words", "two words\n\n  and", text]
    assert half_typed("") == [""]


async def test_a_follow_up_that_is_typed_ahead_finds_its_own_words(tmp_path: Path) -> None:
    text = "a message of quite a few words that is typed and sent word by word"
    turns = (turn(text), turn(text, 0, typed_ahead=True))
    # The partial must be done before Enter: a short pause behind each word lets it.
    options = TurnOptions(type_ms=20)
    async with tiny_server(tmp_path, max_context=512) as endpoint:
        cold, typed = await play(endpoint.url, PlannedSession("system", turns), options=options)
    assert (cold.typed_ahead_tokens, typed.error) == (0, None)
    assert typed.typed_ahead_tokens > 0
    assert typed.late_ms < 1000  # the pauses of typing are no delay


async def test_a_real_server_goes_on_from_what_a_cancelled_answer_had(tmp_path: Path) -> None:
    turns = (turn(cancel_after=2, max_output_tokens=200), turn(follows=0))
    async with tiny_server(tmp_path, max_context=512) as endpoint:
        cut, follow_up = await play(endpoint.url, PlannedSession("system", turns))
    assert (cut.status, cut.error) == ("cancelled", None)
    assert 2 <= cut.output_tokens < 200
    assert follow_up.error is None
    assert follow_up.cached_tokens >= follow_up.history_tokens - 1


async def test_a_real_server_is_left_and_serves_the_others(tmp_path: Path) -> None:
    leaving = PlannedSession("first", (turn(leave_after=1, max_output_tokens=200),))
    staying = PlannedSession("second", (turn(), turn(follows=0)))
    async with tiny_server(tmp_path, max_context=512) as endpoint:
        left, *others = await play(endpoint.url, leaving, staying)
    assert (left.status, left.error) == ("abandoned", None)
    assert [sample.error for sample in others] == [None, None]


async def test_a_session_that_gets_no_connection_of_its_own_is_a_failure_of_its_own(
    tmp_path: Path,
) -> None:
    leaving = PlannedSession("first", (turn(leave_after=1),))
    staying = PlannedSession("second", (turn(), turn(follows=0)))
    limits = {"max_connections_per_key": 1}  # the one of those who stay
    async with timed_server(tmp_path, max_context=512, **limits) as endpoint:
        refused, *others = await play(endpoint.url, leaving, staying)
    assert refused.error is not None
    assert refused.error.startswith("server_unavailable: ")
    assert [sample.error for sample in others] == [None, None]


async def test_a_session_goes_on_behind_a_restart_from_its_last_answer() -> None:
    after = turn("again", 1)
    planned = PlannedSession("system", (turn(), turn(follows=0)), after_restart=after)
    samples: list[TurnSample] = []
    async with ScriptedServer([ANSWER]) as server:
        endpoint = Endpoint(server.url, None)
        bench = SessionsBench([planned], TurnOptions(), samples.append)
        await bench.run(endpoint)
        await server.stop()
        await server.start()
        await bench.run_restored(endpoint)
        answers = [m["previous_response_id"] for m in server.creates()[1:]]
        await bench.delete(endpoint)
        assert server._list("") == []
    assert [sample.kind for sample in samples] == ["cold", "warm", "restored"]
    assert [sample.after_restart for sample in samples] == [False, False, True]
    assert [sample.turn_index for sample in samples] == [0, 1, 2]
    assert len(set(answers)) == 2
    assert samples[2].late_ms < 1000  # nobody is late for a server that was down


async def test_a_session_that_failed_does_not_go_on_behind_a_restart() -> None:
    refusal = ScriptedAnswer(error={"code": "kv_exhausted", "message": "need 2 pages"})
    turns = (turn(), turn("aside", 0, is_fork=True))
    planned = PlannedSession("system", turns, after_restart=turn("again", 0))
    samples: list[TurnSample] = []
    async with ScriptedServer([ANSWER, refusal, ANSWER]) as server:
        bench = SessionsBench([planned], TurnOptions(), samples.append)
        await bench.run(Endpoint(server.url, None))
        await bench.run_restored(Endpoint(server.url, None))
    assert [sample.error for sample in samples] == [None, "kv_exhausted: need 2 pages"]
