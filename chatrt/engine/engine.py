"""The step loop: plan, draft, one ragged forward, verify, commit.

Knows: everything below it: sessions, scheduler, batch, decoder, sampler, drafter.
Does not know: sockets, asyncio, conversations, JSON. It never waits.
Invariant: between two steps every session's KV rows `[0, num_computed)` belong to its first ids,
and a turn has exactly one FinishedEvent, its last event.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from chatrt.engine.admission import Admission
from chatrt.engine.drafting import Drafting
from chatrt.engine.forward import batch_rows
from chatrt.engine.live import LiveTurn
from chatrt.engine.report import finished, refused
from chatrt.engine.residency import Residency
from chatrt.errors import ChatrtError, InvalidValue, OutOfPages
from chatrt.scheduler import Entry, Phase, Work
from chatrt.speculative import row_logprobs, verify
from chatrt.turn import EngineEvent, FinishReason, KVFigures, StartedEvent, TokensEvent, TurnKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from chatrt.depth import DepthController
    from chatrt.drafter import Drafter
    from chatrt.engine.admission import EngineLimits
    from chatrt.engine.forward import Target
    from chatrt.engine.residency import Placement
    from chatrt.scheduler import Plan, PlannedRows, Scheduler
    from chatrt.session import PageCopy, Session, SessionManager
    from chatrt.turn import TurnRequest


class Engine:
    """Runs turns. All methods belong to one thread.

    Args:
        target: The model that answers.
        sessions: The pages' bookkeeping.
        scheduler: Plans the steps over `sessions`.
        drafter: Proposes tokens, or None.
        depth: Decides how many; without it each turn gets as many as `limits` say.
        limits: Caps.
        clock: Nanoseconds, monotonic.
        draw_seed: A fresh seed for a request that names none.
    """

    def __init__(
        self,
        target: Target,
        *,
        sessions: SessionManager,
        scheduler: Scheduler,
        drafter: Drafter | None,
        depth: DepthController | None = None,
        limits: EngineLimits,
        clock: Callable[[], int],
        draw_seed: Callable[[], int],
    ) -> None:
        self._target = target
        self._sessions = sessions
        self._scheduler = scheduler
        self._drafting = Drafting(drafter, depth, max_tokens=limits.num_drafts, clock=clock)
        self._limits = limits
        self._clock = clock
        self._draw_seed = draw_seed
        self._admission = Admission(sessions, limits)
        self._residency = Residency(
            sessions, max_sessions=limits.max_parked, on_close=self._drafting.close
        )
        self._turns: dict[str, LiveTurn] = {}
        self._by_session: dict[int, LiveTurn] = {}
        self._events: list[EngineEvent] = []

    @property
    def sessions(self) -> SessionManager:
        """The pages' bookkeeping, for figures."""
        return self._sessions

    @property
    def num_running(self) -> int:
        """Turns that are attached to a session."""
        return len(self._turns)

    @property
    def num_waiting(self) -> int:
        """Turns in the queue."""
        return len(self._admission)

    def submit(self, request: TurnRequest) -> None:
        """Queue a turn; a half-typed turn of the same lane gives way to it at once.

        A prompt that does not fit ends at once with an event that carries the error, a half-typed
        one of which no token is certain yet without one.
        """
        if request.typed_ahead_key is not None:
            self._supersede(request.typed_ahead_key)
        if request.kind is TurnKind.TYPED_AHEAD and not request.token_ids:
            self._refuse(request, FinishReason.PREFILLED, None)
            return
        try:
            self._check_ids(request)
            self._admission.put(request)
        except ChatrtError as error:
            self._refuse(request, FinishReason.FAILED, error)

    def _check_ids(self, request: TurnRequest) -> None:
        """A tokenizer may know more tokens than the model has embeddings; history was checked."""
        new_ids = request.token_ids[request.num_history :]
        largest, size = max(new_ids, default=0), self._target.decoder.config.vocab_size
        if largest >= size:
            token = self._target.tokenizer.token(largest)
            raise InvalidValue(
                f"the prompt has token {largest} ({token!r}), the model has embeddings for {size}",
                param="input",
            )

    def cancel(self, response_id: str) -> bool:
        """End a turn now, queued or running; whether there was one."""
        for request in self._admission.take(lambda r: r.response_id == response_id):
            self._refuse(request, FinishReason.CANCELLED, None)
            return True
        turn = self._turns.get(response_id)
        if turn is None:
            return False
        turn.finish = FinishReason.CANCELLED
        self._end(turn)
        return True

    def pause(self, response_id: str) -> None:
        """Stop computing for a turn whose reader lags; its pages stay."""
        turn = self._turns.get(response_id)
        if turn is not None and turn.entry.phase is Phase.RUNNING:
            self._scheduler.pause(turn.entry)

    def resume(self, response_id: str) -> None:
        """Go on with a paused turn."""
        turn = self._turns.get(response_id)
        if turn is not None and turn.entry.phase is Phase.PAUSED:
            self._scheduler.unpause(turn.entry)

    def forget(self, response_ids: Iterable[str]) -> None:
        """Delete responses: tips and the pages that nothing else shares."""
        self._copy(self._residency.forget(response_ids))

    def drop_lane(self, typed_ahead_key: str) -> None:
        """A lane is gone: end its half-typed turn and close what it left."""
        self._supersede(typed_ahead_key)
        self._residency.drop_typed(typed_ahead_key)

    def cancel_all(self) -> None:
        """End every turn, queued or running, as `cancel` does."""
        for request in self._admission.take(lambda _: True):
            self._refuse(request, FinishReason.CANCELLED, None)
        for response_id in list(self._turns):
            self.cancel(response_id)

    def fail_all(self, error: ChatrtError) -> None:
        """A step failed half-way: end every turn that ran, with this error; the queue stays."""
        failed = list(self._turns.values())
        for turn in failed:
            self._report_failure(turn, error)
        for turn in failed:
            self._keep_older(turn.entry.session)

    def take_events(self) -> list[EngineEvent]:
        """Everything that happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def step(self) -> bool:
        """One step; whether anything happened (if not, only a call can change that).

        Events are left for `take_events`.
        """
        admitted = self._admit()
        self._drafting.begin(self._turns.values())
        plan = self._scheduler.plan()
        if not plan.rows:
            return self._relieve(plan.starved) or admitted
        drafts = self._drafting.propose(plan, self._by_session)
        logits = self._forward(plan, drafts)
        now = self._clock()
        for planned, proposal, rows in zip(plan.rows, drafts, logits, strict=True):
            turn = self._by_session[planned.entry.session.session_id]
            if len(rows):
                self._commit_tokens(turn, planned, proposal, rows, now)
            else:
                self._commit_prompt(turn, planned, now)
        self._drafting.end(plan, len(plan.rows) + sum(map(len, drafts)))
        return True

    def _admit(self) -> bool:
        """Start what may start; whether anything left the queue."""
        admitted = False
        while len(self._admission):
            try:
                request = self._admission.next([turn.running for turn in self._turns.values()])
            except OutOfPages as error:
                self._refuse(self._admission.refuse_first(), FinishReason.FAILED, error)
                admitted = True
                continue
            if request is None:
                return admitted
            admitted = True
            try:
                self._start(request)
            except ChatrtError as error:
                self._refuse(request, FinishReason.FAILED, error)
            except Exception as error:  # our own fault: the step fails, but this turn ends too
                reason = ChatrtError(f"the turn could not be started: {error}")
                self._refuse(request, FinishReason.FAILED, reason)
                raise
        return admitted

    def _start(self, request: TurnRequest) -> None:
        stamps = request.stamps
        stamps.admitted_ns = self._clock()
        placement = self._residency.place(request)
        stamps.matched_ns = self._clock()
        self._copy(placement.copies)
        stamps.restored_ns = self._clock()
        turn = self._live(request, placement)
        self._turns[request.response_id] = turn
        self._by_session[placement.session.session_id] = turn
        self._scheduler.add(turn.entry)
        self._events.append(StartedEvent(request.response_id, turn.sampler.seed))

    def _live(self, request: TurnRequest, placement: Placement) -> LiveTurn:
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else self._draw_seed()
        room = self._limits.max_context - len(request.token_ids)
        max_tokens = min(room, sampling.max_output_tokens or room)
        entry = Entry(
            session=placement.session,
            work=Work.TYPED_AHEAD if request.kind is TurnKind.TYPED_AHEAD else Work.PREFILL,
            phase=Phase.RUNNING,
            priority=request.priority,
            arrival=request.stamps.received_ns,
            room=max_tokens - 1,
        )
        tokenizer = self._target.tokenizer
        sampler = self._target.make_sampler(
            sampling, seed=seed, vocab_size=self._target.vocab_size, prompt_ids=request.token_ids
        )
        kv = KVFigures(
            reused_tokens=placement.num_reused,
            typed_ahead_tokens=placement.num_typed_ahead,
            miss_reason=placement.miss_reason,
        )
        max_drafts = self._drafting.limit(request.speculation_tokens)
        return LiveTurn(request, entry, sampler, tokenizer, max_tokens, kv, max_drafts)

    def _forward(self, plan: Plan, drafts: Sequence[Sequence[int]]) -> list[Tensor]:
        """One pass over all planned rows; each entry's logits, none where it samples nothing."""
        rows = []
        for planned, proposal in zip(plan.rows, drafts, strict=True):
            turn = self._by_session[planned.entry.session.session_id]
            sample = planned.samples and turn.request.kind is TurnKind.ANSWER
            rows.append(batch_rows(planned, proposal, sample=sample))
        feature_rows = self._drafting.observe(plan, rows)
        started_ns = self._clock()
        logits = self._target.forward(rows, feature_rows)
        self._drafting.time_pass(self._clock() - started_ns)
        return logits

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        """Copy rows in all KV tensors that the page ids name."""
        self._target.kv.copy_rows(copies)
        self._drafting.copy_rows(copies)

    def _commit_prompt(self, turn: LiveTurn, planned: PlannedRows, now: int) -> None:
        session = turn.entry.session
        num_computed = planned.start + planned.num_rows - planned.num_drafts
        turn.num_computed_tokens += num_computed - planned.start
        self._sessions.commit(session, (), num_computed=num_computed)
        self._drafting.commit(session)
        if turn.request.kind is not TurnKind.ANSWER and num_computed >= len(session.token_ids):
            turn.request.stamps.prefilled_ns = now
            turn.finish = FinishReason.PREFILLED
            self._end(turn)

    def _commit_tokens(
        self, turn: LiveTurn, planned: PlannedRows, drafts: Sequence[int], logits: Tensor, now: int
    ) -> None:
        session, sampler = turn.entry.session, turn.sampler
        length = len(session.token_ids)
        verified = verify(sampler, logits, drafts, position=length)
        logprobs = row_logprobs(sampler, logits, verified.token_ids)
        sampled_ns = self._clock()
        if turn.entry.work is not Work.DECODE:
            turn.request.stamps.prefilled_ns, turn.request.stamps.sampled_ns = now, sampled_ns
            turn.num_computed_tokens += length - planned.start
            turn.entry.work = Work.DECODE
        emitted = turn.push(verified.token_ids, logprobs, time_ns=sampled_ns)
        taken = emitted.token_ids
        sampler.accept(taken)
        turn.entry.room = turn.room
        num_accepted = min(verified.num_accepted, len(taken))
        self._drafting.count(turn, len(drafts), num_accepted=num_accepted, num_emitted=len(taken))
        # The last taken token has no KV that counts, whether it was a draft or the target's own.
        self._sessions.commit(session, taken, num_computed=length + len(taken) - 1)
        if planned.num_drafts:
            self._sessions.trim(session)
        self._drafting.commit(session)
        self._events.append(
            TokensEvent(turn.request.response_id, emitted.text, taken, emitted.logprobs, sampled_ns)
        )
        if turn.finish is not None:
            self._end(turn)

    def _end(self, turn: LiveTurn) -> None:
        """Cut the ids to what the tip keeps, park, leave the scheduler, report."""
        request, session = turn.request, turn.entry.session
        output_ids = self._cut(turn)
        turn.kv = replace(
            turn.kv,
            resident_pages=len(session.page_ids),
            shared_pages=self._sessions.num_shared_pages(session),
        )
        self._drafting.commit(session)
        if request.kind is TurnKind.TYPED_AHEAD:
            assert request.typed_ahead_key is not None
            self._residency.keep_typed(request.typed_ahead_key, session)
        else:
            self._residency.keep_tip(request.response_id, session)
        self._report(turn, output_ids, None)

    def _cut(self, turn: LiveTurn) -> list[int]:
        """Leave in the session what the answer keeps of its ids; returns these."""
        session, cut = turn.entry.session, turn.cut()
        output_ids = turn.token_ids[: cut.num_kept] + cut.remainder_ids
        if turn.token_ids == output_ids:
            self._sessions.trim(session)
            return output_ids
        num_kept = turn.prompt_length + cut.num_kept
        self._copy(self._sessions.rewind(session, num_kept))
        self._sessions.extend(session, cut.remainder_ids)
        return output_ids

    def _report(self, turn: LiveTurn, output_ids: Sequence[int], error: ChatrtError | None) -> None:
        """The turn is over: forget it, and say so."""
        self._scheduler.remove(turn.entry)
        del self._turns[turn.request.response_id]
        del self._by_session[turn.entry.session.session_id]
        self._events.append(
            finished(
                turn,
                output_ids,
                kv=replace(turn.kv, computed_tokens=turn.num_computed_tokens),
                error=error,
                time_ns=self._clock(),
            )
        )

    def _report_failure(self, turn: LiveTurn, error: ChatrtError) -> None:
        turn.finish = FinishReason.FAILED
        self._report(turn, turn.token_ids, error)

    def _keep_older(self, session: Session) -> None:
        """A turn failed: its session is parked for the older responses that it holds."""
        self._drafting.commit(session)
        self._copy(self._residency.keep_older(session))

    def _refuse(
        self, request: TurnRequest, reason: FinishReason, error: ChatrtError | None
    ) -> None:
        self._events.append(refused(request, reason, error=error, time_ns=self._clock()))

    def _relieve(self, starved: Sequence[Entry]) -> bool:
        """Nobody could get a page: the youngest turn gives its own back, and says so."""
        if not starved:
            return False
        youngest = max(starved, key=lambda entry: entry.arrival)
        turn = self._by_session[youngest.session.session_id]
        free, evictable = self._sessions.num_free, self._sessions.num_evictable
        self._report_failure(turn, OutOfPages(1, free, evictable, self._sessions.num_pages))
        self._keep_older(turn.entry.session)
        return True

    def _supersede(self, typed_ahead_key: str) -> None:
        """End the half-typed turn of a lane, queued or running."""

        def half_typed(request: TurnRequest) -> bool:
            typed = request.kind is TurnKind.TYPED_AHEAD
            return typed and request.typed_ahead_key == typed_ahead_key

        for request in self._admission.take(half_typed):
            self._refuse(request, FinishReason.CANCELLED, None)
        for turn in [t for t in self._turns.values() if half_typed(t.request)]:
            turn.finish = FinishReason.CANCELLED
            self._end(turn)
