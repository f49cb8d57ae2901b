"""Who computes what in the next step: decode first, then prefill chunks within the gap budget.

Knows: sessions' counters and page needs, work classes, limits, a cost model.
Does not know: tensors, drafters, turns, the engine.
Invariant: a plan never exceeds its limits, and gives each running decode its row before anyone else
gets one. Planning reserves pages and changes nothing else.
Cost: O(entries log entries) a step, tens of microseconds for 64 entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Protocol

from chatrt.errors import InvalidValue, OutOfPages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.session import Session, SessionManager


# A step with a prefill chunk may always take this many times as long as its decodes alone.
_LEAST_STRETCH = 1.5


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

    A higher `priority` goes first, then a lower `arrival`. `draft_tokens` is how many drafts are
    wished for, `room` how many positions are left behind the last token.
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


class CostModel(Protocol):
    """Predicts how long a step takes."""

    def step_ms(self, *, decode_rows: int, prefill_rows: int, context: int) -> float:
        """Milliseconds of a step; must not fall when any of the three grows.

        `context` is the number of positions computed so far of all planned sessions together.
        """
        ...


@dataclass(frozen=True, slots=True)
class LinearCostModel:
    """A fixed cost for each step, and one for each row and each position of context."""

    fixed_ms: float
    decode_row_ms: float
    prefill_row_ms: float
    context_ms: float = 0.0

    def step_ms(self, *, decode_rows: int, prefill_rows: int, context: int) -> float:
        """Milliseconds of a step."""
        return (
            self.fixed_ms
            + self.decode_row_ms * decode_rows
            + self.prefill_row_ms * prefill_rows
            + self.context_ms * context
        )

    def describe(self) -> str:
        """The coefficients, in words."""
        return (
            f"{self.fixed_ms:.1f} ms, {self.decode_row_ms:.2f} ms for each decoded row, "
            f"{self.prefill_row_ms:.2f} ms for each prefilled one, "
            f"{self.context_ms * 1000:.2f} ms for 1,000 positions of context"
        )


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one step. `max_gap_ms` bounds it while a stream decodes; None leaves it open.

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
    decode_rows: int = 0
    prefill_rows: int = 0
    context: int = 0


class Scheduler:
    """Keeps the entries that have work and plans one step at a time."""

    def __init__(
        self, sessions: SessionManager, limits: SchedulerLimits, cost_model: CostModel
    ) -> None:
        self._sessions = sessions
        self._limits = limits
        self._cost_model = cost_model
        self._entries: dict[int, Entry] = {}

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

    def plan(self) -> Plan:
        """Plans the next step and reserves the pages of its rows.

        Only running entries with pending tokens are planned, at most `max_num_seqs` of them. Drafts
        get free pages only: they evict nothing, and come after each decode's own row. Typed-ahead
        and idle chunks are planned when no prefill chunk is.
        """
        by_work: tuple[list[Entry], ...] = ([], [], [], [])
        for entry in sorted(self._entries.values(), key=_rank):
            if entry.phase is Phase.RUNNING and entry.session.num_pending > 0:
                by_work[entry.work].append(entry)
        decoding, prefilling, typed_ahead, idle = by_work
        step = _Step([], [], self._limits.max_num_seqs, self._limits.max_num_batched_tokens)
        chunks = prefilling or typed_ahead or idle
        self._plan_decodes(step, decoding, rows_kept=1 if chunks else 0)
        self._plan_chunks(step, prefilling)
        if step.prefill_rows == 0:
            self._plan_chunks(step, typed_ahead)
            self._plan_chunks(step, idle)
        return Plan(tuple(step.rows), tuple(step.starved))

    def _plan_decodes(self, step: _Step, entries: Sequence[Entry], *, rows_kept: int) -> None:
        """One row for each, and only then drafts; `rows_kept` rows are left for a chunk."""
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
        for entry in served:
            session = entry.session
            num_drafts = max(min(entry.draft_tokens, entry.room, drafts_left), 0)
            if num_drafts:
                num_drafts = self._reserve_drafts(session, num_drafts)
                drafts_left -= num_drafts
                step.rows_left -= num_drafts
            step.rows.append(
                PlannedRows(entry, session.num_computed, 1 + num_drafts, num_drafts, True)
            )
            step.decode_rows += 1 + num_drafts
            step.context += session.num_computed

    def _reserve_drafts(self, session: Session, num_drafts: int) -> int:
        """Reserves rows for drafts in the session's own and in free pages; returns how many."""
        num_rows = self._rows_within(session, self._sessions.num_free)
        num_drafts = min(num_drafts, num_rows - 1)
        self._sessions.reserve(session, 1 + num_drafts)
        return num_drafts

    def _plan_chunks(self, step: _Step, entries: Sequence[Entry]) -> None:
        """A chunk for each entry in turn, as long as rows, seats and the gap budget last."""
        for entry in entries:
            if step.seats_left == 0 or step.rows_left == 0:
                return
            session = entry.session
            wanted = self._rows_in_gap(step, session, min(session.num_pending, step.rows_left))
            if wanted == 0:
                return
            sessions = self._sessions
            num_pages = sessions.num_free + sessions.num_evictable
            num_rows = min(wanted, self._rows_within(session, num_pages))
            if num_rows == 0:
                step.starved.append(entry)
                continue
            sessions.reserve(session, num_rows)
            start = session.num_computed
            samples = num_rows == session.num_pending
            step.rows.append(PlannedRows(entry, start, num_rows, 0, samples))
            step.seats_left -= 1
            step.rows_left -= num_rows
            step.prefill_rows += num_rows
            step.context += start

    def _rows_in_gap(self, step: _Step, session: Session, most: int) -> int:
        """The longest chunk, up to `most` rows, that keeps the step within the gap budget.

        The step's first chunk has at least one row, so that no prompt waits forever. Where the
        decodes alone (nearly) use the budget up, a chunk may still make the step half as long
        again: one row a step would keep a prompt waiting for minutes and help no stream.
        """
        max_gap_ms = self._limits.max_gap_ms
        if max_gap_ms is None or step.decode_rows == 0:
            return most
        context = step.context + session.num_computed
        decode_ms = self._cost_model.step_ms(
            decode_rows=step.decode_rows, prefill_rows=0, context=step.context
        )
        budget_ms = max(max_gap_ms, _LEAST_STRETCH * decode_ms)
        fits, too_many = (0 if step.prefill_rows else 1), most + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            step_ms = self._cost_model.step_ms(
                decode_rows=step.decode_rows,
                prefill_rows=step.prefill_rows + middle,
                context=context,
            )
            if step_ms <= budget_ms:
                fits = middle
            else:
                too_many = middle
        return fits

    def _rows_within(self, session: Session, num_pages: int) -> int:
        """Rows that fit behind the computed ones with `num_pages` pages more."""
        num_slots = (len(session.page_ids) + num_pages) * self._sessions.page_size
        return num_slots - session.num_computed


def _rank(entry: Entry) -> tuple[int, int]:
    return (-entry.priority, entry.arrival)
