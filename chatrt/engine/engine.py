"""The step loop: plan, draft, one ragged forward, verify, commit.

Knows: everything below it: sessions, scheduler, batch, decoder, sampler, drafter.
Does not know: sockets, asyncio, conversations, JSON. It never waits.
Invariant: between two steps every session's KV rows `[0, num_computed)` belong to its first ids,
and a turn has exactly one FinishedEvent, its last event.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from chatrt.engine.admission import Admission
from chatrt.engine.drafting import Drafting
from chatrt.engine.forward import batch_rows, forward_in_passes
from chatrt.engine.report import with_restored
from chatrt.engine.residency import Residency
from chatrt.engine.starting import Starting
from chatrt.engine.turns import AHEAD, Turns
from chatrt.errors import ChatrtError, OutOfPages
from chatrt.scheduler import Entry, Phase, Work
from chatrt.speculative import row_logprobs, verify
from chatrt.turn import FinishReason, TurnKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from chatrt.depth import DepthController
    from chatrt.drafter import Drafter
    from chatrt.engine.admission import EngineLimits
    from chatrt.engine.archiving import Archiving
    from chatrt.engine.forward import Target
    from chatrt.engine.live import LiveTurn
    from chatrt.scheduler import Plan, PlannedRows, Scheduler
    from chatrt.session import Session
    from chatrt.session_manager import SessionManager
    from chatrt.turn import EngineEvent, TurnRequest


class Engine:
    """Runs turns. All methods belong to one thread.

    Args:
        target: The model that answers.
        sessions: The pages' bookkeeping, to be read between two steps.
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
        self.sessions = sessions
        self._scheduler = scheduler
        self._drafting = Drafting(drafter, depth, max_tokens=limits.num_drafts, clock=clock)
        self._clock = clock
        self.admission = Admission(sessions, limits)
        self._residency = Residency(
            sessions, max_sessions=limits.max_parked, on_close=self._drafting.close
        )
        self._starting = Starting(
            target, self._residency, self._drafting, limits, clock=clock, draw_seed=draw_seed
        )
        self._turns = Turns(scheduler, clock)
        self._archiving: Archiving | None = None

    @property
    def turns(self) -> Turns:
        """The turns that run, for figures."""
        return self._turns

    def keep_pages_in(self, archiving: Archiving) -> None:
        """Write pages behind from now on, and restore what was written."""
        self._archiving = archiving

    @property
    def num_running(self) -> int:
        """Turns that are attached to a session."""
        return len(self._turns)

    @property
    def poll_s(self) -> float | None:
        """How soon a step is due for pages under way, though nothing asks for one; None: none."""
        return None if self._archiving is None else self._archiving.poll_s

    @property
    def num_waiting(self) -> int:
        """Turns in the queue."""
        return len(self.admission)

    def submit(self, request: TurnRequest) -> None:
        """Queue a turn; a half-typed turn of the same lane gives way to it at once.

        A prompt that does not fit ends at once with an event that carries the error, a half-typed
        one of which no token is certain yet without one.
        """
        if request.typed_ahead_key is not None:
            self._supersede(request.typed_ahead_key)
        if (parent_id := request.parent_id) is not None:  # what is prepared behind it is of now
            self._end_all(lambda r: r.kind is TurnKind.PREPARED and r.parent_id == parent_id)
        if request.kind is TurnKind.TYPED_AHEAD and not request.token_ids:
            self._turns.refuse(request, FinishReason.PREFILLED)
            return
        try:
            self._starting.check_ids(request)
            self.admission.put(request)
        except ChatrtError as error:
            self._turns.refuse(request, FinishReason.FAILED, error)

    def prepare(self, request: TurnRequest) -> None:
        """Compute at idle time what every turn behind `request.parent_id` begins with.

        A turn behind that response ends this at once, and goes on from what is there.
        """
        assert request.kind is TurnKind.PREPARED
        if request.parent_id is not None and self._residency.holds(request.parent_id):
            self.submit(request)

    def cancel(self, response_id: str) -> bool:
        """End a turn now, queued or running; whether there was one."""
        for request in self.admission.take(lambda r: r.response_id == response_id):
            self._turns.refuse(request, FinishReason.CANCELLED)
            return True
        turn = self._turns.by_response.get(response_id)
        if turn is None:
            return False
        turn.finish = FinishReason.CANCELLED
        self._end(turn)
        return True

    def pause(self, response_id: str) -> None:
        """Stop computing for a turn whose reader lags; its pages stay."""
        turn = self._turns.by_response.get(response_id)
        if turn is not None and turn.entry.phase is Phase.RUNNING:
            self._scheduler.pause(turn.entry)

    def resume(self, response_id: str) -> None:
        """Go on with a paused turn."""
        turn = self._turns.by_response.get(response_id)
        if turn is not None and turn.entry.phase is Phase.PAUSED:
            self._scheduler.unpause(turn.entry)

    def forget(
        self, response_ids: Iterable[str], sequences: Iterable[tuple[str, Sequence[int]]] = ()
    ) -> None:
        """Delete responses: tips and the pages that nothing else shares.

        What is typed or prepared behind them ends. `sequences` are salts and token ids of paths to
        be deleted from the archive as well.
        """
        deleted = set(response_ids)
        self._end_all(lambda r: r.kind in AHEAD and r.parent_id in deleted)
        self._starting.copy(self._residency.forget(deleted))
        if self._archiving is not None:
            for salt, token_ids in sequences:
                self._archiving.wipe(salt, token_ids)

    def drop_lane(self, typed_ahead_key: str) -> None:
        """A lane is gone: end its half-typed turn and close what it left."""
        self._supersede(typed_ahead_key)
        self._residency.drop_typed(typed_ahead_key)

    def cancel_all(self) -> None:
        """End every turn, queued or running, as `cancel` does."""
        self._end_all(lambda _: True)

    def close(self, *, time_ms: float = 2000.0) -> None:
        """The last call: archive what is not archived yet, as far as the time allows."""
        if self._archiving is not None:
            self._archiving.finish(self._clock, time_ms=time_ms)

    def fail_all(self, error: ChatrtError) -> None:
        """A step failed half-way: end every turn that ran, with this error; the queue stays."""
        failed = list(self._turns)
        for turn in failed:
            self._stop_restoring(turn)
            self._turns.fail(turn, error)
        for turn in failed:
            self._keep_older(turn.entry.session)

    def take_events(self) -> list[EngineEvent]:
        """Everything that happened since the last call, in order."""
        return self._turns.take_events()

    def step(self) -> bool:
        """One step; whether anything happened (if not, only a call can change that).

        Events are left for `take_events`.
        """
        self._residency.end_pins(self._clock())
        restored = self._take_restored()
        admitted = self._admit()
        self._drafting.begin(self._turns)
        plan = self._scheduler.plan(self._clock())
        if not plan.rows:
            return self._relieve(plan.starved) or admitted or restored or self._save()
        drafts = self._drafting.propose(plan, self._turns.by_session)
        self._scheduler.drafted(plan, drafts)
        logits = self._forward(plan, drafts)
        now = self._clock()
        for planned, proposal, rows in zip(plan.rows, drafts, logits, strict=True):
            turn = self._turns.by_session[planned.entry.session.session_id]
            if len(rows):
                self._commit_tokens(turn, planned, proposal, rows, now)
            else:
                self._commit_prompt(turn, planned, now)
        self._drafting.end(plan, len(plan.rows) + sum(map(len, drafts)))
        self._save()
        return True

    def _admit(self) -> bool:
        """Start what may start; whether anything left the queue."""
        admitted = False
        while len(self.admission):
            try:
                request = self.admission.next([turn.running for turn in self._turns])
            except OutOfPages as error:
                self._turns.refuse(self.admission.refuse_first(), FinishReason.FAILED, error)
                admitted = True
                continue
            if request is None:
                if self.admission.holds_answer_up(self._turns.answers()) and self._give_way():
                    continue
                return admitted
            admitted = True
            try:
                self._turns.begin(self._starting.start(request, self._archiving))
            except ChatrtError as error:
                self._turns.refuse(request, FinishReason.FAILED, error)
            except Exception as error:  # our own fault: the step fails, but this turn ends too
                reason = ChatrtError(f"the turn could not be started: {error}")
                self._turns.refuse(request, FinishReason.FAILED, reason)
                raise
        return admitted

    def _take_restored(self) -> bool:
        """Go on with turns whose pages are back; whether there were any."""
        now_ns = self._clock()
        restored = [] if self._archiving is None else self._archiving.take_restored(now_ns)
        for one in restored:
            turn = self._turns.by_session[one.session.session_id]
            turn.entry.phase = Phase.RUNNING
            turn.request.stamps.restored_ns = now_ns
            if one.num_tokens:
                turn.kv = with_restored(turn.kv, one, num_history=turn.request.num_history)
        return bool(restored)

    def _stop_restoring(self, turn: LiveTurn) -> None:
        if self._archiving is not None and turn.entry.phase is Phase.RESTORING:
            self._archiving.abandon(turn.entry.session)

    def _save(self) -> bool:
        """Write some of what waits to be archived; whether there was anything."""
        return self._archiving is not None and self._archiving.save(busy=self._turns.is_busy)

    def _forward(self, plan: Plan, drafts: Sequence[Sequence[int]]) -> list[Tensor]:
        """One pass over all planned rows; each entry's logits, none where it samples nothing."""
        rows = []
        for planned, proposal in zip(plan.rows, drafts, strict=True):
            turn = self._turns.by_session[planned.entry.session.session_id]
            sample = planned.samples and turn.request.kind is TurnKind.ANSWER
            rows.append(batch_rows(planned, proposal, sample=sample))
        started_ns = self._clock()
        logits = forward_in_passes(self._target, rows, partial(self._drafting.observe, plan, rows))
        self._drafting.time_pass(self._clock() - started_ns)
        return logits

    def _commit_prompt(self, turn: LiveTurn, planned: PlannedRows, now: int) -> None:
        session = turn.entry.session
        num_computed = planned.start + planned.num_rows - planned.num_drafts
        turn.num_computed_tokens += num_computed - planned.start
        self.sessions.commit(session, (), num_computed=num_computed)
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
        self.sessions.commit(session, taken, num_computed=length + len(taken) - 1)
        if planned.num_drafts:
            self.sessions.trim(session)
        self._drafting.commit(session)
        self._turns.emit(turn, emitted, sampled_ns)
        if turn.finish is not None:
            self._end(turn)

    def _end(self, turn: LiveTurn) -> None:
        """Cut the ids to what the tip keeps, park, leave the scheduler, report."""
        request, session = turn.request, turn.entry.session
        self._stop_restoring(turn)
        output_ids = self._cut(turn)
        turn.kv = replace(
            turn.kv,
            resident_pages=len(session.page_ids),
            shared_pages=self.sessions.num_shared_pages(session),
        )
        self._drafting.commit(session)
        match request.kind:
            case TurnKind.TYPED_AHEAD:
                assert request.typed_ahead_key is not None
                key, behind = request.typed_ahead_key, request.parent_id
                self._residency.keep_typed(key, session, parent_id=behind)
            case TurnKind.PREPARED:
                assert request.parent_id is not None
                self._starting.copy(self._residency.keep_prepared(request.parent_id, session))
            case _:
                if self._archiving is not None and request.archived:
                    self._archiving.keep(session)
                self._residency.pin(session, request, now_ns=self._clock())
                self._residency.keep_tip(request.response_id, session)
        self._turns.end(turn, output_ids)

    def _cut(self, turn: LiveTurn) -> list[int]:
        """Leave in the session what the answer keeps of its ids; returns these."""
        session, cut = turn.entry.session, turn.cut()
        output_ids = turn.token_ids[: cut.num_kept] + cut.remainder_ids
        if turn.token_ids == output_ids:
            self.sessions.trim(session)
            return output_ids
        num_kept = turn.prompt_length + cut.num_kept
        self._starting.copy(self.sessions.rewind(session, num_kept))
        self.sessions.extend(session, cut.remainder_ids)
        return output_ids

    def _keep_older(self, session: Session) -> None:
        """A turn failed: its session is parked for the older responses that it holds."""
        self._drafting.commit(session)
        self._starting.copy(self._residency.keep_older(session))

    def _relieve(self, starved: Sequence[Entry]) -> bool:
        """Nobody could get a page: the youngest turn gives its own back, and says so."""
        if not starved:
            return False
        if self._give_way():
            return True
        if any(turn.entry.phase is Phase.RESTORING for turn in self._turns):
            return False  # what is on its way back may be all that is missing
        youngest = max(starved, key=lambda entry: entry.arrival)
        turn = self._turns.by_session[youngest.session.session_id]
        free, evictable = self.sessions.num_free, self.sessions.num_evictable
        self._turns.fail(turn, OutOfPages(1, free, evictable, self.sessions.num_pages))
        self._keep_older(turn.entry.session)
        return True

    def _give_way(self) -> bool:
        """End a turn that nobody waits for yet, as cancelled; whether there was one."""
        if (turn := self._turns.least_wanted()) is not None:
            turn.finish = FinishReason.CANCELLED
            self._end(turn)
        return turn is not None

    def _supersede(self, lane_key: str) -> None:
        """End the half-typed turn of a lane, queued or running."""
        self._end_all(lambda r: r.kind is TurnKind.TYPED_AHEAD and r.typed_ahead_key == lane_key)

    def _end_all(self, matches: Callable[[TurnRequest], bool]) -> None:
        """End the turns whose requests match, queued or running, as cancelled."""
        for request in self.admission.take(matches):
            self._turns.refuse(request, FinishReason.CANCELLED)
        for turn in self._turns.matching(matches):
            turn.finish = FinishReason.CANCELLED
            self._end(turn)
