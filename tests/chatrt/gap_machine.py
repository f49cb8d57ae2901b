"""A machine that only takes time: uneven, noisy, now and then half as fast; and a scheduler on it.

The scheduler believes in costs that are a fifth too low and of another shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from chatrt.cost_model import ForwardCosts, StepLoad
from chatrt.pages import PageAllocator
from chatrt.prefix import PrefixTree
from chatrt.scheduler import Entry, Phase, Plan, Scheduler, SchedulerLimits, Work
from chatrt.session_manager import SessionManager

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAGE_SIZE = 16
NUM_PAGES = 4096
NUM_DRAFTS = 4
STREAM_TOKENS = range(300, 1500)  # where a stream starts, and where the next one takes its place
BELIEVED = ForwardCosts(
    rows=(1, 2, 4, 8, 16, 32, 64),
    rows_ms=(2.8, 2.9, 3.2, 4.4, 8.2, 15.5, 30.0),
    logits_ms=0.05,
    context_ms=0.0005,
    attended_ms=0.00036,
)


@dataclass
class Machine:
    """`is_slow` says for a time in milliseconds whether everything takes twice as long."""

    seed: int
    noise: float = 0.05
    hiccup_chance: float = 0.002
    is_slow: Callable[[float], bool] = lambda _now_ms: False
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def step_ms(self, load: StepLoad, now_ms: float) -> float:
        """What such a step takes now; never the same twice."""
        rows = load.decode_rows + load.prefill_rows
        plain_ms = (
            3.4
            + 0.1 * rows
            + 0.47 * max(rows - 4, 0)
            + 0.12 * load.decode_rows
            + 0.0006 * load.context
            + 0.00045 * load.attended
            + 0.3 * (1 + (load.decode_rows > 2))
        )
        chance = self._random
        time_ms = plain_ms * chance.lognormvariate(0.0, self.noise)
        if chance.random() < self.hiccup_chance:
            time_ms += chance.uniform(3.0, 15.0)
        return time_ms * (2 if self.is_slow(now_ms) else 1)


@dataclass
class Prompt:
    """A prompt that came, and when it was done; in milliseconds."""

    entry: Entry
    num_tokens: int
    came_ms: float
    done_ms: float = 0.0

    @property
    def took_ms(self) -> float:
        """From its arrival to its first token."""
        assert self.done_ms, "the prompt is not done"
        return self.done_ms - self.came_ms


class Simulation:
    """Streams that decode with drafts, and prompts that come."""

    def __init__(self, machine: Machine, *, max_gap_ms: float | None, num_streams: int) -> None:
        tree = PrefixTree(allocator := PageAllocator(NUM_PAGES), PAGE_SIZE)
        self.sessions = SessionManager(allocator, tree, page_size=PAGE_SIZE)
        limits = SchedulerLimits(max_gap_ms=max_gap_ms)
        self.scheduler = Scheduler(self.sessions, limits, BELIEVED)
        self.now_ms = 0.0
        self.prompts: list[Prompt] = []
        self.quiet_ms: list[float] = []
        self.busy_ms: list[float] = []
        self._machine = machine
        self._random = Random(machine.seed + 1)
        self._waiting: dict[int, Prompt] = {}
        self._num_opened = 0
        for _ in range(num_streams):
            self._open_stream()

    def ask(self, num_tokens: int) -> Prompt:
        """A prompt comes now."""
        entry = self._open(num_tokens, Work.PREFILL)
        prompt = Prompt(entry, num_tokens, self.now_ms)
        self.prompts.append(prompt)
        self._waiting[entry.session.session_id] = prompt
        return prompt

    def run_until_done(self, prompts: Sequence[Prompt], *, most_steps: int = 10_000) -> None:
        """Steps until these prompts have their first tokens."""
        for _ in range(most_steps):
            if all(prompt.done_ms for prompt in prompts):
                return
            self.step()
        raise AssertionError(f"a prompt is not done after {most_steps} steps")

    def run_for(self, time_ms: float) -> None:
        """Steps for so long."""
        end_ms = self.now_ms + time_ms
        while self.now_ms < end_ms:
            self.step()

    def step(self) -> Plan:
        """One step; each stream accepts some of the drafts that are made for it."""
        plan = self.scheduler.plan(round(self.now_ms * 1e6))
        drafts = [[1] * self._random.randint(0, one.num_drafts) for one in plan.rows]
        self.scheduler.drafted(plan, drafts)
        load = StepLoad()
        for planned, proposal in zip(plan.rows, drafts, strict=True):
            if planned.entry.work is Work.DECODE:
                load.add_decode(1 + len(proposal), planned.start)
            else:
                load.add_chunk(planned.num_rows, planned.start)
        time_ms = self._machine.step_ms(load, self.now_ms)
        self.now_ms += time_ms
        if load.decode_rows:
            (self.busy_ms if load.prefill_rows else self.quiet_ms).append(time_ms)
        for planned, proposal in zip(plan.rows, drafts, strict=True):
            self._commit(planned.entry, planned.start + planned.num_rows, len(proposal))
        return plan

    def _commit(self, entry: Entry, end: int, num_drafts: int) -> None:
        session = entry.session
        if entry.work is not Work.DECODE:
            self.sessions.commit(session, [], num_computed=end)
            if session.num_pending == 0:
                prompt = self._waiting.pop(session.session_id)
                prompt.done_ms = self.now_ms
                self._close(entry)
            return
        token_ids = [1] * (1 + self._random.randint(0, num_drafts))
        computed = len(session.token_ids) + len(token_ids) - 1
        self.sessions.commit(session, token_ids, num_computed=computed)
        self.sessions.trim(session)
        if len(session.token_ids) >= STREAM_TOKENS.stop:
            self._close(entry)
            self._open_stream()

    def _open_stream(self) -> None:
        entry = self._open(STREAM_TOKENS.start, Work.DECODE)
        entry.draft_tokens, entry.room = NUM_DRAFTS, STREAM_TOKENS.stop
        session = entry.session
        self.sessions.reserve(session, session.num_pending)
        self.sessions.commit(session, [1], num_computed=STREAM_TOKENS.start)

    def _open(self, num_tokens: int, work: Work) -> Entry:
        self._num_opened += 1
        session = self.sessions.open(str(self._num_opened), [1] * num_tokens).session
        entry = Entry(session, work, Phase.RUNNING, 0, round(self.now_ms * 1e6))
        self.scheduler.add(entry)
        return entry

    def _close(self, entry: Entry) -> None:
        self.scheduler.remove(entry)
        self.sessions.close(entry.session)
