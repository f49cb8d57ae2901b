"""Tips and half-typed prompts: what a new turn finds, and what is gone when nobody needs it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chatrt.engine.residency import Residency
from chatrt.pages import PageAllocator
from chatrt.params import SamplingParams
from chatrt.prefix import PrefixTree
from chatrt.session_manager import SessionManager
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
    from chatrt.engine import Engine
    from chatrt.session import Session
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import FinishedEvent, TurnRequest

LANE = "lane"


@pytest.fixture(scope="module")
def cold(tokenizer: Tokenizer) -> ColdRuns:
    return ColdRuns(tokenizer)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Engine:
    return tiny_engine(tokenizer)


def half_typed(name: str, token_ids: list[int], **fields: object) -> TurnRequest:
    request = turn_request(name, token_ids, kind=TurnKind.TYPED_AHEAD, typed_ahead_key=LANE)
    return replace(request, **fields)  # type: ignore[arg-type]  # names of its own fields


def num_free(engine: Engine) -> int:
    engine.sessions.check_invariants()
    return engine.sessions.num_free


# Typed ahead -------------------------------------------------------------------------------------


def test_what_was_typed_is_not_computed_again_when_it_is_sent(
    engine: Engine, tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    text = list(b"the moon is made of cheese and the sea of salt")
    for length in (7, 20, 40):
        end = run_turn(engine, half_typed(f"typed {length}", text[:length]))
        assert end.reason is FinishReason.PREFILLED
    request = turn_request("sent", text, typed_ahead_key=LANE)
    found = run_outcome(engine, request)
    assert found.end.kv.typed_ahead_tokens == found.end.kv.reused_tokens == 40
    assert found.end.kv.computed_tokens == len(text) - 40
    cold.assert_equal(request, found)


def test_half_typed_text_behind_a_tip_leaves_the_tip_usable(
    engine: Engine, tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    prompt = list(b"hello hello hello hello")
    first = run_turn(engine, turn_request("a", prompt))
    history = [*prompt, *first.output_ids]
    behind = {"num_history": len(history), "parent_id": "a"}
    run_turn(engine, half_typed("typed", [*history, *b"never sent, "], **behind))
    other = turn_request("b", list(b"sent"), parent=first, history=history)
    found = run_outcome(engine, other)
    assert found.end.kv.reused_tokens == len(history) - 1
    cold.assert_equal(other, found)
    sent = turn_request("c", list(b"never sent, or so"), parent=first, history=history)
    sent.typed_ahead_key = LANE
    again = run_outcome(engine, sent)
    assert again.end.kv.typed_ahead_tokens == len(b"never sent, ")
    cold.assert_equal(sent, again)


def test_text_that_was_taken_back_and_typed_anew_counts_up_to_where_it_differs(
    engine: Engine, tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    run_turn(engine, half_typed("one", list(b"the moon is made of cheese and so on and on")))
    run_turn(engine, half_typed("two", list(b"the moon is made of salt, or is it the sea?")))
    request = turn_request("sent", list(b"the moon is a balloon"), typed_ahead_key=LANE)
    found = run_outcome(engine, request)
    assert found.end.kv.typed_ahead_tokens == len(b"the moon is ")
    cold.assert_equal(request, found)
    engine.forget(["sent"])
    assert num_free(engine) == 64


def test_a_newer_half_typed_prompt_or_the_create_supersedes_one_that_is_queued_or_running(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    engine = tiny_engine(tokenizer, max_num_batched_tokens=64)
    text = list(b"the moon is made of cheese " * 6)
    engine.submit(half_typed("queued", text[:100]))
    engine.submit(half_typed("running", text[:120]))
    engine.step()
    request = turn_request("sent", text, typed_ahead_key=LANE)
    engine.submit(replace(request))
    found = outcomes(run_until_idle(engine))
    for name in ("queued", "running"):
        assert found[name].end.reason is FinishReason.CANCELLED
    assert found["sent"].end.kv.typed_ahead_tokens == 64
    cold.assert_equal(request, found["sent"])


def test_another_lanes_create_leaves_what_is_typed_here(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    text = list(b"the moon is made of cheese")
    run_turn(engine, half_typed("typed", text[:20]))
    run_turn(engine, turn_request("other", list(b"hello"), typed_ahead_key="another"))
    sent = run_turn(engine, turn_request("sent", text, typed_ahead_key=LANE))
    assert sent.kv.typed_ahead_tokens == 20


def test_nothing_certain_to_compute_yet_ends_a_half_typed_turn_at_once(engine: Engine) -> None:
    end = run_turn(engine, half_typed("typed", []))
    assert (end.reason, end.error) == (FinishReason.PREFILLED, None)
    assert num_free(engine) == 64


def test_the_same_text_typed_twice_computes_one_row(engine: Engine) -> None:
    text = list(b"the moon is made of cheese")
    run_turn(engine, half_typed("one", text))
    again = run_turn(engine, half_typed("two", text))
    assert again.reason is FinishReason.PREFILLED
    assert again.kv.computed_tokens == 1


def test_a_lane_that_is_gone_leaves_nothing(engine: Engine) -> None:
    text = list(b"the moon is made of cheese and the sea of salt")
    run_turn(engine, half_typed("one", text))
    engine.submit(half_typed("two", [*text, *text]))
    engine.step()
    engine.drop_lane(LANE)
    engine.drop_lane(LANE)
    found = outcomes(engine.take_events())
    assert found["two"].finished is not None
    assert num_free(engine) == 64


def test_what_is_typed_on_one_key_is_not_continued_by_another(engine: Engine) -> None:
    text = list(b"the moon is made of cheese")
    run_turn(engine, half_typed("typed", text, salt="one"))
    request = turn_request("sent", text, typed_ahead_key=LANE, salt="two")
    assert run_turn(engine, request).kv.reused_tokens == 0
    engine.forget(["sent"])
    assert num_free(engine) == 64


def test_a_long_known_prompt_is_not_given_up_for_a_short_typed_one(engine: Engine) -> None:
    text = list(b"the moon is made of cheese and the sea of salt")
    run_turn(engine, turn_request("known", text))
    run_turn(engine, half_typed("typed", list(b"the stars")))
    found = run_turn(engine, turn_request("sent", text, typed_ahead_key=LANE))
    assert found.kv.reused_tokens == len(text) - 1


# Tips --------------------------------------------------------------------------------------------


def test_the_least_recently_used_session_is_closed_first(tokenizer: Tokenizer) -> None:
    engine = tiny_engine(tokenizer, max_parked=2)
    prompts = {name: list(name.encode() * 40) for name in "abc"}
    ends = {name: run_turn(engine, turn_request(name, prompts[name])) for name in "ab"}

    def again(name: str, number: int) -> FinishedEvent:
        history = [*prompts[name], *ends[name].output_ids]
        request = turn_request(f"{name}{number}", [5], parent=ends[name], history=history)
        return run_turn(engine, request)

    assert again("a", 1).kv.miss_reason is None
    ends["c"] = run_turn(engine, turn_request("c", prompts["c"]))
    assert again("a", 2).kv.miss_reason is None
    assert again("b", 1).kv.miss_reason == "evicted"
    assert num_free(engine) >= 64 - 3 * 5


def test_a_tip_that_others_fork_from_counts_as_used(tokenizer: Tokenizer) -> None:
    engine = tiny_engine(tokenizer, max_parked=3)
    prompt = list(b"a" * 40)
    first = run_turn(engine, turn_request("a", prompt))
    history = [*prompt, *first.output_ids]
    run_turn(engine, turn_request("moved on", [5], parent=first, history=history))
    for number in range(4):
        request = turn_request(f"fork {number}", [6], parent=first, history=history)
        assert run_turn(engine, request).kv.reused_tokens == len(history)


def test_forgetting_in_any_order_returns_all_pages(tokenizer: Tokenizer) -> None:
    for order in ("abcd", "dcba", "bdac"):
        engine = tiny_engine(tokenizer)
        prompt = list(b"the moon is made of cheese and the sea of salt")
        first = run_turn(engine, turn_request("a", prompt))
        history = [*prompt, *first.output_ids]
        second = run_turn(engine, turn_request("b", prompt, parent=first, history=history))
        longer = [*history, *prompt, *second.output_ids]
        run_turn(engine, turn_request("c", prompt, parent=second, history=longer))
        run_turn(engine, turn_request("d", list(b"d" * 50), parent=first, history=history))
        for name in order:
            engine.forget([name])
            engine.sessions.check_invariants()
        assert num_free(engine) == 64


def test_forgetting_the_parent_of_a_running_turn_leaves_it_alone(
    engine: Engine, tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    prompt = list(b"the moon is made of cheese")
    first = run_turn(engine, turn_request("a", prompt))
    history = [*prompt, *first.output_ids]
    request = turn_request("b", [5], parent=first, history=history)
    engine.submit(replace(request))
    engine.step()
    engine.forget(["a"])
    found = outcomes(run_until_idle(engine))
    cold.assert_equal(request, found["b"])
    engine.forget(["b"])
    assert num_free(engine) == 64


def test_forgetting_an_answer_that_a_stop_string_cut_at_a_page_returns_all_pages(
    engine: Engine,
) -> None:
    letter = {ord("a"): 100.0}
    sampling = SamplingParams(
        temperature=0.0, logit_bias=letter, stop=("a" * 20,), max_output_tokens=30
    )
    end = run_turn(engine, turn_request("a", list(b"b" * 30), sampling=sampling))
    assert end.output_ids == ()
    engine.forget(["a"])
    assert num_free(engine) == 64


# By itself ---------------------------------------------------------------------------------------


def residency(max_sessions: int = 8) -> tuple[Residency, SessionManager, list[int]]:
    allocator = PageAllocator(16)
    sessions = SessionManager(allocator, PrefixTree(allocator), page_size=16)
    closed: list[int] = []
    return (
        Residency(sessions, max_sessions=max_sessions, on_close=closed.append),
        sessions,
        closed,
    )


def compute(sessions: SessionManager, session: Session) -> None:
    """As if a forward had written all rows but the last token's."""
    num_rows = len(session.token_ids) - 1
    sessions.reserve(session, num_rows - session.num_computed)
    sessions.commit(session, (), num_computed=num_rows)


def test_closed_sessions_are_reported_once_each() -> None:
    tips, sessions, closed = residency(max_sessions=1)
    ids = []
    for name in "abc":
        placement = tips.place(turn_request(name, list(name.encode() * 20)))
        compute(sessions, placement.session)
        tips.keep_tip(name, placement.session)
        ids.append(placement.session.session_id)
    assert (tips.num_tips, closed) == (1, ids[:2])
    tips.forget("abc")
    assert (tips.num_tips, closed) == (0, ids)
    assert sessions.num_free == 16


def test_a_session_whose_turn_failed_keeps_its_older_responses_only() -> None:
    tips, sessions, closed = residency()
    first = tips.place(turn_request("a", list(b"a" * 20)))
    compute(sessions, first.session)
    tips.keep_tip("a", first.session)
    again = turn_request("b", list(b"a" * 20 + b"b" * 40))
    again.num_history, again.parent_id = 20, "a"
    second = tips.place(again)
    assert second.session is first.session
    compute(sessions, second.session)
    tips.keep_older(second.session)
    sessions.check_invariants()
    assert closed == [first.session.session_id]
    third = tips.place(replace(again, response_id="c"))
    assert third.num_reused == 19
    assert third.miss_reason is None
    tips.keep_older(third.session)
    tips.forget(["a"])
    assert sessions.num_free == 16


# Pins --------------------------------------------------------------------------------------------


def test_a_pinned_conversation_outlives_younger_ones_and_a_pin_is_soft(
    tokenizer: Tokenizer,
) -> None:
    engine = tiny_engine(tokenizer, num_pages=16)
    prompts = {name: list(name.encode() * 40) for name in "abcde"}
    pinned = replace(turn_request("a", prompts["a"]), pin_ms=1e9)
    run_turn(engine, pinned)
    for name in "bcde":
        run_turn(engine, turn_request(name, prompts[name]))
    again = run_turn(engine, turn_request("a again", [*prompts["a"], 5]))
    assert again.kv.reused_tokens == len(prompts["a"])
    whole_pool = turn_request("f", list(b"f" * 230))
    assert run_turn(engine, whole_pool).error is None


def test_a_higher_priority_outlives_a_lower_one_while_both_are_pinned(
    tokenizer: Tokenizer,
) -> None:
    engine = tiny_engine(tokenizer, num_pages=16)
    prompts = {name: list(name.encode() * 60) for name in "abcd"}
    for name, priority in (("a", 5), ("b", 0)):
        run_turn(engine, replace(turn_request(name, prompts[name]), pin_ms=1e9, priority=priority))
    for name in "cd":
        run_turn(engine, replace(turn_request(name, prompts[name]), pin_ms=1e9))
    reused = {
        name: run_turn(engine, turn_request(f"{name} 2", [*prompts[name], 5])).kv.reused_tokens
        for name in "ab"
    }
    assert reused["a"] == 60
    assert reused["b"] < 60


def test_a_pin_ends_when_its_time_is_over(tokenizer: Tokenizer) -> None:
    engine = tiny_engine(tokenizer, num_pages=16)
    prompts = {name: list(name.encode() * 40) for name in "abcdef"}
    # The engine's clock counts its own calls, in nanoseconds: this is over by the next turn.
    run_turn(engine, replace(turn_request("a", prompts["a"]), pin_ms=1e-6))
    for name in "bcdef":
        run_turn(engine, turn_request(name, prompts[name]))
    again = run_turn(engine, turn_request("a again", [*prompts["a"], 5]))
    assert again.kv.reused_tokens < len(prompts["a"])
    engine.sessions.check_invariants()
