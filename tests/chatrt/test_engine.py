"""Turns through a real tiny engine: reuse, forks, kinds of turns, cancel, batches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chatrt.errors import ChatrtError, ContextLengthExceeded, InvalidValue
from chatrt.params import SamplingParams
from chatrt.testing.engine import (
    GREEDY,
    engine_over,
    outcomes,
    run_outcome,
    run_turn,
    run_until_idle,
    step_until_tokens,
    tiny_engine,
    tiny_target,
    turn_request,
)
from chatrt.turn import FinishedEvent, FinishReason, TurnKind

if TYPE_CHECKING:
    from chatrt.engine import Engine
    from chatrt.text.tokenizer import Tokenizer

PROMPT = "hello world, the moon is made of cheese"
SEEDED = SamplingParams(temperature=1.0, seed=7, max_output_tokens=12)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Engine:
    return tiny_engine(tokenizer)


def num_free(engine: Engine) -> int:
    engine.sessions.check_invariants()
    return engine.sessions.num_free


def test_a_follow_up_reuses_all_but_the_last_sampled_token(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    prompt, more = tokenizer.encode(PROMPT), tokenizer.encode("and why?")
    first = run_turn(engine, turn_request("a", prompt))
    history = [*prompt, *first.output_ids]
    second = run_turn(engine, turn_request("b", more, parent=first, history=history))
    assert second.kv.reused_tokens == len(prompt) + first.num_generated - 1
    assert second.kv.computed_tokens == 1 + len(more)
    assert second.kv.miss_reason is None


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_regenerated_turn_computes_one_token_and_equals_a_cold_run(
    engine: Engine, tokenizer: Tokenizer, sampling: SamplingParams
) -> None:
    prompt, more = tokenizer.encode(PROMPT), tokenizer.encode("and why?")
    first = run_turn(engine, turn_request("a", prompt, sampling=sampling))
    history = [*prompt, *first.output_ids]
    asked = turn_request("b", more, parent=first, history=history, sampling=sampling)
    second = run_outcome(engine, asked)
    later = [*history, *more, *second.token_ids]
    run_turn(engine, turn_request("c", more, parent=second.end, history=later))
    again = run_outcome(engine, replace(asked, response_id="d"))
    cold = run_outcome(tiny_engine(tokenizer), replace(asked, parent_id=None))
    assert again.token_ids == second.token_ids == cold.token_ids
    assert again.text == cold.text
    assert again.end.kv.reused_tokens == len(history) + len(more) - 1
    assert again.end.kv.computed_tokens == 1


def test_a_turn_forks_from_a_tip_whose_session_runs_at_this_moment(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(PROMPT)
    first = run_turn(engine, turn_request("a", prompt))
    history = [*prompt, *first.output_ids]
    texts = ("one", "another one")
    asked = [
        turn_request(text, tokenizer.encode(text), parent=first, history=history) for text in texts
    ]
    for request in asked:
        engine.submit(request)
    found = outcomes(run_until_idle(engine))
    for request in asked:
        cold = run_outcome(tiny_engine(tokenizer), replace(request, parent_id=None))
        assert found[request.response_id].token_ids == cold.token_ids
        assert found[request.response_id].end.kv.reused_tokens == len(history) - 1


def test_eight_conversations_at_once_are_each_equal_to_themselves_alone(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    parents: dict[int, FinishedEvent] = {}
    histories: dict[int, list[int]] = {i: [] for i in range(8)}
    alone = [tiny_engine(tokenizer) for _ in range(8)]
    alone_parents: dict[int, FinishedEvent] = {}
    for turn in range(3):
        asked = {
            i: turn_request(
                f"{turn}.{i}",
                tokenizer.encode(f"turn {turn} of number {i} " + "the " * i * turn),
                parent=parents.get(i),
                history=histories[i],
                sampling=SEEDED if i % 2 else GREEDY,
            )
            for i in range(8)
        }
        for request in asked.values():
            engine.submit(replace(request))
        found = outcomes(run_until_idle(engine))
        for i, request in asked.items():
            together = found[request.response_id]
            by_itself = run_outcome(alone[i], replace(request))
            assert together.token_ids == by_itself.token_ids
            assert together.end.kv.reused_tokens == by_itself.end.kv.reused_tokens
            parents[i], alone_parents[i] = together.end, by_itself.end
            histories[i] = [*request.token_ids, *together.end.output_ids]
    engine.forget([f"{turn}.{i}" for turn in range(3) for i in range(8)])
    assert num_free(engine) == 64


def test_pages_are_shared_between_requests_of_one_salt_and_never_across_salts(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(PROMPT)
    run_turn(engine, turn_request("a", prompt, salt="one"))
    same = run_turn(engine, turn_request("b", prompt, salt="one"))
    other = run_turn(engine, turn_request("c", prompt, salt="two"))
    assert same.kv.reused_tokens == len(prompt) - 1
    assert other.kv.reused_tokens == 0


def test_a_parent_of_another_salt_is_not_continued(engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    first = run_turn(engine, turn_request("a", prompt, salt="one"))
    history = [*prompt, *first.output_ids]
    request = turn_request("b", prompt, parent=first, history=history, salt="two")
    assert run_turn(engine, request).kv.reused_tokens == 0


def test_a_history_that_is_not_the_tips_ids_is_recomputed_and_said_to_be_missed(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(PROMPT)
    first = run_turn(engine, turn_request("a", prompt))
    history = [prompt[0] + 1, *prompt[1:], *first.output_ids]
    request = turn_request("b", [5], parent=first, history=history)
    found = run_outcome(engine, request)
    cold = run_outcome(tiny_engine(tokenizer), replace(request, parent_id=None))
    assert found.token_ids == cold.token_ids
    assert found.end.kv.reused_tokens == 0
    assert found.end.kv.miss_reason == "evicted"


def test_a_prefill_has_no_answer_and_an_answer_behind_it_computes_the_rest(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    prompt, more = tokenizer.encode(PROMPT), tokenizer.encode("and why?")
    first = run_turn(engine, turn_request("a", prompt, kind=TurnKind.PREFILL))
    assert first.reason is FinishReason.PREFILLED
    assert (first.output_ids, first.num_generated) == ((), 0)
    assert first.kv.computed_tokens == len(prompt)
    request = turn_request("b", more, parent=first, history=prompt)
    second = run_outcome(engine, request)
    assert second.end.kv.computed_tokens == len(more)
    cold = run_outcome(tiny_engine(tokenizer), replace(request, parent_id=None))
    assert second.token_ids == cold.token_ids


def test_a_turn_without_new_tokens_computes_one_row(engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    first = run_turn(engine, turn_request("a", prompt, kind=TurnKind.PREFILL))
    found = run_outcome(engine, turn_request("b", [], parent=first, history=prompt))
    cold = run_outcome(tiny_engine(tokenizer), turn_request("b", prompt))
    assert found.token_ids == cold.token_ids
    assert found.end.kv.computed_tokens == 1


def test_a_token_that_the_model_has_no_embedding_for_is_refused_with_both_numbers(
    tokenizer: Tokenizer,
) -> None:
    target = tiny_target(tokenizer)
    target.decoder.config = replace(target.decoder.config, vocab_size=200)
    engine = engine_over(target, max_context=256)
    refused = run_turn(engine, turn_request("a", [1, 200]))
    assert isinstance(refused.error, InvalidValue)
    assert refused.error.message.startswith("the prompt has token 200 ")
    assert refused.error.message.endswith("the model has embeddings for 200")
    assert run_turn(engine, turn_request("b", [1, 199])).error is None


def test_an_answer_at_the_end_of_the_context_is_incomplete(tokenizer: Tokenizer) -> None:
    engine = tiny_engine(tokenizer, max_context=48, num_pages=3)
    prompt = tokenizer.encode("a" * 40)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    found = run_turn(engine, turn_request("a", prompt, sampling=sampling))
    assert found.reason is FinishReason.MAX_OUTPUT_TOKENS
    assert found.num_generated == 8
    history = [*prompt, *found.output_ids]
    refused = run_turn(engine, turn_request("b", [], parent=found, history=history))
    assert isinstance(refused.error, ContextLengthExceeded)
    assert "48" in refused.error.message


def test_a_seed_is_drawn_where_none_is_given_and_gives_the_same_text_again(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(PROMPT)
    unseeded = replace(SEEDED, seed=None)
    first = run_outcome(engine, turn_request("a", prompt, sampling=unseeded))
    other = run_outcome(engine, turn_request("b", prompt, sampling=unseeded))
    again = run_outcome(
        engine, turn_request("c", prompt, sampling=replace(SEEDED, seed=first.end.seed))
    )
    assert first.seed == first.end.seed
    assert first.end.seed != other.end.seed
    assert first.token_ids != other.token_ids
    assert again.token_ids == first.token_ids


# Cancel ------------------------------------------------------------------------------------------


def test_after_a_cancel_the_session_is_the_prompt_and_the_text_that_was_sent(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    prompt, more = tokenizer.encode(PROMPT), tokenizer.encode("go on")
    engine.submit(turn_request("a", prompt, sampling=replace(GREEDY, max_output_tokens=100)))
    found = outcomes(step_until_tokens(engine, 5))
    assert engine.cancel("a")
    outcomes(engine.take_events(), found)
    end = found["a"].end
    assert end.reason is FinishReason.CANCELLED
    assert tokenizer.decode(end.output_ids) == end.text
    history = [*prompt, *end.output_ids]
    request = turn_request("b", more, parent=end, history=history)
    second = run_outcome(engine, request)
    assert second.end.kv.reused_tokens == len(history) - 1
    cold = run_outcome(tiny_engine(tokenizer), replace(request, parent_id=None))
    assert second.token_ids == cold.token_ids


def test_a_cancel_while_queued_or_prefilling_or_decoding_ends_the_turn_once(
    tokenizer: Tokenizer,
) -> None:
    engine = tiny_engine(tokenizer, max_num_batched_tokens=64)
    engine.submit(turn_request("decoding", tokenizer.encode("x"), sampling=GREEDY))
    engine.step()
    engine.submit(turn_request("prefilling", tokenizer.encode("z" * 200)))
    engine.step()
    engine.submit(turn_request("queued", tokenizer.encode("y" * 20)))
    for response_id in ("queued", "prefilling", "decoding"):
        assert engine.cancel(response_id)
        assert not engine.cancel(response_id)
    found = outcomes(run_until_idle(engine))
    assert {o.end.reason for o in found.values()} == {FinishReason.CANCELLED}
    assert len(found) == 3
    engine.forget(found)
    assert num_free(engine) == 64


def test_a_cancel_frees_uncommitted_pages_at_once_and_makes_the_tips_own_evictable(
    tokenizer: Tokenizer,
) -> None:
    engine = tiny_engine(tokenizer, num_drafts=0)
    prompt = tokenizer.encode("q" * 100)
    engine.submit(turn_request("a", prompt))
    engine.step()
    engine.cancel("a")
    sessions = engine.sessions
    assert sessions.num_free + sessions.num_evictable == 64
    assert sessions.num_free >= 64 - 7


def test_cancelling_one_of_two_turns_leaves_the_other_as_it_was(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(PROMPT)
    kept = turn_request("kept", prompt, sampling=SEEDED)
    engine.submit(replace(kept))
    engine.submit(turn_request("cancelled", prompt, sampling=replace(SEEDED, seed=8)))
    found = outcomes(step_until_tokens(engine, 6))
    engine.cancel("cancelled")
    outcomes(run_until_idle(engine), found)
    assert found["kept"].token_ids == run_outcome(tiny_engine(tokenizer), kept).token_ids
    assert found["kept"].end.reason is FinishReason.MAX_OUTPUT_TOKENS


def test_a_paused_turn_stands_still_and_goes_on_with_the_same_text(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    request = turn_request("a", tokenizer.encode(PROMPT), sampling=SEEDED)
    engine.submit(replace(request))
    found = outcomes(step_until_tokens(engine, 3))
    engine.pause("a")
    engine.pause("a")
    assert not outcomes(run_until_idle(engine))
    engine.resume("a")
    engine.resume("a")
    outcomes(run_until_idle(engine), found)
    assert found["a"].token_ids == run_outcome(tiny_engine(tokenizer), request).token_ids


def test_a_paused_turn_can_be_cancelled(engine: Engine, tokenizer: Tokenizer) -> None:
    engine.submit(turn_request("a", tokenizer.encode(PROMPT)))
    step_until_tokens(engine, 3)
    engine.pause("a")
    assert engine.cancel("a")
    assert not engine.step()
    assert engine.num_running == 0


# Failure -----------------------------------------------------------------------------------------


def test_a_failed_step_ends_the_running_turns_and_leaves_the_queue(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(PROMPT)
    engine.submit(turn_request("a", prompt))
    engine.step()
    engine.submit(turn_request("b", prompt))
    engine.fail_all(ChatrtError("a cable was pulled"))
    found = outcomes(run_until_idle(engine))
    assert found["a"].end.reason is FinishReason.FAILED
    assert found["b"].end.reason is FinishReason.MAX_OUTPUT_TOKENS


def test_a_failed_turn_leaves_its_parent_as_it_was_and_nothing_behind(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    prompt, more = tokenizer.encode(PROMPT), tokenizer.encode("x" * 60)
    first = run_turn(engine, turn_request("a", prompt))
    history = [*prompt, *first.output_ids]
    engine.submit(turn_request("b", more, parent=first, history=history))
    step_until_tokens(engine, 3)
    engine.fail_all(ChatrtError("a cable was pulled"))
    engine.take_events()
    again = run_turn(engine, turn_request("c", more, parent=first, history=history))
    assert again.kv.reused_tokens >= len(history) - 1
    engine.forget(["a", "c"])
    assert num_free(engine) == 64


def test_forgetting_all_responses_returns_all_pages(engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    first = run_turn(engine, turn_request("a", prompt))
    history = [*prompt, *first.output_ids]
    run_turn(engine, turn_request("b", tokenizer.encode("b" * 40), parent=first, history=history))
    run_turn(engine, turn_request("c", tokenizer.encode("c" * 40), parent=first, history=history))
    engine.forget(["a"])
    assert num_free(engine) < 64
    engine.forget(["c", "b", "unknown"])
    assert num_free(engine) == 64


def test_forgetting_a_later_response_gives_back_the_pages_that_only_it_needs(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(PROMPT)
    first = run_turn(engine, turn_request("a", prompt))
    before = num_free(engine)
    history = [*prompt, *first.output_ids]
    run_turn(engine, turn_request("b", tokenizer.encode("b" * 64), parent=first, history=history))
    engine.forget(["b"])
    assert num_free(engine) == before
    again = run_turn(engine, turn_request("c", [5], parent=first, history=history))
    assert again.kv.reused_tokens == len(history) - 1
