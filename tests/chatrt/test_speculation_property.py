"""Any interleaving of turns with real drafters: text is plain decoding's, rows are whose they are.

As `test_engine_property`, which drafts what a script says; here every drafter that there is drafts,
at fixed depths and at those of a controller with any costs, and the process may start anew.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chatrt.depth import DraftCost, StepCosts
from chatrt.errors import ContextLengthExceeded, OutOfPages
from chatrt.params import SamplingParams
from chatrt.testing.engine import Outcome, outcomes, run_outcome, turn_request
from chatrt.testing.tokenizer import tiny_tokenizer
from chatrt.turn import FinishReason, TurnKind, TurnRequest
from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt.engine_support import ColdRuns
from tests.chatrt.speculation_support import DRAFTERS, Size, Speculating
from tests.chatrt_kernels.cpu_support import NATIVE_PATH, compiled

if TYPE_CHECKING:
    from chatrt_kernels.ops import Ops

THOROUGH = os.environ.get("CHATRT_ALL_PROMPTS") == "1"  # `make check-speculation`
NUM_PAGES = 14
MAX_CONTEXT = 144
MAX_DRAFTS = 6
TEXTS = ("the moon ", "hello world ", "a", "the moon is made of cheese and the sea of salt ")
LANE = "lane"
ENDED_EARLY = (FinishReason.FAILED, FinishReason.CANCELLED)

pytestmark = pytest.mark.timeout(1800 if THOROUGH else 120)

with tempfile.TemporaryDirectory() as _folder:
    TOKENIZER = tiny_tokenizer(Path(_folder))


@cache
def native_ops() -> NativeOps:
    return NativeOps(NativeLibrary(compiled(NATIVE_PATH)), 1)


@cache
def cold_runs(*, native: bool) -> ColdRuns:
    if not native:
        return ColdRuns(TOKENIZER, max_context=MAX_CONTEXT)
    # rows are the same bits in any company: not even near ties may fall the other way
    return ColdRuns(TOKENIZER, max_context=MAX_CONTEXT, ops=native_ops(), margin=0.0)


texts = st.sampled_from(TEXTS)
depths = st.sampled_from([None, None, 0, 1, 3, MAX_DRAFTS])
greedy = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    max_output_tokens=st.sampled_from([1, 2, 7, 30, 30]),
    logit_bias=st.sampled_from([{}, {97: 12.0, 98: 12.0}]),
    stop=st.sampled_from([(), ("t", "\n"), ("ld",), ("wor", "hel", "e")]),
)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.6]),
    seed=st.integers(0, 3),
    top_k=st.sampled_from([0, 0, 12]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([{}, {97: 6.0, 98: 6.0, 116: 5.0}, {97: 20.0, 98: 20.0}]),
    max_output_tokens=st.sampled_from([1, 2, 7, 30, 30]),
    stop=st.sampled_from([(), ("t", "\n"), ("ld",), ("wor", "hel", "e")]),
    stop_token_ids=st.sampled_from([(), (), (98, 112)]),
    top_logprobs=st.sampled_from([None, 2]),
)
milliseconds = st.sampled_from([0.0, 0.1, 1.0])
costs = st.builds(
    lambda row_ms, fixed_ms, step_ms, guess: StepCosts(
        ((1, 3.0), (5, 3.0 + 4 * row_ms)),
        {
            name: DraftCost(fixed_ms, step_ms, step_ms / 2, guess)
            for name in ("ngram", "head", "model")
        },
    ),
    *(milliseconds, milliseconds, milliseconds),
    st.sampled_from([0.1, 0.6, 0.99]),
)


class SpeculationMachine(RuleBasedStateMachine):
    """A small engine that drafts, turns on it, and what their events told."""

    native = False
    samplings = greedy
    lab: Speculating

    def __init__(self) -> None:
        super().__init__()
        self.names = map(str, itertools.count())
        self.requests: dict[str, TurnRequest] = {}
        self.found: dict[str, Outcome] = {}
        self.parents: list[str] = []  # that may be continued
        self.checked: set[str] = set()

    @initialize(
        name=st.sampled_from(DRAFTERS),
        num_drafts=st.integers(1, MAX_DRAFTS),
        own_costs=st.one_of(st.none(), costs),
        max_rows=st.sampled_from([64, 96]),
        max_parked=st.sampled_from([1, 3, 100]),
    )
    def begin(
        self,
        name: str,
        num_drafts: int,
        own_costs: StepCosts | None,
        max_rows: int,
        max_parked: int,
    ) -> None:
        ops: Ops = native_ops() if self.native else ReferenceOps()
        size = Size(NUM_PAGES, MAX_CONTEXT, max_rows, max_parked)
        self.lab = Speculating(TOKENIZER, name, ops, size, num_drafts, own_costs)

    @property
    def live(self) -> list[str]:
        return [n for n in self.requests if n not in self.found or not self.found[n].finished]

    def history(self, parent: str | None) -> list[int]:
        if parent is None:
            return []
        return [*self.requests[parent].token_ids, *self.found[parent].end.output_ids]

    def submit(
        self,
        text: str,
        sampling: SamplingParams,
        num_drafts: int | None,
        *,
        parent: str | None = None,
        kind: TurnKind = TurnKind.ANSWER,
        lane: str | None = None,
    ) -> None:
        history = self.history(parent)
        request = TurnRequest(
            response_id=next(self.names),
            kind=kind,
            token_ids=history + TOKENIZER.encode(text),
            num_history=len(history),
            sampling=sampling,
            parent_id=parent,
            typed_ahead_key=lane,
            speculation_tokens=num_drafts,
        )
        self.requests[request.response_id] = request
        self.lab.engine.submit(request)

    @rule(data=st.data(), text=texts, times=st.integers(1, 3), num_drafts=depths)
    def ask(self, data: st.DataObject, text: str, times: int, num_drafts: int | None) -> None:
        self.submit(text * times, data.draw(self.samplings), num_drafts)

    @precondition(lambda self: self.parents)
    @rule(data=st.data(), text=texts, num_drafts=depths)
    def follow_up(self, data: st.DataObject, text: str, num_drafts: int | None) -> None:
        """In place behind the newest turn of a conversation, as a fork behind an older one."""
        parent = data.draw(st.sampled_from(self.parents[-4:]))
        self.submit(text, data.draw(self.samplings), num_drafts, parent=parent)

    @precondition(lambda self: self.parents)
    @rule(data=st.data(), num_drafts=depths)
    def regenerate(self, data: st.DataObject, num_drafts: int | None) -> None:
        """The same prompt once more, with another way to choose the answer."""
        old = self.requests[data.draw(st.sampled_from(self.parents[-4:]))]
        again = replace(
            old,
            response_id=next(self.names),
            kind=TurnKind.ANSWER,
            sampling=data.draw(self.samplings),
            typed_ahead_key=None,
            speculation_tokens=num_drafts,
            token_ids=list(old.token_ids),
            stamps=replace(old.stamps),
        )
        self.requests[again.response_id] = again
        self.lab.engine.submit(again)

    @rule(
        data=st.data(),
        text=texts,
        lengths=st.lists(st.integers(0, 90), min_size=1, max_size=3),
        num_steps=st.integers(0, 3),
        sent=st.booleans(),
    )
    def type_ahead(
        self, data: st.DataObject, text: str, lengths: list[int], num_steps: int, *, sent: bool
    ) -> None:
        """Typed in pieces, perhaps taken back in part, each computed in part, perhaps sent."""
        parent = data.draw(st.sampled_from([None, *self.parents[-3:]]))
        typed = ""
        for length in lengths:
            typed, sampling = (text * 9)[:length], SamplingParams()
            self.submit(typed, sampling, None, parent=parent, kind=TurnKind.TYPED_AHEAD, lane=LANE)
            self.step(num_steps)
        if sent:
            self.submit(typed + "?", data.draw(self.samplings), None, parent=parent, lane=LANE)

    @rule()
    def drop_lane(self) -> None:
        self.lab.engine.drop_lane(LANE)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.live))
        assert self.lab.engine.cancel(name)
        self.collect()
        assert self.found[name].end.reason is FinishReason.CANCELLED

    @precondition(lambda self: self.live)
    @rule(data=st.data(), goes_on=st.booleans())
    def pause_or_resume(self, data: st.DataObject, *, goes_on: bool) -> None:
        name, engine = data.draw(st.sampled_from(self.live)), self.lab.engine
        (engine.resume if goes_on else engine.pause)(name)

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.lab.engine.forget([data.draw(st.sampled_from(self.parents))])

    @rule(count=st.integers(1, NUM_PAGES))
    def evict(self, count: int) -> None:
        """As if others had needed the pages."""
        self.lab.engine.sessions.evict(count)

    @rule()
    def restart(self) -> None:
        """Whatever ran is lost, and of all others nothing is left but their token ids."""
        for name in self.live:
            del self.requests[name]
            self.found.pop(name, None)
        self.lab = replace(self.lab)

    @rule(num_steps=st.integers(20, 60))
    def run(self, num_steps: int) -> None:
        """Long enough for most turns to end by themselves."""
        self.step(num_steps)

    @rule(num_steps=st.sampled_from([1, 2, 5, 12]))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if not self.lab.engine.step():
                break
            self.lab.engine.sessions.check_invariants()
        self.collect()

    @invariant()
    def collect(self) -> None:
        if not hasattr(self, "lab"):
            return
        outcomes(self.lab.engine.take_events(), self.found)
        ended = [n for n in self.found if n not in self.checked and self.found[n].finished]
        self.lab.starts.update(self.found[name].end.kv.reused_tokens for name in ended)
        self.lab.check()
        for name in ended:
            self.checked.add(name)
            self.check_end(self.requests[name], self.found[name])

    def check_end(self, request: TurnRequest, outcome: Outcome) -> None:
        end = outcome.end
        failed = end.reason is FinishReason.FAILED
        if failed:
            assert isinstance(end.error, OutOfPages | ContextLengthExceeded)
        if outcome.token_ids:
            cold = cold_runs(native=self.native)
            cold.assert_equal(request, outcome, whole=end.reason not in ENDED_EARLY)
            if self.native and request.sampling.top_logprobs is not None:
                expected = cold.run(request).logprobs
                assert outcome.logprobs == expected[: len(outcome.logprobs)]
        figures = end.speculation
        assert figures.accepted <= figures.drafted
        assert figures.emitted == end.num_generated
        if request.kind is not TurnKind.TYPED_AHEAD and request.token_ids and not failed:
            self.parents.append(request.response_id)

    def teardown(self) -> None:
        if not hasattr(self, "lab"):
            return
        engine = self.lab.engine
        for name in self.live:
            engine.resume(name)
        for _ in range(3000):
            if not engine.step():
                break
        self.collect()
        assert not self.live
        engine.drop_lane(LANE)
        engine.forget(self.found)
        engine.sessions.check_invariants()
        self.lab.assert_forgotten()


SpeculationMachine.TestCase.settings = settings(
    max_examples=150 if THOROUGH else 20,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyInterleaving = SpeculationMachine.TestCase


class NativeSpeculationMachine(SpeculationMachine):
    """The same on the native kernels, where sampled text is held to every bit too."""

    native = True
    samplings = samplings


NativeSpeculationMachine.TestCase.settings = settings(
    SpeculationMachine.TestCase.settings, max_examples=500 if THOROUGH else 40
)
TestAnyInterleavingOnNativeKernels = NativeSpeculationMachine.TestCase


SELF_DRAFTED = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.8, seed=11),
    "penalised": SamplingParams(
        temperature=0.9, seed=5, frequency_penalty=0.7, min_p=0.05, logit_bias={97: 4.0}
    ),
}


@pytest.mark.parametrize("name", SELF_DRAFTED)
def test_all_drafts_of_a_self_draft_are_accepted_at_every_depth(name: str) -> None:
    sampling = replace(SELF_DRAFTED[name], max_output_tokens=40, ignore_eos=True)
    for k in range(1, 9):
        lab = Speculating(TOKENIZER, "self", native_ops(), Size(), k)
        request = turn_request("a", TOKENIZER.encode(TEXTS[3]), sampling=sampling)
        figures = run_outcome(lab.engine, request).end.speculation
        assert figures.accepted == figures.drafted > 0
        # the prompt's pass gives one token, the draft catches up in the next, then all are full
        assert figures.steps <= 3 + -(-38 // (k + 1))


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_behind_every_round_the_draft_lacks_the_last_token_or_if_all_were_kept_two(k: int) -> None:
    lab = Speculating(TOKENIZER, "self", native_ops(), Size(max_rows=128), k)
    for index, sampling in enumerate(SELF_DRAFTED.values()):
        prompt = TOKENIZER.encode(TEXTS[3])[: 20 + index]
        sampling = replace(sampling, max_output_tokens=60, ignore_eos=True)
        lab.engine.submit(turn_request(str(index), prompt, sampling=sampling))
    num_rounds = 0
    for _ in range(60):
        before = {id(turn): (turn.counter.accepted, len(turn.token_ids)) for turn in lab.turns}
        lab.engine.step()
        lab.check()
        for turn in lab.turns:
            accepted, length = before.get(id(turn), (0, 0))
            if turn.counter.accepted > accepted:
                num_rounds += 1
                assert len(turn.token_ids) == length + turn.counter.accepted - accepted + 1
                assert lab.num_right(turn) == len(turn.entry.session.token_ids) - 2
    assert num_rounds > 100 // (k + 1)
