"""Many conversations over a pool that holds a few of them: all go on, none sees another's text."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from chatrt.params import SamplingParams
from chatrt.testing.engine import outcomes, run_outcome, run_until_idle, tiny_engine, turn_request
from chatrt.turn import TurnKind
from tests.chatrt.engine_support import ColdRuns

if TYPE_CHECKING:
    from chatrt.engine import Engine
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import TurnRequest

NUM_CONVERSATIONS = 200
NUM_HELD = 40
PAGES_EACH = 4
FEW = SamplingParams(temperature=0.0, max_output_tokens=4)


def canary(number: int) -> list[int]:
    """A prompt of three pages that no other conversation has a page of."""
    return list(f"{number:03} is my secret number, {number:03} and no other".encode())


def follow_up(number: int, name: str, history: list[int], words: bytes) -> TurnRequest:
    request = turn_request(name, [*history, *words], sampling=FEW)
    return replace(request, num_history=len(history), parent_id=f"first {number}")


def histories_of(engine: Engine, numbers: range) -> dict[int, list[int]]:
    """The first turn of each conversation, and the ids that it left."""
    histories = {}
    for number in numbers:
        prompt = canary(number)
        first = run_outcome(engine, turn_request(f"first {number}", prompt, sampling=FEW))
        histories[number] = [*prompt, *first.end.output_ids]
    return histories


def test_two_hundred_idle_conversations_over_a_pool_that_holds_forty_all_go_on(
    tokenizer: Tokenizer,
) -> None:
    engine = tiny_engine(tokenizer, num_pages=NUM_HELD * PAGES_EACH)
    cold = ColdRuns(tokenizer)
    histories = histories_of(engine, range(NUM_CONVERSATIONS))
    num_missed = 0
    for number in reversed(range(NUM_CONVERSATIONS)):  # those that are still there first
        request = follow_up(number, f"second {number}", histories[number], b" so what")
        found = run_outcome(engine, replace(request))
        cold.assert_equal(request, found)
        num_missed += found.end.kv.miss_reason == "evicted"
    engine.sessions.check_invariants()
    assert num_missed <= NUM_CONVERSATIONS - NUM_HELD // 2
    assert engine.sessions.num_free + engine.sessions.num_evictable == NUM_HELD * PAGES_EACH


def test_running_and_half_typed_turns_of_many_conversations_see_their_own_text_only(
    tokenizer: Tokenizer,
) -> None:
    engine = tiny_engine(tokenizer, num_pages=16 * PAGES_EACH)
    cold = ColdRuns(tokenizer)
    histories = histories_of(engine, range(24))
    requests = {}
    for number, history in histories.items():
        typed = follow_up(number, f"typed {number}", history, b" so wh")
        engine.submit(replace(typed, kind=TurnKind.TYPED_AHEAD, typed_ahead_key=f"lane {number}"))
        if number % 3 == 0:
            engine.step()
        name = f"second {number}"
        requests[name] = follow_up(number, name, history, b" so what")
        engine.submit(replace(requests[name], typed_ahead_key=f"lane {number}"))
    found = outcomes(run_until_idle(engine))
    for name, request in requests.items():
        cold.assert_equal(request, found[name])
    engine.sessions.check_invariants()


def test_switching_from_a_to_b_and_back_keeps_both_while_memory_allows(
    tokenizer: Tokenizer,
) -> None:
    engine = tiny_engine(tokenizer, num_pages=64)
    histories = histories_of(engine, range(2))
    for turn in range(4):
        for number, history in histories.items():
            request = follow_up(number, f"{turn} of {number}", history, b" go on")
            found = run_outcome(engine, replace(request))
            assert found.end.kv.miss_reason is None
            assert found.end.kv.reused_tokens >= len(history) - 1
            histories[number] = [*request.token_ids, *found.end.output_ids]
