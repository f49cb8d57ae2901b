"""Tests of chatrt.scheduler. Pages of 4 tokens; a fake cost model of 1 ms a row."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatrt.errors import InvalidValue
from chatrt.scheduler import Entry, Phase, Plan, SchedulerLimits, Work
from tests.chatrt.scheduler_support import (
    PAGE_SIZE,
    World,
    entries_of,
)


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
