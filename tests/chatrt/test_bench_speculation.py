"""The runs of `bench speculation` on a real engine: pairs, their order, what is timed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from chatrt.bench.prompts import bundled_prompts
from chatrt.bench.speculation import (
    Question,
    SpeculationBench,
    SpeculationOptions,
    chat_questions,
    random_questions,
)
from chatrt.bench.speculation_figures import figures_by_temperature
from chatrt.errors import OutOfPages
from chatrt.testing.drafter import ScriptedDrafter
from chatrt.testing.engine import run_turn, tiny_engine, turn_request
from chatrt.testing.tokenizer import IM_START
from chatrt_drafts.ngram import NgramDrafter

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt.bench.speculation import PairSample
    from chatrt.engine import Engine
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import TurnRequest

NUM_TOKENS = 13
DEPTH = 3
OPTIONS = SpeculationOptions(num_tokens=NUM_TOKENS, temperatures=(0.0,), depth=DEPTH)


def questions(tokenizer: Tokenizer, *texts: str) -> list[Question]:
    return [
        Question(text, "casual", tuple(tokenizer.encode(text)), seed)
        for seed, text in enumerate(texts)
    ]


def measure(
    on: Engine, off: Engine, asked: list[Question], options: SpeculationOptions = OPTIONS
) -> list[PairSample]:
    """All pairs of a run that tells of each of them once; its clock ticks 1 ms a step."""
    ticks = itertools.count(0, 1_000_000)
    bench = SpeculationBench(on, off, asked, options, clock=lambda: next(ticks))
    told: list[None] = []
    bench.run(lambda: told.append(None))
    assert len(told) == len(bench.pairs) == bench.num_pairs
    return bench.pairs


def knowing(tokenizer: Tokenizer, asked: list[Question]) -> ScriptedDrafter:
    """A drafter that knows the greedy answers."""
    plain = tiny_engine(tokenizer)
    sequences = []
    for question in asked:
        request = turn_request(question.prompt_id, question.token_ids)
        sampling = replace(request.sampling, max_output_tokens=NUM_TOKENS)
        answer = run_turn(plain, replace(request, sampling=sampling))
        sequences.append([*question.token_ids, *answer.output_ids])
    return ScriptedDrafter(sequences)


def test_a_perfect_drafter_needs_a_pass_for_each_depth_plus_one_tokens(
    tokenizer: Tokenizer,
) -> None:
    asked = questions(tokenizer, "the boats leave")
    drafter = knowing(tokenizer, asked)
    on = tiny_engine(tokenizer, drafter=drafter, num_drafts=DEPTH)
    (pair,) = measure(on, tiny_engine(tokenizer), asked)
    assert (pair.off.num_tokens, pair.off.decode_ms) == (NUM_TOKENS - 1, NUM_TOKENS - 1)
    assert (pair.on.num_tokens, pair.on.decode_ms) == (NUM_TOKENS - 1, (NUM_TOKENS - 1) / 4)
    (figures,) = figures_by_temperature([pair], seed=0).values()
    assert figures.speedup.pair_ratio is not None
    assert figures.speedup.pair_ratio.value == DEPTH + 1
    assert figures.mean_accepted_length.overall is not None
    assert figures.mean_accepted_length.overall.value == DEPTH + 1
    assert figures.accepted_per_position.of_rounds == [1.0] * DEPTH
    assert figures.accepted_per_position.of_drafted == [1.0] * DEPTH
    assert figures.k_histogram == {DEPTH: (NUM_TOKENS - 1) // (DEPTH + 1)}
    assert figures.identical.all_identical


def test_runs_without_speculation_draft_nothing(tokenizer: Tokenizer) -> None:
    drafting = tiny_engine(tokenizer, drafter=ScriptedDrafter(), num_drafts=DEPTH)
    (pair,) = measure(drafting, tiny_engine(tokenizer), questions(tokenizer, "the boats leave"))
    (off,), (on,) = pair.off.answers, pair.on.answers
    assert off.speculation.drafted == 0
    assert off.num_passes == NUM_TOKENS - 1
    assert on.speculation.drafted > on.speculation.accepted == 0
    assert on.token_ids == off.token_ids


def test_the_run_that_comes_first_changes_from_pair_to_pair(tokenizer: Tokenizer) -> None:
    on = tiny_engine(tokenizer, drafter=ScriptedDrafter(), num_drafts=DEPTH)
    off = tiny_engine(tokenizer)
    submitted: list[str] = []

    def noting(name: str, submit: Callable[[TurnRequest], None], request: TurnRequest) -> None:
        submitted.append(name)
        submit(request)

    on.submit = partial(noting, "on", on.submit)  # type: ignore[method-assign]
    off.submit = partial(noting, "off", off.submit)  # type: ignore[method-assign]
    measure(on, off, questions(tokenizer, "one", "two", "three"))
    warm_up, measured = submitted[:2], submitted[2:]
    assert warm_up == ["off", "on"]
    assert measured == ["off", "on", "on", "off", "off", "on"]


def test_every_run_is_cold_and_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    on = tiny_engine(tokenizer, drafter=ScriptedDrafter(), num_drafts=DEPTH)
    off = tiny_engine(tokenizer)
    num_free = on.sessions.num_free
    asked = questions(tokenizer, "the boats leave the harbour before dawn")
    assert len(measure(on, off, asked, replace(OPTIONS, num_pairs=2))) == 2
    for engine in (on, off):
        assert engine.sessions.num_free == num_free
        engine.sessions.check_invariants()


def test_the_controller_decides_where_no_depth_is_given(tokenizer: Tokenizer) -> None:
    on = tiny_engine(tokenizer, drafter=NgramDrafter(), num_drafts=4)
    options = SpeculationOptions(num_tokens=30, temperatures=(0.0, 0.8))
    asked = questions(tokenizer, "the sea, the sea, the sea", "the")
    pairs = measure(on, tiny_engine(tokenizer), asked, options)
    assert [pair.temperature for pair in pairs] == [0.0, 0.8, 0.0, 0.8]
    for pair in pairs:
        assert pair.on.answers[0].token_ids == pair.off.answers[0].token_ids
    assert sum(pair.on.answers[0].speculation.drafted for pair in pairs) > 0


def test_conversations_at_once_are_timed_from_where_all_have_begun(tokenizer: Tokenizer) -> None:
    asked = questions(tokenizer, "the boats leave", "the harbour", "before dawn")
    drafter = knowing(tokenizer, asked)
    on = tiny_engine(tokenizer, drafter=drafter, num_drafts=DEPTH)
    options = replace(OPTIONS, at_once=2, num_pairs=3)
    pairs = measure(on, tiny_engine(tokenizer), asked, options)
    assert [pair.unit for pair in pairs] == ["group-1", "group-2", "group-3"]
    asked_by_pair = [[answer.prompt_id for answer in pair.on.answers] for pair in pairs]
    names = [question.prompt_id for question in asked]
    assert asked_by_pair == [names[:2], [names[2], names[0]], names[1:]]
    for pair in pairs:
        assert pair.alone == tuple(answer.token_ids for answer in pair.off.answers)
        assert pair.off.num_tokens == 2 * (NUM_TOKENS - 1)
        assert pair.off.decode_ms == NUM_TOKENS - 1
    (figures,) = figures_by_temperature(pairs, seed=0).values()
    assert figures.identical_to_alone is not None
    assert figures.identical_to_alone.all_identical
    assert figures.identical_to_alone.num_answers == 12


def test_a_turn_that_fails_says_why(tokenizer: Tokenizer) -> None:
    on, off = (tiny_engine(tokenizer, num_pages=1) for _ in range(2))
    with pytest.raises(OutOfPages):
        measure(on, off, questions(tokenizer, "the boats leave the harbour before dawn"))


def test_random_prompts_are_of_ordinary_tokens_and_the_same_for_the_same_seed() -> None:
    ordinary = [3, 5, 7, 11]
    first = random_questions(ordinary, 3, max_tokens=1000, seed=1)
    assert len({question.prompt_id for question in first}) == 3
    assert [question.seed for question in first] == [1, 2, 3]
    assert {token_id for question in first for token_id in question.token_ids} == set(ordinary)
    assert first == random_questions(ordinary, 3, max_tokens=1000, seed=1)
    assert first != random_questions(ordinary, 3, max_tokens=1000, seed=2)
    assert all(len(q.token_ids) == 9 for q in random_questions(ordinary, 2, max_tokens=9, seed=1))


def test_prompts_are_rendered_with_their_history_and_a_seed_each(tokenizer: Tokenizer) -> None:
    prompts = bundled_prompts(per_kind=8)
    found = chat_questions(prompts, tokenizer, seed=5)
    assert [question.seed for question in found] == list(range(5, 5 + len(prompts)))
    start = tokenizer.id_of(IM_START)
    for prompt, question in zip(prompts, found, strict=True):
        assert (question.prompt_id, question.kind) == (prompt.id, prompt.kind)
        # each message opens once, and so does the answer
        assert question.token_ids.count(start) == len(prompt.history) + 2
    assert any(prompt.history for prompt in prompts)
