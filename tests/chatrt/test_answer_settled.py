"""What an answer leaves in the store and in the figures where its template reads it anew later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chatrt.params import SamplingParams
from chatrt.service.answer import Answer
from chatrt.service.prompts import Ask, PlannedPrompt, PromptPlanner, history_ids, sequence_ids
from chatrt.text.messages import Message
from chatrt.text.prompt import PromptBuilder
from chatrt.turn import (
    Divergence,
    FinishedEvent,
    FinishReason,
    KVFigures,
    SpeculationFigures,
    TurnKind,
    TurnRequest,
)
from chatrt.wire.events import ResponseFields
from chatrt.wire.log import ResponseLog
from tests.chatrt.drift_support import byte_tokenizer, family_named

if TYPE_CHECKING:
    from chatrt.store import StoredTurn

MODEL = "tiny"
FAMILY = family_named("qwen3-empty")
TOKENIZER = byte_tokenizer(FAMILY)
BUILDER = PromptBuilder(TOKENIZER)
PLANNER = PromptPlanner(BUILDER, model=MODEL, max_context=4096)
ANSWER_IDS = tuple(b"Paris.")


def plan(text: str, chain: list[StoredTurn], kind: TurnKind = TurnKind.ANSWER) -> PlannedPrompt:
    return PLANNER.plan(Ask((Message("user", text),), None, kind), chain)


def answer(
    planned: PlannedPrompt,
    *,
    kind: TurnKind = TurnKind.ANSWER,
    builder: PromptBuilder | None = BUILDER,
) -> Answer:
    return Answer(
        request=TurnRequest(
            response_id=f"resp_{len(planned.token_ids)}",
            kind=kind,
            token_ids=planned.token_ids,
            num_history=planned.num_history,
            sampling=SamplingParams(),
        ),
        planned=planned,
        fields=ResponseFields(model=MODEL, created_at=0, temperature=0.0, top_p=1.0),
        log=ResponseLog("resp", "key"),
        tokenizer=TOKENIZER,
        token_timing=False,
        on_finished=lambda _answer, _event: None,
        builder=builder,
    )


def finished(output_ids: tuple[int, ...] = ANSWER_IDS) -> FinishedEvent:
    return FinishedEvent(
        response_id="resp",
        reason=FinishReason.END_OF_TURN,
        output_ids=output_ids,
        num_generated=len(output_ids),
        text=TOKENIZER.decode(output_ids),
        seed=0,
        kv=KVFigures(reused_tokens=7),
        speculation=SpeculationFigures(),
        first_token_ns=1,
        last_token_ns=2,
        time_ns=2,
    )


def test_a_stored_answer_says_how_it_reads_once_another_turn_follows() -> None:
    planned = plan("Capital of France?", [])
    turn = answer(planned).stored(finished())
    think = planned.token_ids.index(TOKENIZER.id_of("<think>") or 0)
    assert (turn.settled_from, turn.settled_ids) == (think, ANSWER_IDS)
    assert sequence_ids([turn]) == [*planned.token_ids, *ANSWER_IDS]
    assert history_ids([turn]) == [*planned.token_ids[:think], *ANSWER_IDS]


def test_a_turn_without_an_answer_is_not_settled() -> None:
    planned = plan("Capital of France?", [], TurnKind.PREFILL)
    turn = answer(planned, kind=TurnKind.PREFILL).stored(finished(()))
    assert (turn.settled_from, turn.settled_ids) == (None, ())
    turn = answer(plan("x", []), builder=None).stored(finished())
    assert (turn.settled_from, turn.settled_ids) == (None, ())


def test_a_turn_that_is_stored_whole_reads_the_same_as_its_chain() -> None:
    first = answer(plan("Capital of France?", [])).stored(finished())
    second = answer(plan("And of Italy?", [first]))
    chain = [first, second.stored(finished())]
    whole = second.stored_whole(finished(), [first])
    assert whole.parent_id is None
    assert history_ids([whole]) == history_ids(chain)
    assert sequence_ids([whole]) == sequence_ids(chain)
    assert plan("Why?", [whole]).token_ids == plan("Why?", chain).token_ids


def test_the_figures_name_both_tokens_of_a_divergence() -> None:
    first = answer(plan("Capital of France?", [])).stored(finished())
    planned = plan("And of Italy?", [first])
    held = TOKENIZER.id_of("<think>")
    assert held is not None
    position = first.settled_from
    assert position is not None
    assert planned.first_divergence == Divergence(position, held, ord("P"))
    running = answer(planned)
    running.close(finished())
    event = running.log.terminal_event()
    assert event is not None
    kv = event["response"]["chatrt"]["kv"]
    assert kv["miss_reason"] == "template_drift"
    assert kv["first_divergence"] == {
        "position": position,
        "held": {"id": held, "text": "<think>"},
        "asked": {"id": ord("P"), "text": "P"},
    }
    assert kv["reused_tokens"] == 7


@pytest.mark.parametrize(
    ("divergence", "asked"),
    [
        (Divergence(3, 97, None), None),
        (Divergence(3, 97, 999_999), {"id": 999_999, "text": ""}),
    ],
)
def test_a_divergence_at_an_end_or_outside_the_vocabulary_has_no_text(
    divergence: Divergence, asked: dict[str, object] | None
) -> None:
    planned = PlannedPrompt(
        [1], 0, None, None, [1], (), miss_reason="truncated", first_divergence=divergence
    )
    running = answer(planned)
    running.close(finished())
    event = running.log.terminal_event()
    assert event is not None
    assert event["response"]["chatrt"]["kv"]["first_divergence"] == {
        "position": 3,
        "held": {"id": 97, "text": "a"},
        "asked": asked,
    }
