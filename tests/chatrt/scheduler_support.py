"""Sessions that decode or prefill over pages of 4 tokens, and a scheduler that plans them."""

from __future__ import annotations

from chatrt.cost_model import CostModel, LinearCostModel, StepLoad
from chatrt.pages import PageAllocator
from chatrt.prefix import PrefixTree
from chatrt.scheduler import Entry, Phase, Plan, Scheduler, SchedulerLimits, Work
from chatrt.session_manager import SessionManager

PAGE_SIZE = 4
ROW_MS = LinearCostModel(fixed_ms=0.0, decode_row_ms=1.0, prefill_row_ms=1.0)
STEP_MS = LinearCostModel(fixed_ms=8.0, decode_row_ms=1.0, prefill_row_ms=1.0)
MARGIN = 1.2  # of a stream's budget, before there is experience


class World:
    """A scheduler over sessions that never share anything."""

    def __init__(
        self,
        limits: SchedulerLimits | None = None,
        num_pages: int = 256,
        cost_model: CostModel = ROW_MS,
    ) -> None:
        allocator = PageAllocator(num_pages)
        tree = PrefixTree(allocator, PAGE_SIZE)
        self.sessions = SessionManager(allocator, tree, page_size=PAGE_SIZE)
        self.scheduler = Scheduler(self.sessions, limits or SchedulerLimits(), cost_model)
        self.num_added = 0
        self.now_ns = 0
        self._cost_model = cost_model

    def plan(self) -> Plan:
        """The next plan; the step of the one before took as long as the cost model says."""
        plan = self.scheduler.plan(self.now_ns)
        self.now_ns += round(self._cost_model.step_ms(load_of(plan)) * 1e6)
        return plan

    def add(
        self,
        work: Work,
        num_tokens: int,
        *,
        priority: int = 0,
        phase: Phase = Phase.RUNNING,
        drafts: int = 0,
        room: int = 100,
    ) -> Entry:
        """An entry with `num_tokens` tokens, all but one of them computed if it decodes."""
        self.num_added += 1
        session = self.sessions.open(str(self.num_added), [1] * num_tokens).session
        if work is Work.DECODE:
            self.sessions.reserve(session, num_tokens - 1)
            self.sessions.commit(session, [], num_computed=num_tokens - 1)
        entry = Entry(session, work, phase, priority, self.num_added, drafts, room)
        self.scheduler.add(entry)
        return entry

    def fill(self) -> None:
        """Takes every free page."""
        session = self.sessions.open("filler", [1]).session
        self.sessions.reserve(session, self.sessions.num_free * PAGE_SIZE)

    def run(self, plan: Plan) -> None:
        """Commits a plan as if every draft were rejected."""
        for planned in plan.rows:
            end = planned.start + planned.num_rows - planned.num_drafts
            sampled = [1] if planned.samples else []
            self.sessions.commit(planned.entry.session, sampled, num_computed=end)
            self.sessions.trim(planned.entry.session)
            if planned.samples:
                planned.entry.work = Work.DECODE


def load_of(plan: Plan) -> StepLoad:
    load = StepLoad()
    for planned in plan.rows:
        add = load.add_decode if planned.entry.work is Work.DECODE else load.add_chunk
        add(planned.num_rows, planned.start)
    return load


def entries_of(plan: Plan) -> list[Entry]:
    return [planned.entry for planned in plan.rows]
