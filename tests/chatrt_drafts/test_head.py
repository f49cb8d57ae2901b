"""The trained head as a drafter: its rows, its chains, and what it remembers of a session."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chatrt.drafter import DraftRequest
from chatrt.params import SamplingParams
from chatrt.sampling import Sampler
from chatrt.testing.engine import (
    GREEDY,
    engine_over,
    run_outcome,
    step_until_tokens,
    tiny_engine,
    tiny_target,
    turn_request,
)
from chatrt.testing.heads import head_drafter
from chatrt_drafts.native_chains import NativeChains
from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt_drafts.head_oracle import PAGE_SIZE
from tests.chatrt_drafts.head_support import CONTEXT, PROMPT, Bench, make_bench, running
from tests.chatrt_kernels.cpu_support import NATIVE_PATH, compiled

if TYPE_CHECKING:
    from chatrt.text.tokenizer import Tokenizer


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return make_bench(tokenizer, ReferenceOps())


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 9])
def test_rows_come_from_the_targets_features_through_chunks_and_verifies(
    bench: Bench, num_tokens: int
) -> None:
    bench.engine.submit(turn_request("a", PROMPT))
    step_until_tokens(bench.engine, num_tokens)
    bench.assert_rows(running(bench.engine))


def test_a_chain_goes_on_from_the_heads_own_states(bench: Bench) -> None:
    bench.engine.submit(turn_request("a", PROMPT))
    step_until_tokens(bench.engine, 3)
    session = running(bench.engine)
    page_ids = [*session.page_ids, 60, 61]
    sampler = bench.target.make_sampler(
        GREEDY, seed=0, vocab_size=bench.target.vocab_size, prompt_ids=()
    )
    request = DraftRequest(session.session_id, session.token_ids, page_ids, 5, sampler)
    inputs = bench.oracle.inputs(session.token_ids)
    assert bench.drafter.propose([request])[0] == bench.oracle.chain(inputs, 5)


def test_sessions_of_different_depths_draft_what_they_would_alone(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        bench.engine.submit(turn_request(name, [*PROMPT[: 9 + ord(name) % 5], ord(name)]))
    for _ in range(4):
        bench.engine.step()
    sampler = bench.target.make_sampler(
        GREEDY, seed=0, vocab_size=bench.target.vocab_size, prompt_ids=()
    )
    requests = []
    for index, turn in enumerate(bench.engine._turns):
        session = turn.entry.session
        page_ids = [*session.page_ids, 50 + 2 * index, 51 + 2 * index]
        requests.append(
            DraftRequest(session.session_id, session.token_ids, page_ids, (4, 0, 2)[index], sampler)
        )
    assert bench.drafter.propose(requests) == [
        bench.oracle.chain(bench.oracle.inputs(r.token_ids), r.max_tokens) for r in requests
    ]


def test_a_chain_ends_where_it_has_become_unlikely(bench: Bench) -> None:
    bench.engine.submit(turn_request("a", PROMPT))
    step_until_tokens(bench.engine, 3)
    session = running(bench.engine)
    sampler = bench.target.make_sampler(
        GREEDY, seed=0, vocab_size=bench.target.vocab_size, prompt_ids=()
    )
    whole = DraftRequest(session.session_id, session.token_ids, session.page_ids, 4, sampler)
    assert len(bench.drafter.propose([whole])[0]) == 4
    # a random head is sure of nothing
    assert len(bench.drafter.propose([replace(whole, floor=0.9)])[0]) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(temperature=0.8, seed=4, max_output_tokens=24),
        SamplingParams(temperature=0.0, frequency_penalty=0.9, max_output_tokens=24),
    ],
    ids=["greedy", "seeded", "penalised"],
)
def test_the_text_is_that_of_plain_decoding(bench: Bench, sampling: SamplingParams) -> None:
    request = turn_request("a", PROMPT, sampling=sampling)
    plain = run_outcome(tiny_engine(bench.tokenizer, max_context=CONTEXT), replace(request))
    found = run_outcome(bench.engine, request)
    assert found.token_ids == plain.token_ids
    assert found.end.speculation.drafted > 0
    assert found.end.speculation.drafter == "head"


def test_a_follow_up_in_place_knows_what_came_before_and_a_fork_does_not(bench: Bench) -> None:
    first = run_outcome(bench.engine, turn_request("a", PROMPT)).end
    history = [*PROMPT, *first.output_ids]
    bench.engine.submit(turn_request("b", [5, 6, 7], parent=first, history=history))
    step_until_tokens(bench.engine, 2)
    bench.assert_rows(running(bench.engine))
    bench.engine.cancel("b")
    bench.engine.submit(turn_request("c", [8, 9], parent=first, history=history))
    step_until_tokens(bench.engine, 2)
    forked = running(bench.engine)
    bench.assert_rows(forked, unknown=(len(history),))


def test_a_reused_prefix_keeps_its_rows(bench: Bench) -> None:
    run_outcome(bench.engine, turn_request("a", PROMPT))
    bench.engine.submit(turn_request("b", [*PROMPT[:18], 1, 2, 3, 4]))
    step_until_tokens(bench.engine, 4)
    assert PAGE_SIZE <= 18
    bench.assert_rows(running(bench.engine), unknown=(18,))


def test_sessions_beyond_the_slots_only_lose_what_their_next_row_starts_from(bench: Bench) -> None:
    head = bench.oracle.head
    target = tiny_target(bench.tokenizer, max_context=CONTEXT)
    drafter = head_drafter(head, target, ReferenceOps(), num_slots=2)
    engine = engine_over(target, max_context=CONTEXT, drafter=drafter, num_drafts=3)
    plain = tiny_engine(bench.tokenizer, max_context=CONTEXT)
    for name in ("a", "b", "c"):
        engine.submit(turn_request(name, [*PROMPT, ord(name)]))
    while engine.step():
        pass
    for name in ("a", "b", "c"):
        request = turn_request(f"{name}2", [*PROMPT, ord(name)])
        assert run_outcome(engine, replace(request)).token_ids == (
            run_outcome(plain, request).token_ids
        )


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(temperature=0.8), SamplingParams(temperature=0.0, presence_penalty=2)],
    ids=["greedy", "seeded", "penalised"],
)
def test_native_chains_are_those_of_single_passes(
    tokenizer: Tokenizer, sampling: SamplingParams
) -> None:
    bench = make_bench(tokenizer, NativeOps(NativeLibrary(compiled(NATIVE_PATH)), 2))
    for name in ("a", "b", "c"):
        tokens = [*PROMPT[: 9 + ord(name) % 5], ord(name)]
        bench.engine.submit(turn_request(name, tokens, sampling=sampling))
    for _ in range(4):
        bench.engine.step()
    requests = []
    for index, turn in enumerate(bench.engine._turns):
        session = turn.entry.session
        page_ids = [*session.page_ids, 50 + 2 * index, 51 + 2 * index]
        ids, depth, floor = session.token_ids, (5, 0, 3)[index], (1e-6, 0.0, 1e-6)[index]
        requests.append(DraftRequest(session.session_id, ids, page_ids, depth, turn.sampler, floor))
    chains = bench.drafter._chains
    assert isinstance(chains, NativeChains)
    found = bench.drafter.propose(requests)
    base_rows = [bench.drafter._start_of(request) for request in requests]
    assert found == chains._other.run(requests, base_rows)
    assert [len(drafts) > 0 for drafts in found] == [True, False, True]


def test_native_kernels_draft_for_a_sampler_of_another_kind_too(tokenizer: Tokenizer) -> None:
    bench = make_bench(tokenizer, NativeOps(NativeLibrary(compiled(NATIVE_PATH)), 2))
    bench.engine.submit(turn_request("a", PROMPT))
    step_until_tokens(bench.engine, 3)
    session = running(bench.engine)
    page_ids = [*session.page_ids, 60, 61]
    proposals = []
    for make in (bench.target.make_sampler, Sampler):
        sampler = make(GREEDY, seed=0, vocab_size=bench.target.vocab_size, prompt_ids=())
        request = DraftRequest(session.session_id, session.token_ids, page_ids, 5, sampler)
        proposals.append(bench.drafter.propose([request])[0])
    assert proposals[0] == proposals[1]
    assert len(proposals[0]) == 5


def test_native_kernels_write_the_same_rows_and_leave_the_text_as_it_is(
    tokenizer: Tokenizer,
) -> None:
    ops = NativeOps(NativeLibrary(compiled(NATIVE_PATH)), 2)
    bench = make_bench(tokenizer, ops)
    request = turn_request("a", PROMPT)
    plain = run_outcome(tiny_engine(tokenizer, max_context=CONTEXT, ops=ops), replace(request))
    bench.engine.submit(request)
    step_until_tokens(bench.engine, 9)
    session = running(bench.engine)
    bench.assert_rows(session)
    while bench.engine.step():
        pass
    assert session.token_ids == [*PROMPT, *plain.token_ids]
