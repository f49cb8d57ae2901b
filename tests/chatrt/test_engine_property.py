"""Any interleaving of turns, forks, cancels, drafts and evictions leaves text and pages right."""

from __future__ import annotations

import itertools
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chatrt.errors import ContextLengthExceeded, OutOfPages
from chatrt.params import SamplingParams
from chatrt.testing.drafter import ScriptedDrafter
from chatrt.testing.engine import Outcome, outcomes, tiny_engine
from chatrt.testing.tokenizer import tiny_tokenizer
from chatrt.turn import FinishReason, TurnKind, TurnRequest
from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.ops import NativeOps
from tests.chatrt.engine_support import ColdRuns
from tests.chatrt_kernels.cpu_support import NATIVE_PATH, compiled

if TYPE_CHECKING:
    from chatrt.engine import Engine
    from chatrt_kernels.ops import Ops

NUM_PAGES = 14
MAX_CONTEXT = 160
TEXTS = ("the moon ", "hello world ", "a", "the moon is made of cheese and the sea of salt ")
LANES = ("one", "two")

with tempfile.TemporaryDirectory() as _folder:
    TOKENIZER = tiny_tokenizer(Path(_folder))


@cache
def cold_runs() -> ColdRuns:
    return ColdRuns(TOKENIZER, max_context=MAX_CONTEXT)


@cache
def native_ops() -> NativeOps:
    return NativeOps(NativeLibrary(compiled(NATIVE_PATH)), 2)


@cache
def native_cold_runs() -> ColdRuns:
    # rows are the same bits in any company, so not even near ties may fall the other way
    return ColdRuns(TOKENIZER, max_context=MAX_CONTEXT, ops=native_ops(), margin=0.0)


texts = st.sampled_from(TEXTS)
samplings = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    max_output_tokens=st.sampled_from([1, 2, 7, 20]),
    stop=st.sampled_from([(), ("t", "\n"), ("ld",), ("wor", "hel", "e")]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
)
drafts = st.sampled_from([0, 1, 3, 6])


class EngineMachine(RuleBasedStateMachine):
    """A small engine, turns on it, and what their events told."""

    engine: Engine
    drafter: ScriptedDrafter

    @property
    def ops(self) -> Ops | None:
        """What executes the model; None for the reference."""
        return None

    @property
    def cold(self) -> ColdRuns:
        """What every turn gives by itself."""
        return cold_runs()

    def __init__(self) -> None:
        super().__init__()
        self.names = map(str, itertools.count())
        self.requests: dict[str, TurnRequest] = {}
        self.found: dict[str, Outcome] = {}
        self.parents: list[str] = []  # that may be continued
        self.checked: set[str] = set()

    @initialize(
        num_right=st.lists(st.integers(0, 6), min_size=1, max_size=4),
        num_extra=st.integers(0, 2),
        max_parked=st.sampled_from([1, 3, 100]),
        max_rows=st.sampled_from([64, 96]),
    )
    def begin(self, num_right: list[int], num_extra: int, max_parked: int, max_rows: int) -> None:
        self.drafter = ScriptedDrafter(num_right=num_right, num_extra=num_extra)
        self.engine = tiny_engine(
            TOKENIZER,
            num_pages=NUM_PAGES,
            max_context=MAX_CONTEXT,
            max_num_batched_tokens=max_rows,
            drafter=self.drafter,
            ops=self.ops,
            max_parked=max_parked,
        )

    @property
    def live(self) -> list[str]:
        return [n for n in self.requests if n not in self.found or not self.found[n].finished]

    def submit(
        self,
        text: str,
        sampling: SamplingParams,
        num_drafts: int,
        *,
        parent: str | None = None,
        kind: TurnKind = TurnKind.ANSWER,
        lane: str | None = None,
    ) -> None:
        history: list[int] = []
        if parent is not None:
            asked, ended = self.requests[parent], self.found[parent].end
            history = [*asked.token_ids, *ended.output_ids]
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
        if kind is TurnKind.ANSWER and len(request.token_ids) < MAX_CONTEXT:
            cold = self.cold.run(request)
            self.drafter.sequences.append([*request.token_ids, *cold.token_ids])
        self.engine.submit(request)

    @rule(text=texts, times=st.integers(1, 3), sampling=samplings, num_drafts=drafts)
    def ask(self, text: str, times: int, sampling: SamplingParams, num_drafts: int) -> None:
        self.submit(text * times, sampling, num_drafts)

    @precondition(lambda self: self.parents)
    @rule(data=st.data(), text=texts, sampling=samplings, num_drafts=drafts)
    def follow_up(
        self, data: st.DataObject, text: str, sampling: SamplingParams, num_drafts: int
    ) -> None:
        parent = data.draw(st.sampled_from(self.parents[-4:]))
        self.submit(text, sampling, num_drafts, parent=parent)

    @precondition(lambda self: self.parents)
    @rule(data=st.data(), text=texts)
    def prefill(self, data: st.DataObject, text: str) -> None:
        parent = data.draw(st.sampled_from([None, *self.parents[-4:]]))
        self.submit(text, SamplingParams(), 0, parent=parent, kind=TurnKind.PREFILL)

    @rule(
        data=st.data(),
        lane=st.sampled_from(LANES),
        text=texts,
        num_chars=st.integers(0, 60),
        send=st.booleans(),
    )
    def type_ahead(
        self, data: st.DataObject, lane: str, text: str, num_chars: int, send: bool
    ) -> None:
        parent = data.draw(st.sampled_from([None, *self.parents[-3:]]))
        typed = (text * 4)[:num_chars]
        kind = TurnKind.ANSWER if send and typed else TurnKind.TYPED_AHEAD
        sampling = SamplingParams(temperature=0.0, max_output_tokens=5)
        self.submit(typed, sampling, 0, parent=parent, kind=kind, lane=lane)

    @rule(
        data=st.data(),
        lane=st.sampled_from(LANES),
        text=texts,
        lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3),
        num_steps=st.integers(0, 3),
    )
    def type_and_send(
        self,
        data: st.DataObject,
        lane: str,
        text: str,
        lengths: list[int],
        num_steps: int,
    ) -> None:
        """Typed in pieces, perhaps taken back in part, each piece computed in part, then sent."""
        parent = data.draw(st.sampled_from([None, *self.parents[-3:]]))
        sampling = SamplingParams(temperature=0.0, max_output_tokens=5)
        for length in lengths:
            typed = (text * 9)[:length]
            kind = TurnKind.TYPED_AHEAD
            self.submit(typed, sampling, 0, parent=parent, kind=kind, lane=lane)
            self.step(num_steps)
        self.submit(typed + "?", sampling, 2, parent=parent, lane=lane)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.live))
        assert self.engine.cancel(name)
        assert not self.engine.cancel(name)
        self.collect()
        assert self.found[name].end.reason is FinishReason.CANCELLED

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        self.engine.pause(data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.engine.resume(data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.parents))
        self.parents.remove(name)
        self.engine.forget([name])

    @rule(lane=st.sampled_from(LANES))
    def drop_lane(self, lane: str) -> None:
        self.engine.drop_lane(lane)

    @rule(num_steps=st.sampled_from([1, 2, 5, 12, 30]))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()
            self.engine.sessions.check_invariants()

    @invariant()
    def collect(self) -> None:
        if not hasattr(self, "engine"):
            return
        outcomes(self.engine.take_events(), self.found)
        self.engine.sessions.check_invariants()
        for name in [n for n in self.found if n not in self.checked and self.found[n].finished]:
            self.checked.add(name)
            self.check_end(self.requests[name], self.found[name])

    def check_end(self, request: TurnRequest, outcome: Outcome) -> None:
        end = outcome.end
        if request.kind is TurnKind.ANSWER:
            if end.reason is FinishReason.FAILED:
                assert isinstance(end.error, OutOfPages | ContextLengthExceeded)
            if outcome.token_ids:
                whole = end.reason not in (FinishReason.FAILED, FinishReason.CANCELLED)
                self.cold.assert_equal(request, outcome, whole=whole)
            cut = end.reason is FinishReason.CANCELLED or end.stop_string is not None
            if cut and "\ufffd" not in end.text:
                assert TOKENIZER.decode(end.output_ids) == end.text
        else:
            assert not end.text
        failed = end.reason is FinishReason.FAILED
        if end.kv.computed_tokens and not failed and end.reason is not FinishReason.CANCELLED:
            assert end.kv.reused_tokens + end.kv.computed_tokens == len(request.token_ids)
        if request.kind is not TurnKind.TYPED_AHEAD and request.token_ids and not failed:
            self.parents.append(request.response_id)
            tip = self.engine._residency._tips.get(request.response_id)
            if tip is not None and end.kv.resident_pages:
                held = tip.session.token_ids[: tip.num_tokens]
                assert held == [*request.token_ids, *end.output_ids]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for name in self.live:
            self.engine.resume(name)
        for _ in range(3000):
            if not self.engine.step():
                break
        self.collect()
        assert not self.live
        assert self.engine.num_running == self.engine.num_waiting == 0
        for lane in LANES:
            self.engine.drop_lane(lane)
        self.engine.forget(self.found)
        sessions = self.engine.sessions
        sessions.check_invariants()
        # Pages that `SessionManager.rewind` cut off stay cached until they are evicted.
        assert sessions.num_free == NUM_PAGES
        assert not self.drafter.committed, "every session ended"


EngineMachine.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyInterleaving = EngineMachine.TestCase


class NativeEngineMachine(EngineMachine):
    """The same on the native kernels."""

    @property
    def ops(self) -> Ops | None:
        return native_ops()

    @property
    def cold(self) -> ColdRuns:
        return native_cold_runs()


NativeEngineMachine.TestCase.settings = EngineMachine.TestCase.settings
TestAnyInterleavingOnNativeKernels = NativeEngineMachine.TestCase
