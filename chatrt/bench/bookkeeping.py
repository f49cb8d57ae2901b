"""How long the bookkeeping of one step takes: plan, then commit, with a stubbed model.

Knows: scheduler and sessions. Does not know: tensors, models, the network.
Source: DESIGN 8.4, at most 100 µs for 1 session; issue 2, at most 1 ms for 64.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from chatrt.pages import PageAllocator
from chatrt.prefix import PrefixTree
from chatrt.scheduler import (
    Entry,
    LinearCostModel,
    Phase,
    Plan,
    Scheduler,
    SchedulerLimits,
    Work,
)
from chatrt.session import SessionManager

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_SIZE = 16
NUM_HISTORY_TOKENS = 500
NUM_DRAFTS = 4
VOCAB_SIZE = 49_152


@dataclass(frozen=True, slots=True)
class BookkeepingFigures:
    """Medians over the steps, in microseconds; `total_us` is of a step's plan and commit."""

    plan_us: float
    commit_us: float
    total_us: float


def measure(
    num_sessions: int,
    steps: int,
    *,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    seed: int = 0,
) -> BookkeepingFigures:
    """Decodes `num_sessions` conversations of about 500 tokens for `steps` steps, with drafts.

    Each step plans 4 drafts for each session and keeps a random number of them.
    """
    random = Random(seed)
    most_tokens = NUM_HISTORY_TOKENS + steps * (NUM_DRAFTS + 1) + 1 + NUM_DRAFTS
    num_pages = num_sessions * (-(-most_tokens // PAGE_SIZE))
    allocator = PageAllocator(num_pages)
    sessions = SessionManager(allocator, PrefixTree(allocator, PAGE_SIZE), page_size=PAGE_SIZE)
    num_rows = num_sessions * (NUM_DRAFTS + 1)
    limits = SchedulerLimits(num_rows, num_sessions, max_gap_ms=20.0)
    scheduler = Scheduler(sessions, limits, LinearCostModel(2.0, 0.1, 0.1, 0.0001))
    for arrival in range(num_sessions):
        scheduler.add(_decoding_entry(sessions, arrival, random))
    plan_ns, commit_ns = [], []
    for _ in range(steps):
        started_ns = clock_ns()
        plan = scheduler.plan()
        planned_ns = clock_ns()
        sampled = _sample(plan, random)
        sampled_ns = clock_ns()
        for planned, token_ids in zip(plan.rows, sampled, strict=True):
            session = planned.entry.session
            sessions.commit(session, token_ids, num_computed=planned.start + len(token_ids))
            sessions.trim(session)
        plan_ns.append(planned_ns - started_ns)
        commit_ns.append(clock_ns() - sampled_ns)
    total_ns = [plan + commit for plan, commit in zip(plan_ns, commit_ns, strict=True)]
    return BookkeepingFigures(
        plan_us=statistics.median(plan_ns) / 1e3,
        commit_us=statistics.median(commit_ns) / 1e3,
        total_us=statistics.median(total_ns) / 1e3,
    )


def _decoding_entry(sessions: SessionManager, arrival: int, random: Random) -> Entry:
    """A session with its history computed and one sampled token pending."""
    prompt = [random.randrange(VOCAB_SIZE) for _ in range(NUM_HISTORY_TOKENS)]
    session = sessions.open("", prompt).session
    sessions.reserve(session, session.num_pending)
    sessions.commit(session, [random.randrange(VOCAB_SIZE)], num_computed=NUM_HISTORY_TOKENS)
    return Entry(
        session,
        Work.DECODE,
        Phase.RUNNING,
        priority=0,
        arrival=arrival,
        draft_tokens=NUM_DRAFTS,
        room=NUM_HISTORY_TOKENS,
    )


def _sample(plan: Plan, random: Random) -> list[list[int]]:
    """Stands in for the model: a random number of drafts is accepted, then the bonus token."""
    return [
        [random.randrange(VOCAB_SIZE) for _ in range(1 + random.randint(0, planned.num_drafts))]
        for planned in plan.rows
    ]
