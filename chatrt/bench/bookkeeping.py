"""How long the bookkeeping of one step takes: plan, batch, commit, with a stubbed model.

Knows: scheduler, sessions, the ragged batch's integer tensors.
Does not know: weights, KV tensors, the network.
Source: DESIGN 8.4, at most 100 µs for 1 session; ten times that for 64, by our own choice.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import torch

from chatrt.batch import BatchBuilder
from chatrt.cost_model import ForwardCosts
from chatrt.engine.forward import batch_rows
from chatrt.pages import PageAllocator
from chatrt.prefix import PrefixTree
from chatrt.scheduler import Entry, Phase, Plan, Scheduler, SchedulerLimits, Work
from chatrt.session_manager import SessionManager

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE_SIZE = 16
NUM_HISTORY_TOKENS = 500
NUM_DRAFTS = 4
VOCAB_SIZE = 49_152
_COSTS = ForwardCosts(
    rows=(1, 2, 4, 8, 16, 32, 64),
    rows_ms=(3.5, 3.7, 4.3, 5.8, 10.0, 19.0, 38.0),
    logits_ms=0.1,
    context_ms=0.0006,
    attended_ms=0.0005,
)
BARS_US = {1: 100.0, 64: 1000.0}  # by number of sessions


@dataclass(frozen=True, slots=True)
class BookkeepingFigures:
    """Medians over the steps, in microseconds; `total_us` is of a step's three parts together."""

    plan_us: float
    batch_us: float
    commit_us: float
    total_us: float


class _Bench:
    """Sessions that decode with drafts, without a model."""

    def __init__(self, num_sessions: int, num_steps: int, seed: int) -> None:
        self._random = Random(seed)
        self._proposal = [self._random.randrange(VOCAB_SIZE) for _ in range(NUM_DRAFTS)]
        most_tokens = NUM_HISTORY_TOKENS + num_steps * (NUM_DRAFTS + 1) + 1 + NUM_DRAFTS
        pages_per_session = -(-most_tokens // PAGE_SIZE)
        allocator = PageAllocator(num_sessions * pages_per_session)
        tree = PrefixTree(allocator, PAGE_SIZE)
        self._sessions = SessionManager(allocator, tree, page_size=PAGE_SIZE)
        num_rows = num_sessions * (NUM_DRAFTS + 1)
        limits = SchedulerLimits(num_rows, num_sessions, max_gap_ms=20.0)
        self._scheduler = Scheduler(self._sessions, limits, _COSTS)
        self._batches = BatchBuilder(
            num_rows, num_sessions, pages_per_session, PAGE_SIZE, torch.device("cpu")
        )
        for arrival in range(num_sessions):
            self._scheduler.add(self._decoding_entry(arrival))

    def plan(self, now_ns: int) -> Plan:
        """Who computes what."""
        return self._scheduler.plan(now_ns)

    def batch(self, plan: Plan) -> None:
        """Lay the planned rows out as the engine does."""
        self._batches.build(
            [
                batch_rows(planned, self._proposal[: planned.num_drafts], sample=True)
                for planned in plan.rows
            ]
        )

    def sample(self, plan: Plan) -> list[list[int]]:
        """Stands in for the model: some drafts are accepted, then comes the bonus token."""
        random = self._random
        return [
            [random.randrange(VOCAB_SIZE) for _ in range(1 + random.randint(0, planned.num_drafts))]
            for planned in plan.rows
        ]

    def commit(self, plan: Plan, sampled: list[list[int]]) -> None:
        """Keep the sampled tokens, give back the pages of rejected drafts."""
        for planned, token_ids in zip(plan.rows, sampled, strict=True):
            session = planned.entry.session
            self._sessions.commit(session, token_ids, num_computed=planned.start + len(token_ids))
            self._sessions.trim(session)

    def _decoding_entry(self, arrival: int) -> Entry:
        """A session with its history computed and one sampled token pending."""
        prompt = [self._random.randrange(VOCAB_SIZE) for _ in range(NUM_HISTORY_TOKENS)]
        session = self._sessions.open("", prompt).session
        self._sessions.reserve(session, session.num_pending)
        first = [self._random.randrange(VOCAB_SIZE)]
        self._sessions.commit(session, first, num_computed=NUM_HISTORY_TOKENS)
        return Entry(
            session,
            Work.DECODE,
            Phase.RUNNING,
            priority=0,
            arrival=arrival,
            draft_tokens=NUM_DRAFTS,
            room=NUM_HISTORY_TOKENS,
        )


def measure(
    num_sessions: int,
    num_steps: int,
    *,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    seed: int = 0,
) -> BookkeepingFigures:
    """Decodes `num_sessions` conversations of about 500 tokens for `num_steps` steps, with drafts.

    Each step plans 4 drafts for each session, lays them out as rows, and keeps a random number of
    them.
    """
    bench = _Bench(num_sessions, num_steps, seed)
    parts_ns = []
    for _ in range(num_steps):
        started_ns = clock_ns()
        plan = bench.plan(started_ns)
        planned_ns = clock_ns()
        bench.batch(plan)
        batched_ns = clock_ns()
        sampled = bench.sample(plan)
        sampled_ns = clock_ns()
        bench.commit(plan, sampled)
        committed_ns = clock_ns()
        parts_ns.append(
            (planned_ns - started_ns, batched_ns - planned_ns, committed_ns - sampled_ns)
        )
    plan_us, batch_us, commit_us = (
        statistics.median(part) / 1e3 for part in zip(*parts_ns, strict=True)
    )
    return BookkeepingFigures(
        plan_us=plan_us,
        batch_us=batch_us,
        commit_us=commit_us,
        total_us=statistics.median(sum(parts) for parts in parts_ns) / 1e3,
    )
