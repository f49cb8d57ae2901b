"""The engine on the Triton executor: the same text with drafts, without, alone, beside others.

Kernels run under Triton's interpreter, on a tiny random model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt.device_sampling import DeviceSampler
from chatrt.engine.forward import _passes
from chatrt.params import SamplingParams
from chatrt.testing.engine import (
    engine_over,
    outcomes,
    run_outcome,
    run_until_idle,
    tiny_engine,
    tiny_target,
    turn_request,
)
from chatrt_drafts.ngram import NgramDrafter
from chatrt_kernels.reference import ReferenceOps
from chatrt_kernels.triton.ops import TritonOps

if TYPE_CHECKING:
    from chatrt.engine import Engine
    from chatrt.text.tokenizer import Tokenizer
    from chatrt_kernels.ops import Ops

EVEN_ROWS = 8
PROMPT = "one two one two one two one"
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_output_tokens=10),
    "sampled": SamplingParams(temperature=0.7, seed=5, max_output_tokens=10),
}


def triton() -> TritonOps:
    return TritonOps(torch.float32, torch.device("cpu"), even_rows=EVEN_ROWS)


def engine(tokenizer: Tokenizer, ops: Ops, *, drafts: int = 0) -> Engine:
    drafter = NgramDrafter() if drafts else None
    return tiny_engine(tokenizer, ops=ops, drafter=drafter, num_drafts=drafts)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_is_the_same_with_drafts_and_without(name: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    plain = run_outcome(
        engine(tokenizer, triton()), turn_request("a", ids, sampling=SAMPLINGS[name])
    )
    drafted = run_outcome(
        engine(tokenizer, triton(), drafts=4), turn_request("a", ids, sampling=SAMPLINGS[name])
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.end.speculation.drafted > 0


def test_greedy_text_is_the_references(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    ours = run_outcome(engine(tokenizer, triton()), turn_request("a", ids))
    theirs = run_outcome(engine(tokenizer, ReferenceOps()), turn_request("a", ids))
    assert ours.token_ids == theirs.token_ids


def test_a_turn_says_the_same_alone_and_beside_more_rows_than_a_bucket(
    tokenizer: Tokenizer,
) -> None:
    prompts = {"a": PROMPT, "b": "x" * 40, "c": "hello there"}
    alone = {
        name: run_outcome(engine(tokenizer, triton()), turn_request(name, tokenizer.encode(text)))
        for name, text in prompts.items()
    }
    together = engine(tokenizer, triton(), drafts=4)
    for name, text in prompts.items():
        together.submit(turn_request(name, tokenizer.encode(text)))
    found = outcomes(run_until_idle(together))
    for name, outcome in alone.items():
        assert found[name].token_ids == outcome.token_ids


@pytest.mark.parametrize(
    ("counts", "even_rows", "passes"),
    [
        ([1, 5, 300], None, [[0, 1, 2]]),
        ([1, 5, 2], 8, [[0, 1, 2]]),
        ([1, 5, 3], 8, [[0, 1], [2]]),
        ([1, 40, 5, 9, 2], 8, [[0, 2, 4], [1, 3]]),
        ([40], 8, [[0]]),
        ([8, 8], 8, [[0], [1]]),
    ],
)
def test_long_chunks_of_prompts_have_a_pass_beside_the_even_ones(
    counts: list[int], even_rows: int | None, passes: list[list[int]]
) -> None:
    assert _passes(counts, even_rows) == passes


def test_tokens_chosen_on_the_device_are_the_hosts(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    target = tiny_target(tokenizer, ops=triton())
    on_device = partial(DeviceSampler, device=torch.device("cpu"))
    host = engine_over(target, max_context=256)
    device = engine_over(replace(target, make_sampler=on_device), max_context=256)
    for sampling in SAMPLINGS.values():
        request = turn_request("a", ids, sampling=sampling)
        expected = run_outcome(host, request)
        assert run_outcome(device, request).token_ids == expected.token_ids
