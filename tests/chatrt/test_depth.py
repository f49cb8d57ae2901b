"""Depth control on a simulated machine that takes what two cores take; chance is seeded."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatrt.depth import DepthController, DraftCost, StepCosts, Wish

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ONE_ROW_MS = 3.3
MACHINE = StepCosts(
    rows_ms=tuple(
        (rows, ONE_ROW_MS * ratio) for rows, ratio in [(1, 1), (5, 1.25), (8, 1.5), (16, 2.6)]
    ),
    drafts={
        "head": DraftCost(fixed_ms=0.1, step_ms=0.25, row_ms=0.03),
        "ngram": DraftCost(fixed_ms=0.02, step_ms=0.0, row_ms=0.0),
    },
)
SOURCES = list(MACHINE.drafts)


def chosen_soon(controller: DepthController, wish: Wish) -> int:
    """A choice is good for a few steps: what is chosen when it has been made anew."""
    return [controller.choose([wish])[0].num_tokens for _ in range(5)][-1]


def step_ms(source: str, depths: Sequence[int]) -> float:
    """What a step takes in which one source drafts so deep for each session."""
    pass_ms, cost = MACHINE.pass_ms(len(depths) + sum(depths)), MACHINE.drafts[source]
    if not any(depths):
        return pass_ms
    levels = range(1, max(depths) + 1)
    further = sum(sum(depth >= level for depth in depths) - 1 for level in levels)
    return pass_ms + cost.fixed_ms + len(levels) * cost.step_ms + further * cost.row_ms


def fixed_rate(source: str, chance: float, depth: int) -> float:
    """Expected tokens per ms of one session that always drafts so deep."""
    return sum(chance**n for n in range(depth + 1)) / step_ms(source, [depth])


def off_rate(num_sessions: int = 1) -> float:
    return num_sessions / MACHINE.pass_ms(num_sessions)


@dataclass
class World:
    """Sessions 0, 1, … decode; a draft is accepted by `chances(session_id)`."""

    source: str = "head"
    max_tokens: int = 4
    num_sessions: int = 1
    seed: int = 0
    depths: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.controller = DepthController(MACHINE, max_tokens=self.max_tokens)
        self.random = random.Random(self.seed)

    def run(self, num_steps: int, chances: Callable[[int], float]) -> float:
        """Tokens per ms of so many steps."""
        num_tokens, time_ms = 0, 0.0
        for _ in range(num_steps):
            wishes = [Wish(i, self.source, self.max_tokens) for i in range(self.num_sessions)]
            depths = [depth.num_tokens for depth in self.controller.choose(wishes)]
            self.depths.append(depths)
            time_ms += step_ms(self.source, depths)
            for session_id, depth in enumerate(depths):
                num_accepted = 0
                while num_accepted < depth and self.random.random() < chances(session_id):
                    num_accepted += 1
                num_tokens += 1 + num_accepted
                if depth:
                    self.controller.record(
                        session_id, self.source, num_drafts=depth, num_accepted=num_accepted
                    )
        return num_tokens / time_ms


def usual(depths: Sequence[int]) -> int:
    return Counter(depths).most_common(1)[0][0]


@pytest.mark.parametrize("source", SOURCES)
def test_drafts_that_are_never_accepted_are_given_up_and_probes_cost_at_most_1_5_percent(
    source: str,
) -> None:
    world = World(source)
    assert world.run(2000, lambda _: 0.0) >= 0.985 * off_rate()
    last = [depths[0] for depths in world.depths[200:]]
    assert usual(last) == 0
    assert 0 < sum(depth > 0 for depth in last) < 0.12 * len(last)


@pytest.mark.parametrize("max_tokens", [1, 4, 8])
@pytest.mark.parametrize("source", SOURCES)
def test_drafts_that_are_always_accepted_are_as_many_as_may_be(
    source: str, max_tokens: int
) -> None:
    world = World(source, max_tokens)
    world.run(300, lambda _: 1.0)
    assert all(depths == [max_tokens] for depths in world.depths[100:])


@pytest.mark.parametrize("max_tokens", [4, 8])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("chance", [0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95])
def test_the_rate_comes_within_3_percent_of_that_of_the_best_fixed_depth(
    source: str, max_tokens: int, chance: float
) -> None:
    best = max(fixed_rate(source, chance, depth) for depth in range(max_tokens + 1))
    rates = []
    for seed in range(4):
        world = World(source, max_tokens, seed=seed)
        world.run(200, lambda _: chance)
        rates.append(world.run(1500, lambda _: chance))
    assert sum(rates) / len(rates) >= 0.97 * best


@pytest.mark.parametrize("num_dull", [50, 500, 2000])
@pytest.mark.parametrize("source", SOURCES)
def test_text_that_becomes_predictable_is_drafted_for_again(source: str, num_dull: int) -> None:
    for seed in range(4):
        world = World(source, seed=seed)
        world.run(num_dull, lambda _: 0.0)
        world.run(150, lambda _: 0.9)
        assert usual([depths[0] for depths in world.depths[-30:]]) >= 3


def test_text_that_becomes_unpredictable_is_given_up_at_little_loss() -> None:
    """Two dozen steps' time at most, though five hundred said the opposite."""
    world = World()
    world.run(500, lambda _: 0.9)
    assert world.run(200, lambda _: 0.0) >= (1 - 24 / 200) * off_rate()
    assert usual([depths[0] for depths in world.depths[-150:]]) == 0


def test_a_new_session_starts_from_what_others_have_shown() -> None:
    dull, lively = World("ngram", seed=1), World("ngram", seed=1)
    dull.run(1500, lambda _: 0.25)
    lively.run(1500, lambda _: 0.95)
    wish = [Wish(99, "ngram", 4)]
    assert dull.controller.choose(wish)[0].num_tokens <= 2
    assert lively.controller.choose(wish)[0].num_tokens == 4


def test_a_closed_session_starts_like_a_new_one() -> None:
    world = World()
    world.run(40, lambda _: 0.0)
    world.controller.close(0)
    old, new = (world.controller.choose([Wish(i, "head", 4)]) for i in (0, 99))
    assert old == new
    assert old[0].num_tokens > 0


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.7, 0.8])
def test_eight_sessions_are_never_slower_than_without_drafts(source: str, chance: float) -> None:
    world = World(source, num_sessions=8)
    assert world.run(2000, lambda _: chance) >= 0.985 * off_rate(8)


def test_eight_predictable_sessions_draft_together_where_one_alone_would_lose_by_it() -> None:
    world = World(num_sessions=8)
    world.run(1000, lambda _: 1.0)
    alone = (8 + 1) / step_ms("head", [1] + [0] * 7)
    assert alone < off_rate(8) < world.run(500, lambda _: 1.0)


def test_one_predictable_session_among_seven_others_is_drafted_deep_for() -> None:
    world = World("ngram", num_sessions=8)
    world.run(200, lambda session_id: 0.95 if session_id == 3 else 0.05)
    rate = world.run(1000, lambda session_id: 0.95 if session_id == 3 else 0.05)
    assert rate > 1.03 * off_rate(8)
    for session_id in range(8):
        chosen = usual([depths[session_id] for depths in world.depths[200:]])
        assert chosen == (4 if session_id == 3 else 0)


def test_no_draft_is_chosen_where_none_is_wished_for_or_nobody_knows_the_source() -> None:
    controller = DepthController(MACHINE, max_tokens=4)
    for _ in range(600):
        depths = controller.choose([Wish(1, "head", 0), Wish(2, "unheard-of", 4)])
        assert [depth.num_tokens for depth in depths] == [0, 0]
    controller.record(2, "unheard-of", num_drafts=2, num_accepted=2)
    controller.observe_drafts("unheard-of", num_steps=2, num_sessions=1, time_ms=1.0)
    assert controller.choose([]) == []
    assert DepthController(MACHINE, max_tokens=0).choose([Wish(1, "head", 4)])[0].num_tokens == 0


def test_rows_of_other_sessions_make_drafts_dearer() -> None:
    """The machine's rows cost more behind the eighth."""
    wish = Wish(0, "ngram", 4)
    others = [Wish(session_id, "ngram", 0) for session_id in range(1, 8)]
    alone = DepthController(MACHINE, max_tokens=4).choose([wish])
    beside = DepthController(MACHINE, max_tokens=4).choose([wish, *others])
    assert alone[0].num_tokens == 4
    assert beside[0].num_tokens == 0


def test_the_floor_is_the_chance_below_which_one_more_draft_loses_time() -> None:
    controller = DepthController(MACHINE, max_tokens=4)
    depth = controller.choose([Wish(0, "head", 4)])[0]
    k = depth.num_tokens
    row_ms = MACHINE.pass_ms(1 + k) - MACHINE.pass_ms(k)
    rate = sum(0.6**n for n in range(k + 1)) / step_ms("head", [k])
    assert k > 0
    assert depth.floor == pytest.approx((row_ms + 0.25) * rate / 0.6)  # the next one counts too


def test_a_floor_is_at_most_nine_tenths() -> None:
    costs = StepCosts(((1, 1.0), (2, 1.89)), {"ngram": DraftCost(0.0, 0.0, 0.0, first_guess=1.0)})
    assert DepthController(costs, max_tokens=1).choose([Wish(0, "ngram", 1)])[0].floor == 0.9


def test_a_probe_that_nobody_drafts_for_is_tried_again_soon_at_no_cost() -> None:
    controller = DepthController(MACHINE, max_tokens=4)
    for _ in range(40):
        controller.record(0, "head", num_drafts=1, num_accepted=0)
    probes = [
        step for step in range(400) if controller.choose([Wish(0, "head", 4)])[0].num_tokens > 0
    ]
    assert all(later - earlier <= 5 for earlier, later in pairwise(probes))
    assert probes[-1] > 390


def test_a_probe_that_fails_makes_the_next_one_wait_longer() -> None:
    world = World()
    world.run(400, lambda _: 0.0)
    probes = [step for step, depths in enumerate(world.depths) if step > 30 and depths[0]]
    waits = [later - earlier for earlier, later in pairwise(probes)]
    assert waits[:2] == sorted(waits[:2])
    assert min(waits[-3:]) > 2 * waits[0]


def test_a_machine_that_has_become_faster_at_rows_is_noticed() -> None:
    """Measured passes say that rows are nearly free, where the first table said the opposite."""
    dear = StepCosts(((1, 3.0), (5, 15.0)), {"ngram": DraftCost(0.02, 0.0, 0.0)})
    controller = DepthController(dear, max_tokens=4)
    assert controller.choose([Wish(0, "ngram", 4)])[0].num_tokens == 0
    for _ in range(600):
        controller.observe_pass(num_rows=1, time_ms=3.0)
        controller.observe_pass(num_rows=5, time_ms=3.3)
    assert chosen_soon(controller, Wish(0, "ngram", 4)) == 4


def test_drafts_that_take_longer_than_was_measured_are_given_up() -> None:
    controller = DepthController(MACHINE, max_tokens=4)
    assert controller.choose([Wish(0, "head", 4)])[0].num_tokens > 0
    for num_steps in [1, 2, 4] * 150:
        controller.observe_drafts(
            "head", num_steps=num_steps, num_sessions=1, time_ms=0.1 + 4.0 * num_steps
        )
    assert chosen_soon(controller, Wish(0, "head", 4)) == 0


def test_a_single_odd_measurement_changes_nothing() -> None:
    calm, startled = (DepthController(MACHINE, max_tokens=4) for _ in range(2))
    startled.observe_pass(num_rows=1, time_ms=10_000.0)
    startled.observe_drafts("head", num_steps=1, num_sessions=1, time_ms=10_000.0)
    wish = [Wish(0, "head", 4)]
    assert startled.choose(wish)[0].num_tokens == calm.choose(wish)[0].num_tokens


@pytest.mark.parametrize(("num_sessions", "most_us"), [(1, 15), (8, 60)])
def test_choosing_takes_microseconds(num_sessions: int, most_us: float) -> None:
    scale = float(os.environ.get("CHATRT_TEST_TIME_SCALE", "1"))
    controller = DepthController(MACHINE, max_tokens=4)
    wishes = [Wish(session_id, "head", 4) for session_id in range(num_sessions)]
    least_us = float("inf")
    for _ in range(500):
        start = time.perf_counter()
        controller.choose(wishes)
        least_us = min(least_us, (time.perf_counter() - start) * 1e6)
    assert least_us <= most_us * scale


def test_depth_control_needs_no_torch() -> None:
    code = "import sys, chatrt.depth; print({'torch', 'numpy', 'asyncio'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


SESSION_IDS = st.integers(0, 3)
NAMES = st.sampled_from([*SOURCES, "unheard-of"])
TIMES_MS = st.floats(0.0, 1e4)
CALLS = st.one_of(
    st.tuples(
        st.just("choose"),
        st.lists(st.builds(Wish, SESSION_IDS, NAMES, st.integers(0, 12)), max_size=5),
    ),
    st.tuples(st.just("record"), SESSION_IDS, NAMES, st.integers(1, 12), st.integers(0, 12)),
    st.tuples(st.just("pass"), st.integers(1, 80), TIMES_MS),
    st.tuples(st.just("drafts"), NAMES, st.integers(0, 12), st.integers(1, 9), TIMES_MS),
    st.tuples(st.just("close"), SESSION_IDS),
)


@given(st.lists(CALLS, max_size=60), st.integers(0, 8))
def test_depths_stay_within_their_caps_whatever_is_called(
    calls: list[tuple[object, ...]], max_tokens: int
) -> None:
    controller = DepthController(MACHINE, max_tokens=max_tokens)
    for call in calls:
        match call:
            case ("choose", list() as wishes):
                depths = controller.choose(wishes)
                assert len(depths) == len(wishes)
                for wish, depth in zip(wishes, depths, strict=True):
                    known = wish.source in MACHINE.drafts
                    assert 0 <= depth.num_tokens <= (min(wish.max_tokens, max_tokens) * known)
                    assert 0.0 <= depth.floor <= 0.9
            case ("record", int() as session_id, str() as source, int() as drafts, int() as kept):
                controller.record(
                    session_id, source, num_drafts=drafts, num_accepted=min(kept, drafts)
                )
            case ("pass", int() as rows, float() as time_ms):
                controller.observe_pass(num_rows=rows, time_ms=time_ms)
            case ("drafts", str() as source, int() as steps, int() as sessions, float() as time_ms):
                controller.observe_drafts(
                    source, num_steps=steps, num_sessions=sessions, time_ms=time_ms
                )
            case ("close", int() as session_id):
                controller.close(session_id)


@pytest.mark.parametrize(("pass_ms", "num_tokens"), [(1.89, 1), (1.93, 0)])
def test_drafts_that_promise_less_than_five_percent_are_not_made(
    pass_ms: float, num_tokens: int
) -> None:
    costs = StepCosts(
        ((1, 1.0), (2, pass_ms)), {"ngram": DraftCost(0.0, 0.0, 0.0, first_guess=1.0)}
    )
    (depth,) = DepthController(costs, max_tokens=1).choose([Wish(0, "ngram", 1)])
    assert depth.num_tokens == num_tokens


def test_chains_that_end_early_go_as_deep_as_they_like_where_drafts_pay_at_all() -> None:
    drafts = {
        "sure": DraftCost(0.1, 0.25, 0.1, ends_early=True),
        "blind": DraftCost(0.1, 0.25, 0.1),
    }
    controller = DepthController(StepCosts(MACHINE.rows_ms, drafts), max_tokens=8)
    (sure,) = controller.choose([Wish(0, "sure", 6)])
    (blind,) = controller.choose([Wish(1, "blind", 6)])
    assert sure.num_tokens == 6
    assert 0 < blind.num_tokens < 6
    for _ in range(60):
        controller.record(0, "sure", num_drafts=1, num_accepted=0)
    assert controller.choose([Wish(0, "sure", 6)])[0].num_tokens in (0, 1, 2)  # none, or a probe
