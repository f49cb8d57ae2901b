"""Heads and draft models on the Triton executor, under its interpreter, with tiny random models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chatrt.testing.engine import (
    GREEDY,
    engine_over,
    outcomes,
    run_until_idle,
    tiny_target,
    turn_request,
)
from chatrt_drafts.draft_model import ModelDrafter
from chatrt_kernels.triton.ops import TritonOps
from tests.chatrt_drafts.head_support import CONTEXT, PROMPT, make_bench

if TYPE_CHECKING:
    from chatrt.text.tokenizer import Tokenizer

EVEN_ROWS = 8
SHORT = PROMPT[:6]


def triton() -> TritonOps:
    return TritonOps(torch.float32, torch.device("cpu"), even_rows=EVEN_ROWS)


def plain_text(tokenizer: Tokenizer, token_ids: list[int]) -> list[int]:
    engine = engine_over(tiny_target(tokenizer, max_context=CONTEXT), max_context=CONTEXT)
    engine.submit(turn_request("plain", token_ids, sampling=GREEDY))
    return outcomes(run_until_idle(engine))["plain"].token_ids


def test_a_head_follows_a_turn_whose_step_is_cut_into_passes(tokenizer: Tokenizer) -> None:
    bench = make_bench(tokenizer, triton())
    engine = bench.engine
    engine.submit(turn_request("a", SHORT))
    engine.step()
    # the second prompt is longer than an even pass: the first turn's rows have a pass before it
    engine.submit(turn_request("b", PROMPT))
    found = outcomes(engine.take_events())
    for _ in range(4):
        engine.step()
        for turn in engine._turns:
            bench.assert_rows(turn.entry.session)
        outcomes(engine.take_events(), found)
    outcomes(run_until_idle(engine), found)
    assert found["a"].token_ids == plain_text(tokenizer, SHORT)
    assert found["b"].token_ids == plain_text(tokenizer, PROMPT)
    assert found["a"].end.speculation.drafter == "head"
    assert found["a"].end.speculation.drafted > 0


def test_a_draft_model_with_the_targets_weights_is_always_right(tokenizer: Tokenizer) -> None:
    target = tiny_target(tokenizer, max_context=CONTEXT, ops=triton())
    draft = tiny_target(tokenizer, max_context=CONTEXT, ops=triton())
    drafter = ModelDrafter(
        draft.decoder,
        draft.kv,
        draft.batches,
        vocab_size=tokenizer.vocab_size,
        max_context=CONTEXT,
        max_catch_up_rows=64,
    )
    engine = engine_over(target, max_context=CONTEXT, drafter=drafter, num_drafts=3)
    engine.submit(turn_request("a", SHORT, sampling=GREEDY))
    outcome = outcomes(run_until_idle(engine))["a"]
    assert outcome.token_ids == plain_text(tokenizer, SHORT)
    figures = outcome.end.speculation
    assert figures.drafted > 0
    assert figures.accepted == figures.drafted
