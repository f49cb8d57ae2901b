"""Rows of the head that wait while nobody drafts: written in time, and as if they never had."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt.batch import BatchRows
from chatrt.drafter import TargetPass
from chatrt.errors import ChatrtError
from chatrt.params import SamplingParams
from chatrt.testing.engine import (
    GREEDY,
    run_outcome,
    step_until_tokens,
    tiny_engine,
    tiny_target,
    turn_request,
)
from chatrt.testing.heads import head_drafter, tiny_head
from chatrt.turn import FinishedEvent
from chatrt_drafts.deferred_rows import RowCopies
from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt_drafts.head_oracle import PAGE_SIZE, HeadOracle
from tests.chatrt_drafts.head_support import CONTEXT, LAYERS, PROMPT, Bench, make_bench, running
from tests.chatrt_kernels.cpu_support import NATIVE_PATH, compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import TurnRequest
    from chatrt_kernels.ops import Ops

LONG = SamplingParams(temperature=0.0, max_output_tokens=40, ignore_eos=True)


def executor(name: str) -> Ops:
    if name == "reference":
        return ReferenceOps()
    return NativeOps(NativeLibrary(compiled(NATIVE_PATH)), 2)


@pytest.fixture(params=["reference", "native"])
def bench(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Bench:
    return make_bench(tokenizer, executor(request.param))


def plain_turn(
    name: str,
    token_ids: Sequence[int],
    *,
    parent: FinishedEvent | None = None,
    history: Sequence[int] = (),
    sampling: SamplingParams = LONG,
) -> TurnRequest:
    """A turn that nobody drafts for."""
    request = turn_request(name, token_ids, parent=parent, history=history, sampling=sampling)
    return replace(request, speculation_tokens=0)


def start(bench: Bench, *requests: TurnRequest, num_tokens: int = 5) -> None:
    for request in requests:
        bench.engine.submit(request)
    step_until_tokens(bench.engine, num_tokens)


def cancelled(bench: Bench, name: str) -> FinishedEvent:
    """The turn's end, with which nothing of it waits any more."""
    session = bench.engine._turns.by_response[name].entry.session
    assert bench.engine.cancel(name)
    assert bench.num_waiting(session) == 0
    (end,) = (e for e in bench.engine.take_events() if isinstance(e, FinishedEvent))
    return end


def bits(bench: Bench, request: TurnRequest) -> tuple[list[int], Tensor]:
    """The tokens of a turn and, behind its next to last step, all that its pages hold."""
    bench.engine.submit(request)
    step_until_tokens(bench.engine, 39)
    session = running(bench.engine)
    bench.drafter.commit(session.session_id, session.num_computed)
    return session.token_ids[:110], torch.stack(bench.rows_of(session))[:, :110]


@pytest.mark.parametrize("length", [14, 15, 16, 17, 79])
def test_all_rows_but_those_that_wait_are_right_behind_every_step(
    bench: Bench, length: int
) -> None:
    bench.engine.submit(plain_turn("a", PROMPT[:length]))
    most = 0
    step_until_tokens(bench.engine, 1)
    session = running(bench.engine)
    for _ in range(36):
        bench.assert_rows(session)
        most = max(most, bench.num_waiting(session))
        bench.engine.step()
    assert most == PAGE_SIZE - 1


def test_depths_may_change_at_any_step(bench: Bench) -> None:
    start(bench, turn_request("a", PROMPT, sampling=LONG), num_tokens=1)
    (turn,) = bench.engine._turns
    for depth in (0, 0, 2, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0):
        turn.max_drafts = depth
        bench.engine.step()
        bench.assert_rows(turn.entry.session)
        assert depth == 0 or bench.num_waiting(turn.entry.session) == 0


@pytest.mark.parametrize("num_drafts", [None, 0])
def test_the_text_is_that_of_plain_decoding(bench: Bench, num_drafts: int | None) -> None:
    sampling = SamplingParams(temperature=0.8, seed=4, max_output_tokens=40, ignore_eos=True)
    request = turn_request("a", PROMPT, sampling=sampling)
    engine = tiny_engine(bench.tokenizer, max_context=CONTEXT, ops=bench.target.decoder._ops)
    plain = run_outcome(engine, replace(request))
    found = run_outcome(bench.engine, replace(request, speculation_tokens=num_drafts))
    assert found.token_ids == plain.token_ids
    assert bool(found.end.speculation.drafted) == (num_drafts is None)


def test_native_rows_that_waited_are_the_bits_of_those_that_did_not(tokenizer: Tokenizer) -> None:
    request = turn_request("a", PROMPT, sampling=LONG)
    ids, expected = bits(make_bench(tokenizer, executor("native")), replace(request))
    plain = replace(request, speculation_tokens=0)
    found_ids, found = bits(make_bench(tokenizer, executor("native")), plain)
    assert found_ids == ids
    assert torch.equal(found, expected)


@pytest.mark.parametrize("num_tokens", [2, 15, 16, 17, 18, 33])
def test_a_follow_up_in_place_finds_all_rows_and_knows_what_comes_before(
    bench: Bench, num_tokens: int
) -> None:
    start(bench, plain_turn("a", PROMPT), num_tokens=num_tokens)
    first = cancelled(bench, "a")
    history = [*PROMPT, *first.output_ids]
    start(bench, plain_turn("b", [5, 6, 7], parent=first, history=history), num_tokens=3)
    assert running(bench.engine).token_ids[: len(history)] == history
    bench.assert_rows(running(bench.engine))


def test_a_fork_of_a_plain_turn_copies_whole_rows(bench: Bench) -> None:
    first = run_outcome(bench.engine, plain_turn("a", PROMPT[:50], sampling=GREEDY)).end
    history = [*PROMPT[:50], *first.output_ids]
    start(bench, plain_turn("b", [5, 6, 7], parent=first, history=history))
    start(bench, plain_turn("c", [8, 9], parent=first, history=history))
    for turn in bench.engine._turns:
        unknown = () if turn.request.response_id == "b" else (len(history),)
        bench.assert_rows(turn.entry.session, unknown=unknown)


def test_another_session_finds_a_page_whole_that_plain_decoding_just_filled(bench: Bench) -> None:
    start(bench, plain_turn("a", PROMPT[:20]), num_tokens=1)
    source = running(bench.engine)
    while source.num_computed < 3 * PAGE_SIZE:
        bench.engine.step()
    bench.engine.submit(plain_turn("b", [*source.token_ids[: 3 * PAGE_SIZE], 1, 2, 3]))
    bench.engine.step()
    first, second = (turn.entry.session for turn in bench.engine._turns)
    assert second.page_ids[:3] == first.page_ids[:3]
    bench.assert_rows(first)
    bench.assert_rows(second, unknown=(3 * PAGE_SIZE,))


def test_what_was_cut_waits_no_longer(bench: Bench) -> None:
    text = run_outcome(bench.engine, plain_turn("a", PROMPT, sampling=GREEDY)).text
    stop = replace(GREEDY, stop=(text[5:8],))
    first = run_outcome(bench.engine, plain_turn("b", [1, *PROMPT[1:]], sampling=stop))
    other = run_outcome(bench.engine, plain_turn("c", PROMPT, sampling=stop))
    assert other.end.stop_string == text[5:8]
    assert not bench.drafter._waiting
    for end, prompt in ((other.end, PROMPT), (first.end, [1, *PROMPT[1:]])):
        history = [*prompt, *end.output_ids]
        name = f"{end.response_id} follow-up"
        start(bench, plain_turn(name, [5, 6], parent=end, history=history), num_tokens=2)
        session = running(bench.engine)
        bench.assert_rows(session)
        cancelled(bench, name)


def test_evicted_pages_are_not_written_for_those_who_had_them(bench: Bench) -> None:
    start(bench, plain_turn("a", PROMPT), num_tokens=7)
    first = cancelled(bench, "a")
    bench.engine.sessions.evict(64)
    start(bench, plain_turn("b", [9, *PROMPT[:30]]), num_tokens=4)
    other = running(bench.engine)
    history = [*PROMPT, *first.output_ids]
    start(bench, plain_turn("c", [5, 6], parent=first, history=history), num_tokens=6)
    again = bench.engine._turns.by_response["c"].entry.session
    assert bench.engine._turns.by_response["c"].kv.reused_tokens == 0
    bench.assert_rows(other)
    bench.assert_rows(again)


def test_a_failed_turn_leaves_whole_rows_to_the_responses_before_it(bench: Bench) -> None:
    first = run_outcome(bench.engine, plain_turn("a", PROMPT[:40], sampling=GREEDY)).end
    history = [*PROMPT[:40], *first.output_ids]
    start(bench, plain_turn("b", [5, 6, 7], parent=first, history=history))
    assert bench.drafter._waiting
    bench.engine.fail_all(ChatrtError("a device is gone"))
    assert not bench.drafter._waiting
    bench.engine.take_events()
    start(bench, plain_turn("c", [8, 9], parent=first, history=history), num_tokens=3)
    bench.assert_rows(running(bench.engine), unknown=(len(history) - 1,))


@pytest.mark.parametrize("name", ["reference", "native"])
def test_rows_of_sessions_beyond_the_places_are_written_sooner(
    tokenizer: Tokenizer, name: str
) -> None:
    bench = make_bench(tokenizer, executor(name), num_deferred=2 * PAGE_SIZE)
    requests = [plain_turn(name, [ord(name), *PROMPT[:17]]) for name in "abcd"]
    start(bench, *requests[:2], num_tokens=8)
    paused, other = (turn.entry.session for turn in bench.engine._turns)
    assert bench.num_waiting(paused) == bench.num_waiting(other) == 3
    bench.engine.pause("a")
    start(bench, requests[2])
    assert bench.num_waiting(paused) == 0
    assert len(bench.drafter._waiting) == 2
    bench.engine.resume("a")
    start(bench, requests[3])  # more rows in a pass than there are places: all are written in it
    assert not bench.drafter._waiting
    assert len(bench.engine._turns) == 4
    for turn in bench.engine._turns:
        bench.assert_rows(turn.entry.session)


def test_no_more_rows_wait_than_a_pass_can_have(tokenizer: Tokenizer) -> None:
    target = tiny_target(tokenizer, max_context=CONTEXT, max_rows=5)
    head = tiny_head(target.decoder.config, feature_layers=LAYERS)
    drafter = head_drafter(head, target, ReferenceOps(), num_deferred=10)
    token_ids, pages, found = PROMPT[:32], [3, 1], []
    for position, token_id in enumerate(token_ids):
        rows = [BatchRows([token_id], position, pages)]
        target.forward(rows, drafter.observe(TargetPass([7], rows)))
        drafter.commit(7, position + 1)
        found.append(len(drafter._waiting[7].token_ids) if drafter._waiting else 0)
    assert found == ([1, 2, 3, 4, 5] * 3 + [0]) * 2
    twin = tiny_target(tokenizer, max_context=CONTEXT, max_rows=CONTEXT, feature_layers=LAYERS)
    oracle = HeadOracle(head, twin)
    keys, values = oracle.keys_and_values(oracle.inputs(token_ids))
    own = drafter.kv.layer(0)
    torch.testing.assert_close(own.keys[pages].flatten(0, 1), keys, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(own.values[pages].flatten(0, 1), values, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_copied_whatever_their_numbers_are(dtype: torch.dtype) -> None:
    source = torch.randn(5, 7).to(dtype)
    target = torch.zeros(3, 7, dtype=dtype)
    copies = RowCopies(source, target)
    copies.copy(4, 1)
    assert torch.equal(target[1], source[4])
    assert not target[[0, 2]].any()
    RowCopies(source, source).copy(0, 2)
    assert torch.equal(source[2], source[0])
