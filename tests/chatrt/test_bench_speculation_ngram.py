"""What an n-gram proposal costs, in sessions of questions and answers."""

from __future__ import annotations

import itertools

from chatrt.bench.speculation import AnswerSample, PairSample, Question, RunSample
from chatrt.bench.speculation_ngram import (
    BAR_US,
    NUM_HISTORY_TOKENS,
    NUM_PROPOSALS,
    NgramCost,
    measure_ngram,
    sessions_of,
)
from chatrt.turn import SpeculationFigures
from tests.support import time_scale

LENGTH = NUM_HISTORY_TOKENS + NUM_PROPOSALS


def pair(prompt_id: str, token_ids: tuple[int, ...]) -> PairSample:
    answer = AnswerSample(prompt_id, "casual", token_ids, len(token_ids), SpeculationFigures())
    run = RunSample((answer,), len(token_ids), 1.0)
    return PairSample(prompt_id, 0.0, run, run)


def test_sessions_are_questions_with_their_answers_one_behind_the_other() -> None:
    asked = [Question("a", "casual", (1, 2)), Question("b", "casual", (3,))]
    pairs = [pair("b", tuple(range(10, 610))), pair("a", tuple(range(700, 1300)))]
    (session,) = sessions_of(asked, pairs)
    assert session == [3, *range(10, 610), 1, 2, *range(700, 1300)][:LENGTH]
    assert len(sessions_of(asked, pairs * 9)) == 2
    assert sessions_of(asked, pairs[:1]) == []


def test_too_little_text_gives_no_figure() -> None:
    assert measure_ngram([]) is None


def test_the_figures_are_medians_of_the_clock_that_is_passed() -> None:
    ticks = itertools.count(step=3000)
    cost = measure_ngram([range(LENGTH)], clock=lambda: next(ticks))
    assert cost == NgramCost(3.0, 3.0, NUM_PROPOSALS, NUM_HISTORY_TOKENS)


def test_a_proposal_stays_under_its_bar_whether_the_text_repeats_itself_or_not() -> None:
    assert BAR_US == 20
    for session in (range(LENGTH), [i % 100 for i in range(LENGTH)]):
        # Whatever else runs here only adds to a time: the best of a few medians is the code's own.
        costs = [measure_ngram([session]) for _ in range(2)]
        assert min(cost.propose_us for cost in costs if cost) <= BAR_US * time_scale()
