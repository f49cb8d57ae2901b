"""The drafter and its depth control, as a step of the engine uses them.

Knows: live turns, plans, the drafter protocol, depth control. Does not know: how a draft is made,
logits, events.
Invariant: what is drafted, how deep, and by whom decides how fast a turn is, never its text.
Cost: a few microseconds a step for each decoding turn, beside the drafter's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt.depth import Wish
from chatrt.drafter import DraftRequest, TargetPass
from chatrt.scheduler import Phase, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from chatrt.batch import BatchRows
    from chatrt.depth import DepthController
    from chatrt.drafter import Drafter
    from chatrt.engine.live import LiveTurn
    from chatrt.scheduler import Plan, PlannedRows
    from chatrt.session import PageCopy, Session

_NS_PER_MS = 1e6
_STEPS_PER_TIMING = 4  # costs change over seconds, and to note them takes time too


class Drafting:
    """What the engine asks for before a pass of the target, and tells behind it.

    Args:
        drafter: Proposes tokens, or None: then nothing is ever drafted.
        depth: Decides how many for each turn; without it each gets `max_tokens`.
        max_tokens: The most drafts of one turn in one step.
        clock: Nanoseconds, monotonic.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        depth: DepthController | None,
        *,
        max_tokens: int,
        clock: Callable[[], int],
    ) -> None:
        self._drafter = drafter
        self._depth = depth
        self._max_tokens = max_tokens if drafter is not None else 0
        self._clock = clock
        self._sources: dict[int, str] = {}
        self._floors: dict[int, float] = {}
        self._draft_ms = 0.0
        self._pass_ms = 0.0
        self._began_ns = 0
        self._num_steps = 0
        self._is_timed = False

    def limit(self, asked: int | None) -> int:
        """The most drafts for a turn that asks for so many; None leaves it to the settings."""
        return self._max_tokens if asked is None else min(asked, self._max_tokens)

    def begin(self, turns: Iterable[LiveTurn]) -> None:
        """A step begins: decide how many drafts each decoding turn wishes for."""
        if self._drafter is None:
            return
        self._began_ns = self._clock()
        self._num_steps += 1
        self._is_timed = self._depth is not None and self._num_steps % _STEPS_PER_TIMING == 0
        wishes: list[Wish] = []
        decoding: list[LiveTurn] = []
        for turn in turns:
            entry = turn.entry
            if entry.work is Work.DECODE and entry.phase is Phase.RUNNING:
                decoding.append(turn)
                wishes.append(self._wish_of(turn))
        if self._depth is None or not wishes:
            return
        for turn, depth in zip(decoding, self._depth.choose(wishes), strict=True):
            if turn.request.speculation_tokens is None:
                turn.entry.draft_tokens = depth.num_tokens
                self._floors[turn.entry.session.session_id] = depth.floor

    def propose(self, plan: Plan, turns: Mapping[int, LiveTurn]) -> list[list[int]]:
        """Drafts for each entry of the plan, never more than planned."""
        self._draft_ms = 0.0
        if self._drafter is None or not any(planned.num_drafts for planned in plan.rows):
            return [[] for _ in plan.rows]
        started_ns = self._clock()
        if self._drafter.kv is not None:
            sessions = [planned.entry.session for planned in plan.rows]
            self._drafter.kv.land(page_id for one in sessions for page_id in one.page_ids)
        proposals = self._drafter.propose([self._request(one, turns) for one in plan.rows])
        cut = [p[: one.num_drafts] for p, one in zip(proposals, plan.rows, strict=True)]
        self._draft_ms = (self._clock() - started_ns) / _NS_PER_MS
        if self._is_timed:
            self._time_drafts(plan, cut)
        return cut

    def observe(
        self, plan: Plan, rows: Sequence[BatchRows], passes: Sequence[Sequence[int]], part: int
    ) -> Tensor | None:
        """The target is about to compute the rows of `passes[part]`; what its follower reads."""
        if self._drafter is None:
            return None
        chosen = passes[part]
        session_ids = [plan.rows[i].entry.session.session_id for i in chosen]
        observed = TargetPass(session_ids, [rows[i] for i in chosen], part, len(passes))
        return self._drafter.observe(observed)

    def time_pass(self, time_ns: int) -> None:
        """The target took so long for the plan's rows."""
        self._pass_ms = time_ns / _NS_PER_MS

    def end(self, plan: Plan, num_rows: int) -> None:
        """The step is over: what it took besides its drafts is what so many rows cost."""
        if not self._is_timed or self._depth is None:
            return
        if all(p.num_rows == 1 + p.num_drafts for p in plan.rows):  # nobody prefills
            step_ms = (self._clock() - self._began_ns) / _NS_PER_MS
            self._depth.observe_pass(num_rows=num_rows, time_ms=step_ms - self._draft_ms)

    def count(
        self, turn: LiveTurn, num_drafts: int, *, num_accepted: int, num_emitted: int
    ) -> None:
        """A turn's rows were verified: for its figures, and for the depths to come."""
        session_id = turn.entry.session.session_id
        source = self._sources.get(session_id, "") if num_drafts else ""
        if self._depth is not None and num_drafts:
            self._depth.record(session_id, source, num_drafts=num_drafts, num_accepted=num_accepted)
        turn.counter.add(
            num_drafts=num_drafts, num_accepted=num_accepted, num_emitted=num_emitted, source=source
        )
        if len(turn.token_ids) > num_emitted:  # not the pass that ended the prompt
            turn.counter.add_times(draft_ms=self._draft_ms, verify_ms=self._pass_ms)

    def commit(self, session: Session) -> None:
        """The session holds what it holds now, behind a pass and when its turn ends."""
        if self._drafter is not None:
            self._drafter.commit(session.session_id, session.num_computed)

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """Copy the drafter's own keys and values as the target's were."""
        if self._drafter is not None and self._drafter.kv is not None and copies:
            self._drafter.kv.copy_rows(copies)

    def close(self, session_id: int) -> None:
        """The session ended."""
        self._sources.pop(session_id, None)
        self._floors.pop(session_id, None)
        if self._drafter is not None:
            self._drafter.close(session_id)
        if self._depth is not None:
            self._depth.close(session_id)

    def _wish_of(self, turn: LiveTurn) -> Wish:
        """What depth control decides for a turn; one that asked for a fixed depth gets it."""
        assert self._drafter is not None
        session, cap = turn.entry.session, min(turn.max_drafts, turn.entry.room)
        session_id = session.session_id
        source = self._drafter.source(session_id, session.token_ids) if cap else ""
        self._sources[session_id], self._floors[session_id] = source, 0.0
        turn.entry.draft_tokens = cap
        is_fixed = turn.request.speculation_tokens is not None
        return Wish(session_id, source, 0 if is_fixed else cap)

    def _request(self, planned: PlannedRows, turns: Mapping[int, LiveTurn]) -> DraftRequest:
        session = planned.entry.session
        return DraftRequest(
            session_id=session.session_id,
            token_ids=session.token_ids,
            page_ids=session.page_ids,
            max_tokens=planned.num_drafts,
            sampler=turns[session.session_id].sampler,
            floor=self._floors.get(session.session_id, 0.0),
        )

    def _time_drafts(self, plan: Plan, proposals: Sequence[Sequence[int]]) -> None:
        """Tell depth control what the proposals cost, where one source made them all."""
        assert self._depth is not None
        drafted = [
            (self._sources[one.entry.session.session_id], len(proposal))
            for one, proposal in zip(plan.rows, proposals, strict=True)
            if proposal
        ]
        sources = {source for source, _ in drafted}
        if len(sources) == 1:
            self._depth.observe_drafts(
                sources.pop(),
                num_steps=max(num_tokens for _, num_tokens in drafted),
                num_sessions=len(drafted),
                time_ms=self._draft_ms,
            )
