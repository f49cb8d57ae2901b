"""Tests of chatrt.scheduler. Pages of 4 tokens; a fake cost model of 1 ms a row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatrt.cost_model import CostModel, LinearCostModel, StepLoad
from chatrt.errors import InvalidValue
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


def test_decodes_come_first_and_get_their_row_and_their_drafts() -> None:
    world = World()
    prefill = world.add(Work.PREFILL, 10)
    decode = world.add(Work.DECODE, 5, drafts=3)
    plan = world.plan()
    assert entries_of(plan) == [decode, prefill]
    first, second = plan.rows
    assert (first.start, first.num_rows, first.num_drafts, first.samples) == (4, 4, 3, True)
    assert (second.start, second.num_rows, second.num_drafts, second.samples) == (0, 10, 0, True)
    assert plan.num_rows == 14


def test_a_long_prompt_is_cut_into_contiguous_chunks_of_which_the_last_samples() -> None:
    world = World(SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4))
    world.add(Work.PREFILL, 19)
    seen = []
    for _ in range(3):
        plan = world.plan()
        seen += [(p.start, p.num_rows, p.samples) for p in plan.rows]
        world.run(plan)
    assert seen == [(0, 8, False), (8, 8, False), (16, 3, True)]


def test_higher_priority_goes_first_then_earlier_arrival() -> None:
    world = World()
    late, later, urgent = (world.add(Work.PREFILL, 4, priority=n) for n in (0, 0, 1))
    assert entries_of(world.plan()) == [urgent, late, later]


@pytest.mark.parametrize("work", [Work.TYPED_AHEAD, Work.IDLE])
def test_typed_ahead_and_idle_rows_wait_for_prefill(work: Work) -> None:
    world = World(cost_model=STEP_MS)
    world.add(work, 4)
    prefill = world.add(Work.PREFILL, 4)
    plan = world.plan()
    assert entries_of(plan) == [prefill]
    world.run(plan)
    world.scheduler.remove(prefill)
    assert [p.entry.work for p in world.plan().rows] == [work]


def test_typed_ahead_makes_a_step_a_quarter_longer_at_most() -> None:
    world = World(cost_model=STEP_MS)
    world.add(Work.DECODE, 5)
    world.add(Work.TYPED_AHEAD, 100)
    assert [p.num_rows for p in world.plan().rows] == [1, 2]  # 9 ms may become 11.25 ms


def test_typed_ahead_waits_where_one_row_would_be_felt() -> None:
    world = World()
    world.add(Work.DECODE, 5)
    world.add(Work.TYPED_AHEAD, 100)
    assert [p.num_rows for p in world.plan().rows] == [1]


def test_typed_ahead_beside_a_stream_keeps_the_gap_budget_too() -> None:
    world = World(SchedulerLimits(max_gap_ms=9.0 * MARGIN), cost_model=STEP_MS)
    world.add(Work.DECODE, 5)
    world.add(Work.TYPED_AHEAD, 100)
    assert [p.num_rows for p in world.plan().rows] == [1]


@pytest.mark.parametrize("work", [Work.TYPED_AHEAD, Work.IDLE])
def test_an_enter_waits_ten_milliseconds_at_most_for_work_ahead_of_it(work: Work) -> None:
    world = World()
    world.add(work, 100)
    assert [p.num_rows for p in world.plan().rows] == [10]


def test_work_ahead_goes_on_where_a_single_row_takes_longer_than_that() -> None:
    world = World(cost_model=LinearCostModel(20.0, 1.0, 1.0))
    world.add(Work.TYPED_AHEAD, 100)
    assert [p.num_rows for p in world.plan().rows] == [11]  # 21 ms may become 31.5 ms


def test_idle_rows_wait_while_anybody_decodes() -> None:
    world = World(cost_model=STEP_MS)
    decode = world.add(Work.DECODE, 5)
    idle = world.add(Work.IDLE, 4)
    assert entries_of(world.plan()) == [decode]
    world.scheduler.pause(decode)
    assert entries_of(world.plan()) == [idle]


def test_idle_rows_take_no_page_while_a_prompt_waits_for_one() -> None:
    world = World()
    prefill = world.add(Work.PREFILL, 4)
    idle = world.add(Work.IDLE, 8)
    world.sessions.reserve(idle.session, 8)
    world.fill()
    assert world.plan() == Plan((), (prefill,))


def test_typed_ahead_goes_before_idle() -> None:
    world = World()
    idle = world.add(Work.IDLE, 4)
    typed = world.add(Work.TYPED_AHEAD, 4)
    assert entries_of(world.plan()) == [typed, idle]


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.RESTORING, Phase.PAUSED])
def test_only_running_entries_are_planned(phase: Phase) -> None:
    world = World()
    world.add(Work.PREFILL, 4, phase=phase)
    assert world.plan() == Plan((), ())


def test_a_paused_entry_is_left_out_until_it_is_unpaused() -> None:
    world = World()
    entry = world.add(Work.DECODE, 4)
    world.scheduler.pause(entry)
    assert world.plan().rows == ()
    world.scheduler.unpause(entry)
    assert entries_of(world.plan()) == [entry]


def test_a_removed_entry_is_gone_and_the_others_stay() -> None:
    world = World()
    first, second = world.add(Work.PREFILL, 4), world.add(Work.PREFILL, 4)
    world.scheduler.remove(first)
    assert world.scheduler.entries() == (second,)


def test_an_entry_with_nothing_pending_is_not_planned() -> None:
    world = World()
    entry = world.add(Work.IDLE, 4)
    world.sessions.reserve(entry.session, 4)
    world.sessions.commit(entry.session, [], num_computed=4)
    assert world.plan().rows == ()


def test_drafts_stay_within_the_room_that_is_left() -> None:
    world = World()
    world.add(Work.DECODE, 4, drafts=8, room=2)
    assert world.plan().rows[0].num_drafts == 2


def test_drafts_use_free_pages_only_and_evict_nothing() -> None:
    world = World(num_pages=3)
    cached = world.sessions.open("cached", [1] * 5).session
    world.sessions.reserve(cached, 4)
    world.sessions.commit(cached, [], num_computed=4)
    world.sessions.close(cached)
    world.add(Work.DECODE, 3, drafts=8)
    plan = world.plan()
    assert plan.rows[0].num_drafts == 5  # two pages, of which the first holds two rows already
    assert world.sessions.num_evictable == 1


def test_drafts_of_all_decodes_together_stay_within_the_rows_of_a_step() -> None:
    world = World(SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4))
    for _ in range(3):
        world.add(Work.DECODE, 5, drafts=4)
    assert [p.num_drafts for p in world.plan().rows] == [4, 1, 0]


def test_a_draft_never_takes_the_page_that_another_decode_needs() -> None:
    world = World(num_pages=3)
    greedy = world.add(Work.DECODE, 4, drafts=8)
    needy = world.add(Work.DECODE, 5)
    plan = world.plan()
    assert plan.starved == ()
    assert [(p.entry, p.num_drafts) for p in plan.rows] == [(greedy, 0), (needy, 0)]


def test_who_gets_no_page_is_starved_and_the_others_go_on() -> None:
    world = World()
    starved = [world.add(Work.DECODE, 5), world.add(Work.PREFILL, 4)]
    served = world.add(Work.DECODE, 4)
    world.fill()
    plan = world.plan()
    assert entries_of(plan) == [served]
    assert list(plan.starved) == starved
    assert len(world.scheduler.entries()) == 3


def test_a_chunk_shrinks_to_the_pages_that_can_be_had() -> None:
    world = World(num_pages=2)
    world.add(Work.PREFILL, 20)
    (planned,) = world.plan().rows
    assert (planned.num_rows, planned.samples) == (8, False)


def test_a_chunk_keeps_the_step_within_the_gap_budget_while_a_stream_decodes() -> None:
    world = World(SchedulerLimits(max_gap_ms=6.0 * MARGIN))
    world.add(Work.PREFILL, 100)
    assert world.plan().num_rows == 50
    world.add(Work.DECODE, 5)
    assert [p.num_rows for p in world.plan().rows] == [1, 5]


def test_the_gap_budget_counts_the_context_that_is_attended_to() -> None:
    cost_model = LinearCostModel(0.0, 1.0, 1.0, context_ms=0.5)
    world = World(SchedulerLimits(max_gap_ms=10.0 * MARGIN), cost_model=cost_model)
    world.add(Work.DECODE, 9)
    world.add(Work.PREFILL, 100)
    plan = world.plan()
    assert [p.num_rows for p in plan.rows] == [1, 5]  # 8 positions: 4 ms, 6 rows: 6 ms
    world.run(plan)
    assert [p.num_rows for p in world.plan().rows] == [1, 2]  # 9 + 5 positions


def test_one_prefill_row_goes_through_even_when_the_gap_budget_is_spent() -> None:
    world = World(SchedulerLimits(max_gap_ms=1.0))
    world.add(Work.DECODE, 5)
    world.add(Work.PREFILL, 100)
    world.add(Work.PREFILL, 100)
    assert [p.num_rows for p in world.plan().rows] == [1, 1]


def test_a_prompt_is_not_starved_by_decodes_that_use_the_budget_up_alone() -> None:
    world = World(SchedulerLimits(max_gap_ms=1.0))
    for _ in range(20):
        world.add(Work.DECODE, 5)
    world.add(Work.PREFILL, 100)
    assert world.plan().rows[-1].num_rows == 10  # 20 ms may become 30 ms


def test_nobody_who_arrives_waits_for_more_than_fifty_milliseconds_of_a_prompt() -> None:
    world = World()
    long = world.add(Work.PREFILL, 400)
    assert [p.num_rows for p in world.plan().rows] == [50]
    short = world.add(Work.PREFILL, 5)
    assert [(p.entry, p.num_rows) for p in world.plan().rows] == [(short, 5), (long, 45)]


def test_a_prompt_alone_gets_chunks_as_long_as_its_rows_are_cheap() -> None:
    world = World(cost_model=LinearCostModel(40.0, 1.0, 1.0))
    world.add(Work.PREFILL, 500)
    assert [p.num_rows for p in world.plan().rows] == [370]  # ten times 41 ms


def test_drafts_beside_a_waiting_prompt_leave_it_three_fifths_of_the_budget() -> None:
    world = World(SchedulerLimits(max_gap_ms=20.0 * MARGIN))
    world.add(Work.DECODE, 5, drafts=1)
    world.add(Work.DECODE, 5, drafts=8)
    assert [p.num_rows for p in world.plan().rows] == [2, 9]
    world.add(Work.PREFILL, 100)
    assert [p.num_rows for p in world.plan().rows] == [2, 6, 12]


def test_streams_get_their_row_beside_a_prompt_however_many_they_are() -> None:
    world = World(SchedulerLimits(max_gap_ms=20.0 * MARGIN))
    for _ in range(10):
        world.add(Work.DECODE, 5, drafts=8)
    world.add(Work.PREFILL, 100)
    assert [p.num_rows for p in world.plan().rows] == [1] * 10 + [10]


def test_the_prompt_that_is_done_soonest_goes_first() -> None:
    world = World(SchedulerLimits(max_num_batched_tokens=12, max_num_seqs=4))
    long = world.add(Work.PREFILL, 40)
    short = world.add(Work.PREFILL, 10)
    assert [(p.entry, p.num_rows) for p in world.plan().rows] == [(short, 10), (long, 2)]


def test_an_old_prompt_goes_first_in_one_of_four_steps() -> None:
    world = World(SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4))
    old = world.add(Work.PREFILL, 100)
    world.now_ns = 2_000_000_000
    firsts = []
    for _ in range(40):
        world.add(Work.PREFILL, 20)
        plan = world.plan()
        firsts.append(plan.rows[0].entry is old)
        world.run(plan)
        for entry in world.scheduler.entries():
            if entry.work is Work.DECODE:
                world.scheduler.remove(entry)
    assert firsts == [False, False, False, True] * 10


def test_age_counts_among_prompts_of_equal_priority_only() -> None:
    world = World(SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4))
    world.add(Work.PREFILL, 100)
    urgent = world.add(Work.PREFILL, 200, priority=1)
    world.now_ns = 2_000_000_000
    for _ in range(8):
        plan = world.plan()
        assert entries_of(plan) == [urgent]
        world.run(plan)


def test_steps_that_take_longer_than_predicted_make_the_next_chunks_shorter() -> None:
    world = World(SchedulerLimits(max_gap_ms=20.0 * MARGIN))
    world.add(Work.DECODE, 5)
    world.add(Work.PREFILL, 900)
    sizes = []
    for _ in range(8):
        plan = world.scheduler.plan(world.now_ns)
        world.now_ns += 2_000_000 * plan.num_rows
        sizes.append(plan.num_rows)
        world.run(plan)
    assert sizes[0] == 20
    assert sizes[-1] in (9, 10)


def test_drafts_that_were_not_made_do_not_count_as_a_faster_machine() -> None:
    world = World(SchedulerLimits(max_gap_ms=20.0 * MARGIN))
    world.add(Work.DECODE, 5, drafts=9)
    for _ in range(20):
        plan = world.scheduler.plan(world.now_ns)
        world.scheduler.drafted(plan, [[7]])
        world.now_ns += 2_000_000
        world.run(plan)
    world.add(Work.PREFILL, 100)
    assert world.scheduler.plan(world.now_ns).num_rows == 20


def test_drafts_leave_a_row_for_a_waiting_prompt() -> None:
    world = World(SchedulerLimits(max_num_batched_tokens=4, max_num_seqs=2))
    world.add(Work.DECODE, 5, drafts=8)
    world.add(Work.PREFILL, 100)
    assert [p.num_rows for p in world.plan().rows] == [3, 1]


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ((0, 0, None), "max_num_seqs"),
        ((8, 9, None), "max_num_batched_tokens"),
        ((8, 8, 0.0), "max_gap_ms"),
    ],
)
def test_limits_out_of_range_are_refused_by_name(
    limits: tuple[int, int, float | None], name: str
) -> None:
    with pytest.raises(InvalidValue, match=name) as caught:
        SchedulerLimits(*limits)
    assert caught.value.param == name


@dataclass(frozen=True)
class Wanted:
    """One random entry."""

    work: Work
    phase: Phase
    num_tokens: int
    priority: int
    drafts: int
    room: int


wanted_entries = st.lists(
    st.builds(
        Wanted,
        st.sampled_from([*Work, Work.DECODE]),
        st.sampled_from([*Phase, Phase.RUNNING, Phase.RUNNING]),
        st.integers(1, 30),
        st.integers(0, 2),
        st.integers(0, 6),
        st.integers(0, 6),
    ),
    max_size=10,
)


@settings(max_examples=200, deadline=None)
@given(
    wanted=wanted_entries,
    num_seqs=st.integers(1, 8),
    spare_rows=st.integers(0, 30),
    max_gap_ms=st.none() | st.floats(0.5, 30.0),
    spare_pages=st.integers(0, 40),
)
def test_every_plan_keeps_the_limits_and_the_order(
    wanted: list[Wanted],
    num_seqs: int,
    spare_rows: int,
    max_gap_ms: float | None,
    spare_pages: int,
) -> None:
    limits = SchedulerLimits(num_seqs + spare_rows, num_seqs, max_gap_ms)
    num_held = sum(-(-(w.num_tokens - 1) // PAGE_SIZE) for w in wanted if w.work is Work.DECODE)
    world = World(limits, num_held + spare_pages)
    entries = [
        world.add(
            w.work, w.num_tokens, priority=w.priority, phase=w.phase, drafts=w.drafts, room=w.room
        )
        for w in wanted
    ]
    for _ in range(4):
        plan = world.plan()
        check_plan(plan, entries, limits)
        assert list(world.scheduler.entries()) == entries
        world.sessions.check_invariants()
        world.run(plan)


def check_plan(plan: Plan, entries: list[Entry], limits: SchedulerLimits) -> None:
    decodes = [p for p in plan.rows if p.entry.work is Work.DECODE]
    chunks = plan.rows[len(decodes) :]
    assert plan.num_rows <= limits.max_num_batched_tokens
    assert len(plan.rows) <= limits.max_num_seqs
    assert list(plan.rows[: len(decodes)]) == decodes
    planned = {id(p.entry) for p in plan.rows}
    starved = {id(entry) for entry in plan.starved}
    assert len(planned) == len(plan.rows)
    assert not planned & starved
    decoding = [e for e in entries if e.phase is Phase.RUNNING and e.work is Work.DECODE]
    decoding.sort(key=lambda entry: (-entry.priority, entry.arrival))
    for entry in decoding[: limits.max_num_seqs]:
        assert id(entry) in planned | starved
    for p in plan.rows:
        session = p.entry.session
        assert p.entry.phase is Phase.RUNNING
        assert p.start == session.num_computed
        assert p.start + p.num_rows <= len(session.page_ids) * PAGE_SIZE
        assert p.samples == (p.start + p.num_rows - p.num_drafts == len(session.token_ids))
    for p in decodes:
        assert p.num_rows == 1 + p.num_drafts
        assert p.num_drafts <= min(p.entry.draft_tokens, p.entry.room)
    works = {p.entry.work for p in chunks}
    if Work.PREFILL in works:
        assert works == {Work.PREFILL}
    asks = {e.work for e in entries if e.phase is Phase.RUNNING and e.session.num_pending}
    if asks & {Work.DECODE, Work.PREFILL}:
        assert Work.IDLE not in works
    num_chunk_rows = sum(p.num_rows for p in chunks)
    num_decode_rows = plan.num_rows - num_chunk_rows
    if works & {Work.TYPED_AHEAD, Work.IDLE}:
        assert plan.num_rows <= (1.25 * num_decode_rows if decodes else 10)
    elif not decodes:
        assert num_chunk_rows <= 50
    elif limits.max_gap_ms is not None and num_chunk_rows > 1:
        assert plan.num_rows <= max(limits.max_gap_ms, 1.5 * num_decode_rows)
