"""A fork beside a turn that runs has the head's rows of what it copied."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from chatrt.params import SamplingParams
from chatrt.testing.engine import run_outcome, step_until_tokens, turn_request
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt_drafts.head_support import PROMPT, make_bench

if TYPE_CHECKING:
    from chatrt.text.tokenizer import Tokenizer

LONG = SamplingParams(temperature=0.0, max_output_tokens=40, ignore_eos=True)


def test_rows_that_wait_are_written_before_a_fork_copies_their_page(tokenizer: Tokenizer) -> None:
    bench = make_bench(tokenizer, ReferenceOps())
    first = run_outcome(bench.engine, turn_request("a", PROMPT)).end
    history = [*PROMPT, *first.output_ids]
    one_row = turn_request("b", [5], parent=first, history=history, sampling=LONG)
    bench.engine.submit(replace(one_row, speculation_tokens=0))  # so that its rows wait
    step_until_tokens(bench.engine, 2)
    before = bench.engine._turns.by_response["b"].entry.session
    assert bench.num_waiting(before) > 0
    before_end = before.num_computed
    same = before.token_ids[len(history) : before.num_computed]
    bench.engine.submit(turn_request("c", [*same, 7], parent=first, history=history, sampling=LONG))
    step_until_tokens(bench.engine, 4)
    forked = bench.engine._turns.by_response["c"].entry.session
    bench.assert_rows(forked, unknown=(before_end,))
