"""How long a step may take, and who gets its rows: beside streams, alone, and ahead of an Enter."""

from __future__ import annotations

import pytest

from chatrt.cost_model import LinearCostModel
from chatrt.scheduler import Plan, SchedulerLimits, Work
from tests.chatrt.scheduler_support import (
    MARGIN,
    STEP_MS,
    World,
    entries_of,
)


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
