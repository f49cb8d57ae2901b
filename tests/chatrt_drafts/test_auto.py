"""The drafter of choice: who drafts when, and that both are told of everything."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from chatrt.drafter import DraftRequest
from chatrt.params import SamplingParams
from chatrt.sampling import Sampler
from chatrt.testing.drafter import ScriptedDrafter
from chatrt.testing.engine import run_outcome, tiny_engine, turn_request
from chatrt.testing.tokenizer import tiny_tokenizer
from chatrt_drafts.auto import AutoDrafter
from chatrt_drafts.ngram import NgramDrafter

if TYPE_CHECKING:
    from pathlib import Path

SAMPLER = Sampler(SamplingParams(temperature=0.0), seed=0, vocab_size=256, prompt_ids=())
REPEATS = [1, 2, 3, 4, 5, 1, 2, 3]
NEW = [1, 2, 3, 4, 5, 9, 2, 3]  # only two tokens recur


def request(session_id: int, token_ids: list[int], max_tokens: int = 2) -> DraftRequest:
    return DraftRequest(session_id, token_ids, [0], max_tokens, SAMPLER)


def test_three_recurring_tokens_are_drafted_by_n_grams_and_all_else_by_the_other() -> None:
    other = ScriptedDrafter([[*NEW, 70, 71], [*REPEATS, 80, 81]])
    drafter = AutoDrafter(NgramDrafter(), other)
    requests = [request(1, REPEATS), request(2, NEW), request(3, REPEATS), request(4, NEW, 0)]
    assert drafter.propose(requests) == [[4, 5], [70, 71], [4, 5], []]
    assert [drafter.source(r.session_id, r.token_ids) for r in requests] == [
        *("ngram", "scripted", "ngram", "scripted"),
    ]


def test_a_turn_reports_both_when_both_have_drafted(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    # the answer begins as if at random and then says one thing over and over
    sampling = SamplingParams(temperature=0.0, max_output_tokens=48, repetition_penalty=0.6)
    ask = turn_request("a", tokenizer.encode("the moon in the sea"), sampling=sampling)
    plain = run_outcome(tiny_engine(tokenizer), replace(ask))
    other = ScriptedDrafter([[*ask.token_ids, *plain.token_ids]])
    engine = tiny_engine(tokenizer, drafter=AutoDrafter(NgramDrafter(), other), num_drafts=3)
    found = run_outcome(engine, ask)
    assert found.token_ids == plain.token_ids
    assert set(found.end.speculation.drafter.split("+")) == {"scripted", "ngram"}
    engine.forget(["a"])
    assert other.closed
