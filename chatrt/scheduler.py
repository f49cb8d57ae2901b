"""Who computes what in the next step: decode first, then prefill chunks within the gap budget.

Knows: sessions' counters and page needs, work classes, limits, what a step may take.
Does not know: tensors, drafters, turns, the engine, where the time comes from.
Invariant: a plan never exceeds its limits, and gives each running decode its row before anyone else
gets one. Planning reserves pages and changes nothing else.
Cost: O(entries log entries) a step, 5 µs for one entry that decodes, 200 µs for 64, and 20 µs for
a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

from chatrt.cost_model import StepLoad
from chatrt.errors import InvalidValue, OutOfPages
from chatrt.gap_budget import GapBudget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.cost_model import CostModel
    from chatrt.session import Session
    from chatrt.session_manager import SessionManager


# The prompt that waited longest goes before shorter ones in one of so many steps with chunks, once
# it has waited so long: short prompts that keep coming leave it a quarter of the time.
_AGED_TURNS = 4
_AGED_NS = 1_000_000_000
_NS_PER_MS = 1e6


class Work(IntEnum):
    """What an entry's next rows are for; lower goes first."""

    DECODE = 0  # decode and verify
    PREFILL = 1
    TYPED_AHEAD = 2  # the person is still typing
    IDLE = 3


class Phase(Enum):
    """Whether an entry can be planned."""

    WAITING = "waiting"  # not admitted yet
    RESTORING = "restoring"  # pages are on their way back
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(slots=True, eq=False)
class Entry:
    """A session that has work. The engine changes the fields, the scheduler only reads them.

    A higher `priority` goes first. `arrival` is when it came, in nanoseconds. `draft_tokens` is how
    many drafts are wished for, `room` how many positions are left behind the last token.
    """

    session: Session
    work: Work
    phase: Phase
    priority: int
    arrival: int
    draft_tokens: int = 0
    room: int = 0


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Rows `[start, start + num_rows)` of a session; the last `num_drafts` are for drafts.

    `samples` is true if the rows reach the last token, so that the next one can be sampled.
    """

    entry: Entry
    start: int
    num_rows: int
    num_drafts: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's rows, decodes first, and the entries that could not get a page."""

    rows: tuple[PlannedRows, ...]
    starved: tuple[Entry, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all entries together."""
        return sum(planned.num_rows for planned in self.rows)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one step; `max_gap_ms` is for its time while a stream decodes, None leaves it open.

    Raises:
        InvalidValue: A limit is below 1, or a step has fewer rows than sequences.
    """

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_gap_ms: float | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise InvalidValue(
                f"max_num_seqs is {self.max_num_seqs}, it must be at least 1", param="max_num_seqs"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidValue(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, it must be at least "
                f"max_num_seqs, {self.max_num_seqs}",
                param="max_num_batched_tokens",
            )
        if self.max_gap_ms is not None and not self.max_gap_ms > 0:
            raise InvalidValue(
                f"max_gap_ms is {self.max_gap_ms}, it must be above 0", param="max_gap_ms"
            )


@dataclass(slots=True)
class _Step:
    """What is planned so far, and what is left of the step's limits."""

    rows: list[PlannedRows]
    starved: list[Entry]
    seats_left: int
    rows_left: int
    load: StepLoad


class Scheduler:
    """Keeps the entries that have work and plans one step at a time.

    Args:
        sessions: The pages' bookkeeping.
        limits: Bounds of one step.
        cost_model: What steps take on this machine; what they take in the end corrects it.
    """

    def __init__(
        self, sessions: SessionManager, limits: SchedulerLimits, cost_model: CostModel
    ) -> None:
        self._sessions = sessions
        self._limits = limits
        self._budget = GapBudget(cost_model, limits.max_gap_ms)
        self._entries: dict[int, Entry] = {}
        self._num_chunk_steps = 0
        self._planned: StepLoad | None = None
        self._planned_ns = 0

    def add(self, entry: Entry) -> None:
        """Takes an entry in; its session must have none yet."""
        session_id = entry.session.session_id
        assert session_id not in self._entries, f"session {session_id} is already scheduled"
        self._entries[session_id] = entry

    def remove(self, entry: Entry) -> None:
        """Lets an entry go; its session keeps its pages."""
        del self._entries[entry.session.session_id]

    def pause(self, entry: Entry) -> None:
        """A running entry is left out of plans until `unpause`."""
        assert entry.phase is Phase.RUNNING, f"cannot pause an entry that is {entry.phase.value}"
        entry.phase = Phase.PAUSED

    def unpause(self, entry: Entry) -> None:
        """A paused entry is planned again."""
        assert entry.phase is Phase.PAUSED, f"cannot unpause an entry that is {entry.phase.value}"
        entry.phase = Phase.RUNNING

    def entries(self) -> tuple[Entry, ...]:
        """All entries, in the order in which they were added."""
        return tuple(self._entries.values())

    def plan(self, now_ns: int) -> Plan:
        """Plans the next step and reserves the pages of its rows.

        Only running entries with pending tokens are planned, at most `max_num_seqs` of them. Drafts
        get free pages only: they evict nothing, and come after each decode's own row. Prompts go by
        priority, then the shortest first; see `_by_remaining`. Typed-ahead chunks are planned when
        no prefill chunk is, idle ones when no prompt waits and nobody decodes.

        `now_ns` is on the clock of the entries' arrivals. From a plan with rows to the next plan is
        what that step took: plan on at once, or plan nothing in between.
        """
        self._observe(now_ns)
        by_work: tuple[list[Entry], ...] = ([], [], [], [])
        for entry in sorted(self._entries.values(), key=_rank):
            if entry.phase is Phase.RUNNING and entry.session.num_pending > 0:
                by_work[entry.work].append(entry)
        decoding, prefilling, typed_ahead, idle = by_work
        limits = self._limits
        step = _Step([], [], limits.max_num_seqs, limits.max_num_batched_tokens, StepLoad())
        chunks = prefilling or typed_ahead or idle
        drafting_ms = self._budget.drafting_ms() if prefilling else None
        self._plan_decodes(step, decoding, rows_kept=1 if chunks else 0, limit_ms=drafting_ms)
        if prefilling:
            self._plan_prompts(step, prefilling, now_ns)
        if step.load.prefill_rows == 0:
            self._plan_ahead(step, typed_ahead if decoding or prefilling else typed_ahead + idle)
        if step.rows:
            self._planned, self._planned_ns = step.load, now_ns
        return Plan(tuple(step.rows), tuple(step.starved))

    def drafted(self, plan: Plan, drafts: Sequence[Sequence[int]]) -> None:
        """The drafts that were made for each of the plan's rows: fewer than planned take less."""
        load = self._planned
        if load is None or sum(map(len, drafts)) == sum(one.num_drafts for one in plan.rows):
            return
        made = StepLoad()
        for planned, proposal in zip(plan.rows, drafts, strict=True):
            if planned.entry.work is Work.DECODE:
                made.add_decode(1 + len(proposal), planned.start)
            else:
                made.add_chunk(planned.num_rows, planned.start)
        self._planned = made

    def _observe(self, now_ns: int) -> None:
        """The step of the last plan is over."""
        if self._planned is not None:
            self._budget.observe(self._planned, (now_ns - self._planned_ns) / _NS_PER_MS)
            self._planned = None

    def _plan_decodes(
        self, step: _Step, entries: Sequence[Entry], *, rows_kept: int, limit_ms: float | None
    ) -> None:
        """One row for each, and only then drafts, as many as a step of `limit_ms` has time for.

        `rows_kept` rows are left for a chunk.
        """
        served: list[Entry] = []
        for entry in entries[: step.seats_left]:
            assert entry.session.num_pending == 1, "a decoding session has one pending token"
            try:
                self._sessions.reserve(entry.session, 1)
            except OutOfPages:
                step.starved.append(entry)
            else:
                served.append(entry)
        step.seats_left -= len(served)
        step.rows_left -= len(served)
        drafts_left = step.rows_left - (rows_kept if step.seats_left else 0)
        most = self._most_drafts(served, limit_ms) if step.seats_left else None
        for entry in served:
            session = entry.session
            num_drafts = max(min(entry.draft_tokens, entry.room, drafts_left), 0)
            if most is not None:
                num_drafts = min(num_drafts, most)
            if num_drafts:
                num_drafts = self._reserve_drafts(session, num_drafts)
                drafts_left -= num_drafts
                step.rows_left -= num_drafts
            start = session.num_computed
            step.rows.append(PlannedRows(entry, start, 1 + num_drafts, num_drafts, True))
            step.load.add_decode(1 + num_drafts, start)

    def _most_drafts(self, entries: Sequence[Entry], limit_ms: float | None) -> int | None:
        """How many drafts each may have at most, so that all together keep a limit."""
        if limit_ms is None:
            return None
        fits, too_many = 0, 1 + max((entry.draft_tokens for entry in entries), default=0)
        while too_many - fits > 1:
            middle, load = (fits + too_many) // 2, StepLoad()
            for entry in entries:
                load.add_decode(1 + min(entry.draft_tokens, middle), entry.session.num_computed)
            if self._budget.step_ms(load) <= limit_ms:
                fits = middle
            else:
                too_many = middle
        return fits

    def _reserve_drafts(self, session: Session, num_drafts: int) -> int:
        """Reserves rows for drafts in the session's own and in free pages; returns how many."""
        num_rows = self._rows_within(session, self._sessions.num_free)
        num_drafts = min(num_drafts, num_rows - 1)
        self._sessions.reserve(session, 1 + num_drafts)
        return num_drafts

    def _plan_prompts(self, step: _Step, entries: list[Entry], now_ns: int) -> None:
        """Chunks within the gap budget; at least one row, so that no prompt waits forever."""
        self._num_chunk_steps += 1
        ordered = self._by_remaining(entries, now_ns) if len(entries) > 1 else entries
        limit_ms = self._budget.prompt_ms(step.load, ordered[0].session.num_computed)
        self._plan_chunks(step, ordered, limit_ms, at_least=1)

    def _plan_ahead(self, step: _Step, entries: Sequence[Entry]) -> None:
        """Chunks that nobody waits for yet: beside streams there may be no time for any."""
        if entries:
            limit_ms = self._budget.ahead_ms(step.load, entries[0].session.num_computed)
            self._plan_chunks(step, entries, limit_ms, at_least=0)

    def _by_remaining(self, entries: Sequence[Entry], now_ns: int) -> list[Entry]:
        """By priority; among equals what is done soonest goes first, now and then the oldest."""

        def rank(entry: Entry) -> tuple[int, float, int]:
            session = entry.session
            remaining_ms = self._budget.remaining_ms(session.num_pending, session.num_computed)
            return (-entry.priority, remaining_ms, entry.arrival)

        ordered = sorted(entries, key=rank)
        if self._num_chunk_steps % _AGED_TURNS == 0:
            # Entries come by priority, then arrival: the first is the oldest of the most urgent.
            oldest = entries[0]
            if now_ns - oldest.arrival >= _AGED_NS:
                ordered.remove(oldest)
                ordered.insert(0, oldest)
        return ordered

    def _plan_chunks(
        self, step: _Step, entries: Sequence[Entry], limit_ms: float | None, *, at_least: int
    ) -> None:
        """A chunk for each entry in turn, as long as rows, seats and the limit last.

        The step's first chunk has `at_least` so many rows.
        """
        sessions = self._sessions
        for entry in entries:
            if step.seats_left == 0 or step.rows_left == 0:
                return
            session, start = entry.session, entry.session.num_computed
            most = min(session.num_pending, step.rows_left)
            wanted = self._budget.rows_within(step.load, start, most, limit_ms)
            if not step.load.prefill_rows:
                wanted = max(wanted, at_least)
            if wanted == 0:
                return
            num_pages = sessions.num_free + sessions.num_evictable
            num_rows = min(wanted, self._rows_within(session, num_pages))
            if num_rows == 0:
                step.starved.append(entry)
                continue
            sessions.reserve(session, num_rows)
            samples = num_rows == session.num_pending
            step.rows.append(PlannedRows(entry, start, num_rows, 0, samples))
            step.seats_left -= 1
            step.rows_left -= num_rows
            step.load.add_chunk(num_rows, start)

    def _rows_within(self, session: Session, num_pages: int) -> int:
        """Rows that fit behind the computed ones with `num_pages` pages more."""
        num_slots = (len(session.page_ids) + num_pages) * self._sessions.page_size
        return num_slots - session.num_computed


def _rank(entry: Entry) -> tuple[int, int]:
    return (-entry.priority, entry.arrival)
