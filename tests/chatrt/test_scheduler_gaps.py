"""The gap contract on a machine that only takes time: gaps, prompts beside streams, fairness."""

from __future__ import annotations

import pytest

from chatrt.percentiles import percentile
from tests.chatrt.gap_machine import Machine, Prompt, Simulation

PROMPT_TOKENS = 4096
BUDGET_MS = 20.0


def at(share: float, times_ms: list[float]) -> float:
    """The percentile of some times."""
    value = percentile(sorted(times_ms), share)
    assert value is not None
    return value


def alone_ms(seed: int, num_tokens: int = PROMPT_TOKENS) -> float:
    """What a prompt takes on the same machine when nobody else is there."""
    simulation = Simulation(Machine(seed), max_gap_ms=BUDGET_MS, num_streams=0)
    prompt = simulation.ask(num_tokens)
    simulation.run_until_done([prompt])
    return prompt.took_ms


def beside_streams(machine: Machine, *, num_prompts: int, max_gap_ms: float) -> Simulation:
    """Two streams, beside which long prompts come one after the other."""
    simulation = Simulation(machine, max_gap_ms=max_gap_ms, num_streams=2)
    for _ in range(num_prompts):
        simulation.run_for(500.0)
        simulation.run_until_done([simulation.ask(PROMPT_TOKENS)])
    return simulation


@pytest.mark.parametrize("seed", range(3))
def test_streams_keep_their_gaps_while_long_prompts_come(seed: int) -> None:
    simulation = beside_streams(Machine(seed), num_prompts=3, max_gap_ms=BUDGET_MS)
    assert len(simulation.busy_ms) >= 300
    assert at(0.99, simulation.busy_ms) <= BUDGET_MS
    assert at(0.50, simulation.busy_ms) >= 0.7 * BUDGET_MS  # the budget is used
    alone = alone_ms(seed)
    assert all(prompt.took_ms <= 2 * alone for prompt in simulation.prompts)


@pytest.mark.parametrize("seed", range(2))
def test_a_machine_that_is_half_as_fast_for_a_second_costs_few_gaps(seed: int) -> None:
    machine = Machine(seed, is_slow=lambda now_ms: now_ms % 20_000 > 19_000)
    simulation = beside_streams(machine, num_prompts=3, max_gap_ms=BUDGET_MS)
    assert at(0.99, simulation.busy_ms) <= BUDGET_MS
    alone = alone_ms(seed)
    assert all(prompt.took_ms <= 2 * alone for prompt in simulation.prompts)


def test_a_larger_budget_makes_prompts_faster() -> None:
    took_ms = [
        beside_streams(Machine(0), num_prompts=1, max_gap_ms=budget_ms).prompts[0].took_ms
        for budget_ms in (15.0, 25.0, 50.0)
    ]
    assert took_ms == sorted(took_ms, reverse=True)
    assert took_ms[-1] <= 1.6 * alone_ms(0)


def test_gaps_are_kept_where_the_first_predictions_are_half_of_what_steps_take() -> None:
    machine = Machine(0, is_slow=lambda _now_ms: True)
    simulation = beside_streams(machine, num_prompts=1, max_gap_ms=2 * BUDGET_MS)
    gaps_ms = simulation.busy_ms
    assert sum(gap_ms > 2 * BUDGET_MS for gap_ms in gaps_ms) <= len(gaps_ms) / 100


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    simulation = Simulation(Machine(0), max_gap_ms=BUDGET_MS, num_streams=2)
    simulation.run_for(300.0)
    long = simulation.ask(PROMPT_TOKENS)
    shorts: list[Prompt] = []
    while not long.done_ms:
        simulation.run_for(700.0)
        shorts.append(simulation.ask(40))
    simulation.run_until_done(shorts)
    # 40 rows are three steps' worth, and one in four steps is the long prompt's.
    assert max(short.took_ms for short in shorts) <= 6 * BUDGET_MS
    assert len(shorts) >= 10


@pytest.mark.parametrize("num_streams", [0, 2])
def test_a_long_prompt_is_not_starved_by_short_ones_that_keep_coming(num_streams: int) -> None:
    simulation = Simulation(Machine(0), max_gap_ms=BUDGET_MS, num_streams=num_streams)
    long = simulation.ask(1000)
    waiting: list[Prompt] = []
    steps_before = simulation.now_ms
    while not long.done_ms:
        waiting = [short for short in waiting if not short.done_ms]
        while len(waiting) < 4:
            waiting.append(simulation.ask(200))
        simulation.step()
        assert simulation.now_ms - steps_before < 60_000
    # A quarter of the time once it has waited a second; a chunk of its own takes the whole step.
    alone = beside_ms = alone_ms(0, 1000)
    if num_streams:
        beside = Simulation(Machine(0), max_gap_ms=BUDGET_MS, num_streams=num_streams)
        prompt = beside.ask(1000)
        beside.run_until_done([prompt])
        beside_ms = prompt.took_ms
    assert alone <= long.took_ms <= 1000 + 4.4 * beside_ms


def test_long_prompts_that_come_together_are_done_one_after_the_other() -> None:
    simulation = Simulation(Machine(0), max_gap_ms=BUDGET_MS, num_streams=0)
    first, second = simulation.ask(2000), simulation.ask(2000)
    simulation.run_until_done([first, second])
    alone = alone_ms(0, 2000)
    assert first.took_ms <= 1.2 * alone
    assert second.took_ms <= 2.1 * alone


def test_whoever_comes_beside_a_prompt_alone_waits_for_one_chunk_only() -> None:
    simulation = Simulation(Machine(0), max_gap_ms=BUDGET_MS, num_streams=0)
    long = simulation.ask(PROMPT_TOKENS)
    simulation.run_for(300.0)  # the machine's pace is known by then
    while not long.done_ms:
        before_ms = simulation.now_ms
        plan = simulation.step()
        assert simulation.now_ms - before_ms <= 120
        assert plan.num_rows >= 16 or long.done_ms
