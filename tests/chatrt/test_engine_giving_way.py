"""Work that nobody waits for holds nobody up who waits, and pins end."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from chatrt.params import SamplingParams
from chatrt.testing.engine import (
    outcomes,
    run_turn,
    run_until_idle,
    step_until_tokens,
    tiny_engine,
    turn_request,
)
from chatrt.turn import FinishReason, TurnKind

if TYPE_CHECKING:
    from chatrt.engine import Engine
    from chatrt.testing.engine import Outcome
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import TurnRequest

PROMPT = list(b"the moon is made of cheese and the sea of salt")
GLUE = list(b"|end||user|")
LONG = SamplingParams(temperature=0.0, max_output_tokens=150, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_output_tokens=2, ignore_eos=True)


def prepared(parent_id: str, token_ids: list[int]) -> TurnRequest:
    request = turn_request(f"prepared {parent_id}", token_ids, kind=TurnKind.PREPARED)
    return replace(request, parent_id=parent_id)


def typed(name: str, token_ids: list[int], lane: str) -> TurnRequest:
    return turn_request(name, token_ids, kind=TurnKind.TYPED_AHEAD, typed_ahead_key=lane)


def until_ended(engine: Engine, response_id: str, found: dict[str, Outcome]) -> None:
    """Step until a turn ended, while others may run on."""
    for _ in range(60):
        if response_id in found and found[response_id].finished is not None:
            return
        engine.step()
        outcomes(engine.take_events(), found)
    raise AssertionError(f"{response_id} has not ended within 60 steps")


def test_beside_a_stream_preparations_do_not_fill_the_seats_of_answers(
    tokenizer: Tokenizer,
) -> None:
    engine = tiny_engine(tokenizer, max_num_seqs=4, num_expected=4)
    engine.submit(turn_request("stream", PROMPT, sampling=LONG))
    found = outcomes(step_until_tokens(engine, 2))
    for number in range(6):
        name = f"short {number}"
        request = turn_request(name, [number + 1, *PROMPT[:20]], sampling=SHORT)
        engine.submit(request)
        until_ended(engine, name, found)
        ids = [*request.token_ids, *found[name].end.output_ids]
        engine.prepare(prepared(name, [*ids, *GLUE]))
        engine.step()
        outcomes(engine.take_events(), found)
    engine.cancel_all()


def test_beside_a_stream_half_typed_prompts_do_not_fill_the_seats_of_answers(
    tokenizer: Tokenizer,
) -> None:
    engine = tiny_engine(tokenizer, max_num_seqs=3, num_expected=4)
    engine.submit(turn_request("stream", PROMPT, sampling=LONG))
    found = outcomes(step_until_tokens(engine, 2))
    for lane in ("one", "two"):
        engine.submit(typed(f"typed {lane}", [*lane.encode(), *PROMPT * 4], lane))
    engine.step()
    outcomes(engine.take_events(), found)
    engine.submit(turn_request("short", list(b"hi"), sampling=SHORT))
    engine.step()
    outcomes(engine.take_events(), found)
    assert "short" in found, "an answer waits for what is only typed"
    engine.cancel_all()


def test_no_running_answer_fails_for_pages_that_a_preparation_holds(tokenizer: Tokenizer) -> None:
    engine = tiny_engine(tokenizer, num_pages=10, num_expected=1)
    end = run_turn(engine, turn_request("a", PROMPT * 2, sampling=SHORT))
    ids = [*PROMPT * 2, *end.output_ids]
    engine.submit(
        turn_request("stream", list(b"hello"), sampling=replace(LONG, max_output_tokens=99))
    )
    found = outcomes(step_until_tokens(engine, 2))
    engine.prepare(prepared("a", [*ids, *GLUE]))
    outcomes(run_until_idle(engine), found)
    assert found["stream"].end.reason is FinishReason.MAX_OUTPUT_TOKENS
    engine.sessions.check_invariants()


def pinned(request: TurnRequest, pin_ms: float) -> TurnRequest:
    return replace(request, pin_ms=pin_ms)


def test_the_front_of_a_conversation_does_not_stay_pinned_when_its_pin_ended(
    tokenizer: Tokenizer,
) -> None:
    # The engine's clock counts its own calls in nanoseconds: any pin of a microsecond ends soon.
    engine = tiny_engine(tokenizer, num_pages=40)
    first = pinned(turn_request("a", PROMPT, sampling=SHORT), 1e-4)
    end = run_turn(engine, first)
    ids = [*PROMPT, *end.output_ids]
    second = turn_request("b", PROMPT, parent=end, history=ids, sampling=SHORT)
    run_turn(engine, second)
    for _ in range(200):
        engine.step()
    old = [1, *PROMPT, *PROMPT]
    run_turn(engine, turn_request("c", old, sampling=SHORT))
    engine.sessions.evict(len(second.token_ids) // 16 + 1)
    assert engine.sessions.num_known("", second.token_ids) == 0, "the older one goes first"
    assert engine.sessions.num_known("", old) >= len(old) - 1


def test_what_was_built_behind_a_pinned_page_is_not_pinned_itself(tokenizer: Tokenizer) -> None:
    engine = tiny_engine(tokenizer, num_pages=40)
    run_turn(engine, pinned(turn_request("a", list(b"hi"), sampling=SHORT), 1e-3))
    old = [1, *PROMPT, *PROMPT]
    run_turn(engine, turn_request("b", old, sampling=SHORT))
    for _ in range(2000):
        engine.step()
    young = [2, *PROMPT, *PROMPT]
    run_turn(engine, turn_request("c", young, sampling=SHORT))
    engine.sessions.evict(len(old) // 16 + 2)
    assert engine.sessions.num_known("", old) == 0
    assert engine.sessions.num_known("", young) >= len(young) - 1
