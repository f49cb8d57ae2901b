"""Figures of `bench speculation` from samples made by hand, and what the tables say of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from chatrt.bench.speculation import AnswerSample, PairSample, RunSample
from chatrt.bench.speculation_figures import figures_by_temperature, looping_share
from chatrt.bench.speculation_ngram import NgramCost
from chatrt.bench.speculation_report import (
    comparison,
    comparison_report,
    ngram_sentence,
    speculation_report,
    step_costs_sentence,
)
from chatrt.depth import DraftCost, StepCosts
from chatrt.errors import InvalidValue
from chatrt.turn import SpeculationFigures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from chatrt.bench.speculation_figures import SpeculationBenchFigures

PLAIN_MS = 10.0


def answer(
    prompt_id: str = "a",
    token_ids: Sequence[int] = tuple(range(11)),
    *,
    num_passes: int = 10,
    kind: str = "casual",
    speculation: SpeculationFigures | None = None,
) -> AnswerSample:
    figures = speculation or SpeculationFigures(depths=(1 + num_passes,))
    return AnswerSample(prompt_id, kind, tuple(token_ids), num_passes, figures)


def run(*answers: AnswerSample, ms_per_token: float = PLAIN_MS) -> RunSample:
    num_tokens = sum(len(one.token_ids) - 1 for one in answers)
    return RunSample(answers, num_tokens, num_tokens * ms_per_token)


def pair(
    prompt_id: str = "a",
    *,
    on_ms: float = PLAIN_MS,
    off_ms: float = PLAIN_MS,
    temperature: float = 0.0,
    **on: Any,
) -> PairSample:
    on_answer = answer(prompt_id, **on)
    off_answer = answer(prompt_id, on_answer.token_ids)
    return PairSample(
        prompt_id,
        temperature,
        run(off_answer, ms_per_token=off_ms),
        run(on_answer, ms_per_token=on_ms),
    )


def figures(*pairs: PairSample, seed: int = 0) -> SpeculationBenchFigures:
    (found,) = figures_by_temperature(pairs, seed=seed).values()
    return found


def printed(renderable: RenderableType) -> str:
    console = Console(width=250, no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_the_looping_share_counts_4_grams_that_were_there_before() -> None:
    assert looping_share(range(100)) == 0
    assert looping_share([]) == looping_share([7, 7, 7]) == 0
    # of 5 4-grams one is new
    assert looping_share([7] * 8) == pytest.approx(0.8)
    # 1 2 3 4, 2 3 4 1, 3 4 1 2, 4 1 2 3, then 1 2 3 4 again
    assert looping_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(0.2)


def test_the_speedup_is_told_by_medians_in_all_and_by_pair() -> None:
    long = list(range(1001))
    speed = figures(
        pair("a", off_ms=10, on_ms=5),
        pair("b", off_ms=10, on_ms=5),
        pair("c", off_ms=30, on_ms=30, token_ids=long),
    ).speedup
    assert speed.ms_per_token_ratio is not None
    assert speed.ms_per_token_ratio.value == 2
    assert speed.ms_per_token_ratio.num_units == 3
    assert (speed.ms_per_token.off, speed.ms_per_token.on) == (10, 5)
    assert speed.tokens_per_s_ratio is not None
    off_s, on_s = (20 * 10 + 1000 * 30) / 1e3, (20 * 5 + 1000 * 30) / 1e3
    assert speed.tokens_per_s_ratio.value == pytest.approx(off_s / on_s)
    assert speed.tokens_per_s.off == pytest.approx(1020 / off_s)
    assert speed.tokens_per_s.on == pytest.approx(1020 / on_s)
    assert speed.pair_ratio is not None
    assert speed.pair_ratio.value == 2


def test_pairs_of_one_prompt_are_one_unit_but_several_pairs() -> None:
    pairs = [pair("a", on_ms=ms) for ms in (5, 5, 8)] + [pair("b", on_ms=5)]
    speed = figures(*pairs).speedup
    assert speed.ms_per_token_ratio is not None
    assert speed.ms_per_token_ratio.num_units == 2
    assert speed.ms_per_token_ratio.value == 2
    assert speed.pair_ratio is not None
    assert speed.pair_ratio.num_units == 4


def test_the_interval_encloses_the_value_and_is_the_same_for_the_same_seed() -> None:
    pairs = [pair(f"p{index}", on_ms=4 + index % 5) for index in range(20)]
    first, again, other = (figures(*pairs, seed=seed).speedup for seed in (1, 1, 2))
    estimate = first.tokens_per_s_ratio
    assert estimate is not None
    assert 10 / 8 < estimate.low < estimate.value < estimate.high < 10 / 4
    assert first == again
    assert first != other


def test_units_that_are_alike_leave_no_room_in_the_interval() -> None:
    estimate = figures(*(pair(f"p{index}", on_ms=5) for index in range(4))).speedup.pair_ratio
    assert estimate is not None
    assert estimate.low == estimate.value == estimate.high == 2


def test_answers_that_end_with_their_first_token_are_in_no_speed() -> None:
    found = figures(pair(token_ids=[3], num_passes=0))
    assert found.speedup.pair_ratio is None
    assert found.speedup.ms_per_token.off is None
    assert found.mean_accepted_length.overall is None
    assert found.mean_accepted_length.by_kind == {}
    assert found.cost_ms_per_token is None
    assert found.identical.all_identical
    assert "1 of 1" in printed(speculation_report({"auto": {0.0: found}}, ()))


def test_the_accepted_length_leaves_the_first_token_out() -> None:
    found = figures(
        pair("a", token_ids=range(31), num_passes=10),
        pair("b", token_ids=range(11), num_passes=10, kind="code"),
    ).mean_accepted_length
    assert found.overall is not None
    assert found.overall.value == 2
    assert found.overall.num_units == 2
    assert found.by_kind == {"casual": 3, "code": 1}


def test_looping_answers_count_and_are_left_out_of_the_second_figure() -> None:
    found = figures(
        pair("a", token_ids=range(31), num_passes=15),
        pair("loop", token_ids=[1] * 31, num_passes=6),
    ).mean_accepted_length
    assert found.num_looping == 1
    assert found.overall is not None
    assert found.overall.value == pytest.approx(60 / 21)
    assert found.without_looping is not None
    assert found.without_looping.value == 2


def test_acceptance_by_position_is_of_all_passes_and_of_those_that_drafted_there() -> None:
    # of 10 passes 4 draft nothing, 2 one token and 4 two; the 11th gave the first token
    drafted = SpeculationFigures(
        accepted_per_position=(5, 1), depths=(5, 2, 4), draft_ms=20, verify_ms=60
    )
    found = figures(pair(token_ids=range(17), num_passes=10, speculation=drafted))
    assert found.accepted_per_position.of_rounds == [0.5, 0.1]
    assert found.accepted_per_position.of_drafted == [pytest.approx(5 / 6), 0.25]
    assert found.k_histogram == {0: 4, 1: 2, 2: 4}
    cost = found.cost_ms_per_token
    assert cost is not None
    assert (cost.draft, cost.verify) == (20 / 16, 60 / 16)
    assert cost.other == pytest.approx(PLAIN_MS - 80 / 16)
    assert cost.total == pytest.approx(PLAIN_MS)


def test_costs_are_said_by_source_and_by_rows_of_a_pass() -> None:
    drafts = {"ngram": DraftCost(0.02, 0, 0), "head": DraftCost(0.25, 0.12, 0.05)}
    costs = StepCosts(((1, 3.4), (3, 4.0), (5, 4.5)), drafts)
    assert step_costs_sentence("auto", costs) == (
        "Costs that auto started from: a draft of ngram takes 0.02 ms + 0.00 ms a step, a draft of "
        "head takes 0.25 ms + 0.12 ms a step, a pass 3.40 ms for 1 row, 4.50 for 5."
    )


def test_an_n_gram_proposal_is_said_with_what_it_is_held_to() -> None:
    sentence = ngram_sentence(NgramCost(3.81, 39.2, 128, 1000))
    assert "takes 3.8 µs (held to 20), where all caches are cold 39.2 µs" in sentence
    assert "of 128 in sessions of 1000 tokens" in sentence


def test_the_first_answer_that_differs_is_named_with_its_token() -> None:
    differing = PairSample("b", 0.0, run(answer("b", [1, 2, 3, 4])), run(answer("b", [1, 2, 9, 4])))
    shorter = PairSample("c", 0.0, run(answer("c", [1, 2, 3])), run(answer("c", [1, 2])))
    found = figures(pair("a"), differing, shorter)
    assert (found.identical.num_identical, found.identical.num_answers) == (1, 3)
    first = found.identical.first_difference
    assert first is not None
    assert (first.prompt_id, first.position) == ("b", 2)
    text = printed(speculation_report({"auto": {0.0: found}}, ()))
    assert "the answer to b differs from the answer without speculation at token 2" in text
    shorter_first = figures(shorter).identical.first_difference
    assert shorter_first is not None
    assert shorter_first.position == 2


def test_answers_given_at_once_are_held_to_those_given_alone() -> None:
    a, b = answer("a"), answer("b", [4, 5, 6], num_passes=2)
    together = run(a, b)
    alone = (a.token_ids, (4, 5, 7))
    found = figures(PairSample("group-1", 0.0, together, together, alone))
    assert found.identical.all_identical
    assert found.identical_to_alone is not None
    assert found.identical_to_alone.num_identical == 2  # of each run its first answer
    assert found.identical_to_alone.num_answers == 4
    assert found.cost_ms_per_token is None
    text = printed(speculation_report({"auto": {0.0: found}}, ()))
    assert "as alone" in text
    assert "differs from the answer given alone at token 2" in text


def test_temperatures_are_kept_apart() -> None:
    found = figures_by_temperature([pair(), pair(temperature=0.8), pair("b")], seed=0)
    assert {one: each.num_pairs for one, each in found.items()} == {0.0: 2, 0.8: 1}
    text = printed(speculation_report({"auto": found, "ngram": found}, ("a note",)))
    assert "auto, T 0.8" in text
    assert "ngram, T 0" in text
    assert "a note" in text


def document(ratio: float | None, **others: Any) -> dict[str, Any]:
    estimate = None if ratio is None else {"value": ratio}
    return {
        "benchmark": "speculation",
        "drafters": {"auto": {"0": {"speedup": {"pair_ratio": estimate}, **others}}},
    }


def test_two_documents_are_held_side_by_side() -> None:
    a = document(1.5, identical={"num_identical": 3, "num_answers": 4})
    b = document(1.8, identical={"num_identical": 4, "num_answers": 4})
    (entry,) = comparison(a, b)
    assert (entry["drafter"], entry["temperature"]) == ("auto", "0")
    assert entry["speedup.pair_ratio.value"] == {"a": 1.5, "b": 1.8, "ratio": pytest.approx(1.2)}
    assert entry["identical.num_identical"]["b"] == 4
    assert entry["mean_accepted_length.overall.value"] == {"a": None, "b": None, "ratio": None}
    text = printed(comparison_report([entry], ("which is which",)))
    assert "auto, temperature 0" in text
    assert "1.20" in text
    assert "which is which" in text


def test_figures_that_one_document_lacks_have_no_ratio() -> None:
    (entry,) = comparison(document(None), document(1.8))
    assert entry["speedup.pair_ratio.value"] == {"a": None, "b": 1.8, "ratio": None}


def test_documents_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(InvalidValue, match="one is of 'step'"):
        comparison(document(1.0), {"benchmark": "step"})
    with pytest.raises(InvalidValue, match="no drafter and temperature in common"):
        comparison(document(1.0), document(1.0) | {"drafters": {"ngram": {}}})
