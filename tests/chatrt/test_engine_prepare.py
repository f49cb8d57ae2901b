"""What is computed at idle time behind a response, and what the next turn finds of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chatrt.testing.engine import (
    outcomes,
    run_outcome,
    run_turn,
    run_until_idle,
    tiny_engine,
    turn_request,
)
from chatrt.turn import TurnKind
from tests.chatrt.engine_support import ColdRuns

if TYPE_CHECKING:
    from chatrt.engine import Engine
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import FinishedEvent, TurnRequest

PROMPT = list(b"the moon is made of cheese and the sea of salt")
GLUE = list(b"|end||user|")


@pytest.fixture(scope="module")
def cold(tokenizer: Tokenizer) -> ColdRuns:
    return ColdRuns(tokenizer)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Engine:
    return tiny_engine(tokenizer)


def prepared(parent: FinishedEvent, token_ids: list[int], salt: str = "") -> TurnRequest:
    request = turn_request("prepared", token_ids, kind=TurnKind.PREPARED, salt=salt)
    return replace(request, parent_id=parent.response_id)


def first_turn(engine: Engine) -> tuple[FinishedEvent, list[int]]:
    end = run_turn(engine, turn_request("a", PROMPT))
    return end, [*PROMPT, *end.output_ids]


def prepare(engine: Engine, request: TurnRequest) -> None:
    engine.prepare(request)
    assert run_until_idle(engine) == []


def num_free(engine: Engine) -> int:
    engine.sessions.check_invariants()
    return engine.sessions.num_free


def test_a_follow_up_behind_prepared_glue_computes_its_own_words_only(
    engine: Engine, cold: ColdRuns
) -> None:
    end, history = first_turn(engine)
    prepare(engine, prepared(end, [*history, *GLUE]))
    words = list(b"and why?")
    request = turn_request("b", [*GLUE, *words], parent=end, history=history)
    found = run_outcome(engine, request)
    assert found.end.kv.computed_tokens == len(words)
    assert found.end.kv.typed_ahead_tokens == 0
    cold.assert_equal(request, found)


def test_a_turn_that_begins_otherwise_than_was_prepared_leaves_the_tip_as_it_was(
    engine: Engine, cold: ColdRuns
) -> None:
    end, history = first_turn(engine)
    prepare(engine, prepared(end, [*history, *GLUE]))
    request = turn_request("b", list(b"|end||system|"), parent=end, history=history)
    found = run_outcome(engine, request)
    assert found.end.kv.reused_tokens == len(history) + len(b"|end||")
    cold.assert_equal(request, found)
    again = turn_request("c", [*GLUE, 5], parent=end, history=history)
    found = run_outcome(engine, again)
    assert found.end.kv.computed_tokens == 1
    cold.assert_equal(again, found)


def test_what_was_typed_goes_on_behind_prepared_glue(engine: Engine, cold: ColdRuns) -> None:
    end, history = first_turn(engine)
    prepare(engine, prepared(end, [*history, *GLUE]))
    typed = turn_request("typed", [*GLUE, *b"and w"], parent=end, history=history)
    typed = replace(typed, kind=TurnKind.TYPED_AHEAD, typed_ahead_key="lane")
    assert run_turn(engine, typed).kv.computed_tokens == len(b"and w")
    request = turn_request("b", [*GLUE, *b"and why?"], parent=end, history=history)
    found = run_outcome(engine, replace(request, typed_ahead_key="lane"))
    assert found.end.kv.typed_ahead_tokens == len(GLUE) + len(b"and w")
    assert found.end.kv.computed_tokens == len(b"hy?")
    cold.assert_equal(request, found)


def test_a_follow_up_does_not_wait_for_what_is_being_prepared(
    tokenizer: Tokenizer, cold: ColdRuns
) -> None:
    engine = tiny_engine(tokenizer)
    end, history = first_turn(engine)
    glue = list(b"a long glue that takes several steps to be computed" * 2)
    engine.prepare(prepared(end, [*history, *glue]))
    engine.step()
    request = turn_request("b", [*glue, 5], parent=end, history=history)
    engine.submit(replace(request))
    found = outcomes(run_until_idle(engine))
    assert set(found) == {"b"}
    assert found["b"].end.kv.reused_tokens > len(history)
    cold.assert_equal(request, found["b"])


def test_history_that_reads_otherwise_later_is_prepared_beside_the_tip(
    engine: Engine, cold: ColdRuns
) -> None:
    end, history = first_turn(engine)
    settled = [*history[:-6], *b"so it ends"]
    prepare(engine, prepared(end, [*settled, *GLUE]))
    request = turn_request("b", [*settled, *GLUE, *b"and why?"])
    request.parent_id, request.num_history = end.response_id, len(history) - 6
    found = run_outcome(engine, request)
    assert found.end.kv.computed_tokens == len(b"and why?")
    cold.assert_equal(request, found)
    exact = turn_request("c", [5], parent=end, history=history)
    found = run_outcome(engine, exact)
    assert found.end.kv.reused_tokens == len(history) - 1
    cold.assert_equal(exact, found)
    engine.forget("abc")
    assert num_free(engine) == 64


def test_a_response_that_was_deleted_is_not_prepared_for(engine: Engine) -> None:
    end, history = first_turn(engine)
    engine.forget(["a"])
    prepare(engine, prepared(end, [*history, *GLUE]))
    assert num_free(engine) == 64


@pytest.mark.parametrize("offset", [0, 6])
def test_deleting_a_response_while_it_is_prepared_for_leaves_nothing(
    tokenizer: Tokenizer, offset: int
) -> None:
    engine = tiny_engine(tokenizer)
    end, history = first_turn(engine)
    engine.prepare(prepared(end, [*history[: len(history) - offset], *(GLUE * 8)]))
    engine.step()
    engine.forget(["a"])
    assert run_until_idle(engine) == []
    assert num_free(engine) == 64


def test_nothing_is_prepared_while_an_answer_runs(engine: Engine) -> None:
    end, history = first_turn(engine)
    engine.submit(turn_request("b", list(b"another conversation")))
    engine.step()
    engine.prepare(prepared(end, [*history, *GLUE]))
    events = run_until_idle(engine)
    assert {event.response_id for event in events} == {"b"}
    follow_up = turn_request("c", [*GLUE, 5], parent=end, history=history)
    assert run_turn(engine, follow_up).kv.computed_tokens == 1


def test_other_keys_find_nothing_of_what_was_prepared(engine: Engine) -> None:
    end, history = first_turn(engine)
    prepare(engine, prepared(end, [*history, *GLUE]))
    other = turn_request("b", [*history, *GLUE, 5], salt="other")
    other.parent_id = "a"
    assert run_turn(engine, other).kv.reused_tokens == 0
