"""Speculation through the engine: whatever is drafted, the turn is that of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chatrt.params import SamplingParams
from chatrt.testing.drafter import ScriptedDrafter
from chatrt.testing.engine import (
    Outcome,
    outcomes,
    run_outcome,
    run_turn,
    run_until_idle,
    step_until_tokens,
    tiny_engine,
    turn_request,
)
from chatrt.testing.tokenizer import IM_END
from chatrt.turn import FinishReason
from chatrt_drafts.ngram import NgramDrafter
from tests.chatrt.engine_support import ColdRuns

if TYPE_CHECKING:
    from chatrt.engine import Engine
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import TurnRequest

PROMPT = "the moon in the sea, the moon in the sea, the moon"
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.8, seed=11, top_k=40, top_p=0.95),
    "penalised": SamplingParams(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.5
    ),
    "penalised and seeded": SamplingParams(temperature=1.2, seed=5, frequency_penalty=1.1),
    "biased": SamplingParams(temperature=0.0, logit_bias={65: 6.0, 66: 6.5, 67: 6.0}),
}


@pytest.fixture(scope="module")
def cold(tokenizer: Tokenizer) -> ColdRuns:
    return ColdRuns(tokenizer)


def ask(tokenizer: Tokenizer, sampling: SamplingParams, num_tokens: int = 32) -> TurnRequest:
    sampling = replace(sampling, max_output_tokens=num_tokens, top_logprobs=2)
    return turn_request("a", tokenizer.encode(PROMPT), sampling=sampling)


def drafted(
    tokenizer: Tokenizer, request: TurnRequest, plain: Outcome, num_right: tuple[int, ...], k: int
) -> tuple[Outcome, ScriptedDrafter, Engine]:
    """The outcome with a drafter that knows the plain answer."""
    sequence = [*request.token_ids, *plain.token_ids]
    drafter = ScriptedDrafter([sequence], num_right=num_right, num_extra=2)
    engine = tiny_engine(tokenizer, drafter=drafter, num_drafts=k)
    return run_outcome(engine, replace(request, speculation_tokens=k)), drafter, engine


def assert_same(found: Outcome, plain: Outcome) -> None:
    assert found.token_ids == plain.token_ids
    assert found.text == plain.text
    assert found.end.reason is plain.end.reason
    assert [entry.token_id for entry in found.logprobs] == plain.token_ids
    for entry, expected in zip(found.logprobs, plain.logprobs, strict=True):
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-4)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("num_right", [(64,), (0,), (3, 0, 1)], ids=["right", "wrong", "mixed"])
def test_text_and_logprobs_are_those_without_drafts(
    tokenizer: Tokenizer, cold: ColdRuns, name: str, num_right: tuple[int, ...]
) -> None:
    request = ask(tokenizer, PARAMS[name])
    plain = cold.run(request)
    found, _, engine = drafted(tokenizer, request, plain, num_right, 4)
    assert_same(found, plain)
    assert found.end.speculation.drafted > 0
    history = [*request.token_ids, *found.end.output_ids]
    more = turn_request("b", [5], parent=found.end, history=history)
    cold.assert_equal(more, run_outcome(engine, more))


def test_all_drafts_of_a_perfect_drafter_are_accepted_at_every_depth(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    for k in (1, 2, 5, 15):
        request = ask(tokenizer, PARAMS["seeded"])
        found, _, _ = drafted(tokenizer, request, cold.run(request), (64,), k)
        figures = found.end.speculation
        assert figures.accepted == figures.drafted > 0
        assert figures.emitted == found.end.num_generated == 32
        assert figures.steps == 1 + -(-31 // (k + 1))


def test_a_wrong_drafter_costs_steps_and_nothing_else(tokenizer: Tokenizer, cold: ColdRuns) -> None:
    request = ask(tokenizer, PARAMS["greedy"])
    found, drafter, engine = drafted(tokenizer, request, cold.run(request), (0,), 5)
    figures = found.end.speculation
    assert figures.accepted == 0
    assert figures.steps == figures.emitted == 32
    assert figures.accepted_per_position == (0, 0, 0, 0, 0)
    # The last step drafts nothing, for want of room.
    assert list(drafter.committed.values()) == [len(request.token_ids) + 31]
    engine.forget(["a"])
    assert engine.sessions.num_free == 64


def test_the_ngram_drafter_changes_no_text(tokenizer: Tokenizer, cold: ColdRuns) -> None:
    looping = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys((97, 98), 30.0))
    for sampling in (*PARAMS.values(), looping):
        request = ask(tokenizer, sampling, 48)
        engine = tiny_engine(tokenizer, drafter=NgramDrafter(), num_drafts=4)
        found = run_outcome(engine, replace(request))
        assert_same(found, cold.run(request))
    assert found.end.speculation.accepted > 0


def test_an_answer_that_ends_inside_an_accepted_run_has_usage_and_kv_up_to_its_end(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    plain = cold.run(ask(tokenizer, PARAMS["seeded"], 24))
    for end_at in (3, 4, 5, 6, 7, 8):
        stop_id = plain.token_ids[end_at]
        if stop_id in plain.token_ids[:end_at]:
            continue
        sampling = replace(PARAMS["seeded"], stop_token_ids=(stop_id,))
        request = ask(tokenizer, sampling, 24)
        sequence = [*request.token_ids, *plain.token_ids]
        engine = tiny_engine(tokenizer, drafter=ScriptedDrafter([sequence]), num_drafts=6)
        found = run_outcome(engine, request)
        assert found.end.reason is FinishReason.END_OF_TURN
        assert found.token_ids == plain.token_ids[: end_at + 1]
        assert found.end.num_generated == end_at + 1
        assert found.end.speculation.emitted == end_at + 1
        assert len(found.logprobs) == end_at + 1
        history = [*request.token_ids, *found.end.output_ids]
        more = turn_request("b", [5], parent=found.end, history=history)
        second = run_outcome(engine, more)
        assert second.end.kv.reused_tokens == len(history) - 1
        cold.assert_equal(more, second)


def test_an_end_of_turn_that_the_target_rejects_ends_nothing(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    request = ask(tokenizer, PARAMS["greedy"])
    plain = cold.run(request)
    end_id = tokenizer.id_of(IM_END)
    assert end_id is not None
    assert end_id not in plain.token_ids
    sequences = [
        [*request.token_ids, *plain.token_ids[:i], end_id, end_id, end_id] for i in range(1, 32)
    ]
    engine = tiny_engine(tokenizer, drafter=ScriptedDrafter(sequences), num_drafts=3)
    found = run_outcome(engine, request)
    assert_same(found, plain)
    assert found.end.speculation.drafted > 0


def test_drafts_reach_neither_beyond_the_token_cap_nor_beyond_the_context(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    prompt = tokenizer.encode("z" * 41)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    request = turn_request("a", prompt, sampling=sampling)
    for cap in (None, 1, 2, 3, 6):
        capped = replace(request, sampling=replace(sampling, max_output_tokens=cap))
        plain = run_outcome(tiny_engine(tokenizer, max_context=48), replace(capped))
        drafter = ScriptedDrafter([[*prompt, *plain.token_ids, *range(30)]])
        engine = tiny_engine(tokenizer, max_context=48, drafter=drafter, num_drafts=12)
        found = run_outcome(engine, capped)
        assert found.token_ids == plain.token_ids
        assert found.end.num_generated == (cap or 7)
        assert found.end.reason is FinishReason.MAX_OUTPUT_TOKENS
        engine.sessions.check_invariants()


def test_a_request_can_turn_drafting_off(tokenizer: Tokenizer) -> None:
    request = replace(ask(tokenizer, PARAMS["greedy"]), speculation_tokens=0)
    engine = tiny_engine(tokenizer, drafter=ScriptedDrafter(), num_drafts=4)
    assert run_turn(engine, request).speculation.drafted == 0


def test_drafting_for_one_of_two_turns_leaves_the_other_alone(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    one = ask(tokenizer, PARAMS["seeded"])
    other = replace(ask(tokenizer, PARAMS["penalised"]), response_id="b", speculation_tokens=0)
    sequence = [*one.token_ids, *cold.run(one).token_ids]
    drafter = ScriptedDrafter([sequence], num_right=(2, 0, 5))
    engine = tiny_engine(tokenizer, drafter=drafter, num_drafts=5)
    engine.submit(replace(one))
    engine.submit(replace(other))
    found = outcomes(run_until_idle(engine))
    assert_same(found["a"], cold.run(one))
    assert_same(found["b"], cold.run(other))


def test_the_drafter_is_told_of_tokens_that_a_stop_string_cut_off(tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(
        temperature=0.0, logit_bias={ord("a"): 100.0}, stop=("aaaaa",), max_output_tokens=30
    )
    prompt = tokenizer.encode("b")
    drafter = ScriptedDrafter([[*prompt, *[ord("a")] * 30]])
    engine = tiny_engine(tokenizer, drafter=drafter, num_drafts=3)
    found = run_turn(engine, turn_request("a", prompt, sampling=sampling))
    assert found.output_ids == ()
    assert list(drafter.committed.values()) == [len(prompt) - 1]


def test_what_a_stop_string_leaves_to_show_does_not_depend_on_how_its_tokens_came(
    tokenizer: Tokenizer,
) -> None:
    [hello] = tokenizer.encode("hello")
    sampling = SamplingParams(
        temperature=0.0, logit_bias={hello: 100.0}, stop=("lohellohello",), top_logprobs=0
    )
    prompt = tokenizer.encode("b")
    request = turn_request("a", prompt, sampling=sampling)
    drafter = ScriptedDrafter([[*prompt, *[hello] * 30]])
    plain = run_outcome(tiny_engine(tokenizer), replace(request))
    found = run_outcome(tiny_engine(tokenizer, drafter=drafter, num_drafts=3), request)
    assert found.text == plain.text == "hel"
    # one token was cut to two ids; the others were sent in no part
    assert found.end.num_shown == plain.end.num_shown == 1
    assert found.logprobs[:1] == plain.logprobs[:1]


def test_a_cancel_between_verify_steps_frees_the_pages_of_drafts(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    request = ask(tokenizer, PARAMS["greedy"], 64)
    drafter = ScriptedDrafter([[*request.token_ids, *cold.run(request).token_ids]])
    engine = tiny_engine(tokenizer, drafter=drafter, num_drafts=6)
    engine.submit(replace(request))
    found = outcomes(step_until_tokens(engine, 10))
    engine.cancel("a")
    outcomes(engine.take_events(), found)
    history = [*request.token_ids, *found["a"].end.output_ids]
    more = turn_request("b", [5], parent=found["a"].end, history=history)
    cold.assert_equal(more, run_outcome(engine, more))
    engine.forget(["a", "b"])
    engine.sessions.check_invariants()
    assert engine.sessions.num_free == 64
