"""Too few pages: who waits, who is refused, who fails, and what comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chatrt.errors import OutOfPages
from chatrt.params import SamplingParams
from chatrt.testing.drafter import ScriptedDrafter
from chatrt.testing.engine import (
    outcomes,
    run_outcome,
    run_turn,
    run_until_idle,
    tiny_engine,
    turn_request,
)
from chatrt.turn import FinishReason, TurnKind
from tests.chatrt.engine_support import ColdRuns

if TYPE_CHECKING:
    from chatrt.text.tokenizer import Tokenizer

LONG = SamplingParams(temperature=0.0, max_output_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def cold(tokenizer: Tokenizer) -> ColdRuns:
    return ColdRuns(tokenizer)


def test_an_arrival_waits_for_pages_and_the_running_stream_is_not_touched(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    engine = tiny_engine(tokenizer, num_pages=5)
    running = turn_request("running", tokenizer.encode("x" * 30), sampling=LONG)
    arrival = turn_request("arrival", tokenizer.encode("y" * 60))
    engine.submit(replace(running))
    engine.step()
    engine.submit(replace(arrival))
    events = run_until_idle(engine)
    order = [event.response_id for event in events]
    assert order == sorted(order, reverse=True), "the arrival began after the stream had ended"
    found = outcomes(events)
    cold.assert_equal(running, found["running"])
    cold.assert_equal(arrival, found["arrival"])
    engine.forget(["running", "arrival"])
    assert engine.sessions.num_free == 5


def test_a_prompt_that_does_not_fit_alone_is_refused_with_the_numbers(
    tokenizer: Tokenizer,
) -> None:
    engine = tiny_engine(tokenizer, num_pages=4)
    end = run_turn(engine, turn_request("a", tokenizer.encode("x" * 70)))
    assert end.reason is FinishReason.FAILED
    assert isinstance(end.error, OutOfPages)
    assert (end.error.need, end.error.free, end.error.total) == (5, 4, 4)
    assert run_turn(engine, turn_request("b", tokenizer.encode("x" * 30))).error is None


def test_more_idle_sessions_than_the_pool_holds_still_chat(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    engine = tiny_engine(tokenizer, num_pages=8)
    sampling = SamplingParams(temperature=0.0, max_output_tokens=6)
    first = {
        i: turn_request(str(i), tokenizer.encode(f"{i} " + "the moon " * 4), sampling=sampling)
        for i in range(8)
    }
    ends = {i: run_turn(engine, replace(request)) for i, request in first.items()}
    reasons = []
    for i, request in first.items():
        history = [*request.token_ids, *ends[i].output_ids]
        more = turn_request(f"{i} more", [5], parent=ends[i], history=history, sampling=sampling)
        found = run_outcome(engine, replace(more))
        cold.assert_equal(more, found)
        reasons.append(found.end.kv.miss_reason)
        engine.sessions.check_invariants()
    assert "evicted" in reasons


def test_two_conversations_in_turn_both_stay_while_memory_allows(tokenizer: Tokenizer) -> None:
    engine = tiny_engine(tokenizer, num_pages=16)
    history = {"a": tokenizer.encode("a" * 40), "b": tokenizer.encode("b" * 40)}
    ends = {name: run_turn(engine, turn_request(name, history[name])) for name in history}
    for name, end in ends.items():
        whole = [*history[name], *end.output_ids]
        again = run_turn(engine, turn_request(name * 2, [5], parent=end, history=whole))
        assert again.kv.reused_tokens == len(whole) - 1


def test_answers_that_would_outgrow_the_pool_together_wait_for_each_other(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    engine = tiny_engine(tokenizer, num_pages=12)
    requests = [
        turn_request(f"{i}", tokenizer.encode(f"{i} " + "x" * 28), sampling=LONG) for i in range(8)
    ]
    for request in requests:
        engine.submit(replace(request))
    found = outcomes(run_until_idle(engine))
    for request in requests:
        assert found[request.response_id].end.reason is FinishReason.MAX_OUTPUT_TOKENS
        cold.assert_equal(request, found[request.response_id])


def test_streams_that_outgrow_the_pool_fail_youngest_first_with_the_text_they_had(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    engine = tiny_engine(tokenizer, num_pages=5, num_expected=1)
    old = turn_request("old", tokenizer.encode("x" * 30), sampling=LONG)
    young = turn_request("young", tokenizer.encode("y" * 30), sampling=LONG)
    for arrival, request in enumerate((old, young)):
        request.stamps.received_ns = arrival
        engine.submit(replace(request))
    found = outcomes(run_until_idle(engine))
    assert found["old"].end.reason is FinishReason.MAX_OUTPUT_TOKENS
    cold.assert_equal(old, found["old"])
    end = found["young"].end
    assert end.reason is FinishReason.FAILED
    assert isinstance(end.error, OutOfPages)
    assert end.num_generated > 1
    assert end.text == found["young"].text
    cold.assert_equal(young, found["young"], whole=False)
    engine.forget(["old", "young"])
    assert engine.sessions.num_free == 5


def test_drafts_never_take_a_page_that_a_stream_or_a_cached_answer_needs(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    engine = tiny_engine(
        tokenizer, num_pages=6, drafter=ScriptedDrafter(num_right=(0,)), num_drafts=12
    )
    kept = turn_request("kept", tokenizer.encode("k" * 30))
    end = run_turn(engine, replace(kept))
    busy = turn_request("busy", tokenizer.encode("x" * 20), sampling=LONG)
    busy.sampling = replace(LONG, max_output_tokens=24)
    cold.assert_equal(busy, run_outcome(engine, replace(busy)))
    history = [*kept.token_ids, *end.output_ids]
    again = run_turn(engine, turn_request("again", [5], parent=end, history=history))
    assert again.kv.reused_tokens == len(history) - 1


def test_an_answer_is_not_kept_waiting_by_a_prompt_that_is_still_being_typed(
    tokenizer: Tokenizer,
) -> None:
    engine = tiny_engine(tokenizer, num_pages=6)
    engine.submit(turn_request("running", tokenizer.encode("x" * 30), sampling=LONG))
    engine.step()
    typed = turn_request(
        "typed", tokenizer.encode("t" * 80), kind=TurnKind.TYPED_AHEAD, typed_ahead_key="lane"
    )
    engine.submit(typed)
    engine.submit(turn_request("answer", tokenizer.encode("y"), typed_ahead_key="other"))
    found = outcomes(run_until_idle(engine))
    assert list(found) == ["running", "answer", "typed"]


def test_a_higher_priority_leaves_the_queue_first(tokenizer: Tokenizer) -> None:
    engine = tiny_engine(tokenizer, num_pages=6)
    engine.submit(turn_request("running", tokenizer.encode("x" * 60), sampling=LONG))
    engine.step()
    for priority in (0, 5, -1, 5):
        name = f"{priority} {engine.num_waiting}"
        request = turn_request(name, tokenizer.encode("y" * 60))
        request.priority = priority
        engine.submit(request)
    found = outcomes(run_until_idle(engine))
    assert list(found) == ["running", "5 1", "5 3", "0 0", "-1 2"]


def test_a_long_prompt_beside_a_stream_is_cut_into_chunks_and_changes_no_text(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    engine = tiny_engine(tokenizer, max_num_batched_tokens=64)
    stream = turn_request("stream", tokenizer.encode("x" * 10), sampling=LONG)
    long = turn_request("long", tokenizer.encode("the moon " * 25))
    engine.submit(replace(stream))
    engine.step()
    engine.submit(replace(long))
    found = outcomes(engine.take_events())
    num_streamed = []
    while "long" not in found or not found["long"].token_ids:
        engine.step()
        outcomes(engine.take_events(), found)
        num_streamed.append(len(found["stream"].token_ids))
    assert len(num_streamed) == -(-len(long.token_ids) // 63)
    assert num_streamed == sorted(set(num_streamed)), "the stream went on in every step"
    outcomes(run_until_idle(engine), found)
    for request in (stream, long):
        cold.assert_equal(request, found[request.response_id])
