"""From pairs of runs to the figures of `bench speculation`.

Knows: MEASURING's definitions, the bootstrap. Does not know: engines, clocks, tables, JSON.
Invariant: a figure without samples is None or empty; the same pairs and seed give the same
intervals.
Cost: a few thousand draws over the prompts for each interval.
Source: percentile bootstrap, Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from chatrt.bench.speculation import AnswerSample, PairSample, RunSample

LOOPING_SHARE = 0.5  # an answer with at least this share of repeated 4-grams loops
_NGRAM = 4
_NUM_DRAWS = 2000
_INTERVAL_PERCENT = (2.5, 97.5)

_Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, and its 95 % interval `[low, high]` by a bootstrap over `num_units` units."""

    value: float
    low: float
    high: float
    num_units: int


@dataclass(frozen=True, slots=True)
class OffOn:
    """One quantity without and with speculation."""

    off: float | None
    on: float | None


@dataclass(frozen=True, slots=True)
class Speedup:
    """Times of decoding, first to last token; above 1 speculation is faster.

    `ms_per_token_ratio` is off ÷ on of the medians over prompts, `tokens_per_s_ratio` on ÷ off of
    all tokens over all time, `pair_ratio` the median of the pairs' own ratios (its units are
    pairs).
    """

    ms_per_token_ratio: Estimate | None
    tokens_per_s_ratio: Estimate | None
    pair_ratio: Estimate | None
    ms_per_token: OffOn
    tokens_per_s: OffOn


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token, from 0 on, that an answer with speculation has otherwise (or lacks)."""

    prompt_id: str
    position: int


@dataclass(frozen=True, slots=True)
class Identity:
    """How many answers have all their tokens in common, of how many."""

    num_identical: int
    num_answers: int
    first_difference: Difference | None

    @property
    def all_identical(self) -> bool:
        """Whether every answer is."""
        return self.num_identical == self.num_answers


@dataclass(frozen=True, slots=True)
class AcceptedLength:
    """Tokens for each pass of the target while decoding; the first token, prefill's, is not one.

    An answer loops when at least half of its 4-grams were there before.
    """

    overall: Estimate | None
    without_looping: Estimate | None
    num_looping: int
    by_kind: dict[str, float]


@dataclass(frozen=True, slots=True)
class Positions:
    """Acceptance by place in a draft, the first one first.

    `of_rounds` is the share of the target's passes in which the place was drafted and accepted,
    `of_drafted` that of those in which it was drafted (None where it never was).
    """

    of_rounds: list[float]
    of_drafted: list[float | None]


@dataclass(frozen=True, slots=True)
class CostSplit:
    """Milliseconds for each token: drafting, the target's passes, all the rest; `total` is all."""

    total: float
    draft: float
    verify: float
    other: float


@dataclass(frozen=True, slots=True)
class SpeculationBenchFigures:
    """What the pairs at one temperature show.

    `identical_to_alone` compares answers that were given at once with those given alone. The costs
    are None where several conversations shared the passes. `k_histogram` counts passes by the
    number of tokens drafted for them.
    """

    temperature: float
    num_pairs: int
    speedup: Speedup
    identical: Identity
    identical_to_alone: Identity | None
    mean_accepted_length: AcceptedLength
    accepted_per_position: Positions
    k_histogram: dict[int, int]
    cost_ms_per_token: CostSplit | None
    cost_off_ms_per_token: CostSplit | None


def looping_share(token_ids: Sequence[int]) -> float:
    """Share of the 4-grams that occurred before in the same sequence; 0 without any."""
    ngrams = [tuple(token_ids[i : i + _NGRAM]) for i in range(len(token_ids) - _NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def figures_by_temperature(
    pairs: Iterable[PairSample], *, seed: int
) -> dict[float, SpeculationBenchFigures]:
    """The figures of each temperature among the pairs, in the order in which they came."""
    grouped: defaultdict[float, list[PairSample]] = defaultdict(list)
    for pair in pairs:
        grouped[pair.temperature].append(pair)
    return {one: _figures(one, found, seed) for one, found in grouped.items()}


def _figures(temperature: float, pairs: list[PairSample], seed: int) -> SpeculationBenchFigures:
    answers = [answer for pair in pairs for answer in pair.on.answers]
    off, on = [pair.off for pair in pairs], [pair.on for pair in pairs]
    alone = None
    if any(pair.alone is not None for pair in pairs):
        alone = _identity(_against_alone(pairs))
    return SpeculationBenchFigures(
        temperature=temperature,
        num_pairs=len(pairs),
        speedup=_speedup(pairs, seed),
        identical=_identity(_off_against_on(pairs)),
        identical_to_alone=alone,
        mean_accepted_length=_accepted_length(answers, seed),
        accepted_per_position=_positions(answers),
        k_histogram=_k_histogram(answers),
        cost_ms_per_token=_cost(on),
        cost_off_ms_per_token=_cost(off),
    )


def _speedup(pairs: Sequence[PairSample], seed: int) -> Speedup:
    timed = [pair for pair in pairs if pair.off.num_tokens and pair.on.num_tokens]
    by_unit: defaultdict[str, list[PairSample]] = defaultdict(list)
    for pair in timed:
        by_unit[pair.unit].append(pair)
    units = [_speed_unit(found) for found in by_unit.values()]
    ratios = [(pair.off.ms_per_token / pair.on.ms_per_token,) for pair in timed]
    ms_per_token = tokens_per_s = OffOn(None, None)
    if units:
        off_ms, on_ms, *totals = zip(*units, strict=True)
        ms_per_token = OffOn(statistics.median(off_ms), statistics.median(on_ms))
        off_tokens, off_total_ms, on_tokens, on_total_ms = map(sum, totals)
        tokens_per_s = OffOn(1e3 * off_tokens / off_total_ms, 1e3 * on_tokens / on_total_ms)
    return Speedup(
        ms_per_token_ratio=_estimate(_ratio_of_medians, units, seed),
        tokens_per_s_ratio=_estimate(_ratio_of_rates, units, seed),
        pair_ratio=_estimate(_median, ratios, seed),
        ms_per_token=ms_per_token,
        tokens_per_s=tokens_per_s,
    )


def _speed_unit(pairs: Sequence[PairSample]) -> tuple[float, ...]:
    """Off and on: median ms per token; then tokens and ms of all off, tokens and ms of all on."""
    return (
        statistics.median(pair.off.ms_per_token for pair in pairs),
        statistics.median(pair.on.ms_per_token for pair in pairs),
        sum(pair.off.num_tokens for pair in pairs),
        sum(pair.off.decode_ms for pair in pairs),
        sum(pair.on.num_tokens for pair in pairs),
        sum(pair.on.decode_ms for pair in pairs),
    )


def _ratio_of_medians(units: _Floats) -> _Floats:
    medians: _Floats = np.median(units[..., :2], axis=-2)
    return medians[..., 0] / medians[..., 1]


def _ratio_of_rates(units: _Floats) -> _Floats:
    sums: _Floats = units[..., 2:].sum(axis=-2)
    return (sums[..., 2] / sums[..., 3]) / (sums[..., 0] / sums[..., 1])


def _ratio_of_sums(units: _Floats) -> _Floats:
    sums: _Floats = units.sum(axis=-2)
    return sums[..., 0] / sums[..., 1]


def _median(units: _Floats) -> _Floats:
    medians: _Floats = np.median(units[..., 0], axis=-1)
    return medians


def _estimate(
    statistic: Callable[[_Floats], _Floats], units: Sequence[Sequence[float]], seed: int
) -> Estimate | None:
    """The statistic of the units and its interval.

    `statistic` maps `[..., units, columns]` to `[...]`. None without units.
    """
    if not units:
        return None
    table = np.asarray(units, dtype=np.float64)
    generator = np.random.default_rng(seed)
    drawn = statistic(table[generator.integers(len(table), size=(_NUM_DRAWS, len(table)))])
    low, high = np.percentile(drawn, _INTERVAL_PERCENT)
    return Estimate(float(statistic(table)), float(low), float(high), len(table))


def _off_against_on(pairs: Iterable[PairSample]) -> Iterator[tuple[AnswerSample, Sequence[int]]]:
    """Each answer with speculation, and the tokens without."""
    for pair in pairs:
        for off, on in zip(pair.off.answers, pair.on.answers, strict=True):
            yield on, off.token_ids


def _against_alone(pairs: Iterable[PairSample]) -> Iterator[tuple[AnswerSample, Sequence[int]]]:
    """Each answer that was given among others, and the tokens of the one given alone."""
    for pair in pairs:
        for run in (pair.off, pair.on):
            yield from zip(run.answers, pair.alone or (), strict=True)


def _identity(compared: Iterable[tuple[AnswerSample, Sequence[int]]]) -> Identity:
    num_identical = num_answers = 0
    first: Difference | None = None
    for answer, expected in compared:
        position = _first_difference(answer.token_ids, expected)
        num_answers += 1
        num_identical += position is None
        if position is not None and first is None:
            first = Difference(answer.prompt_id, position)
    return Identity(num_identical, num_answers, first)


def _first_difference(found: Sequence[int], expected: Sequence[int]) -> int | None:
    both = enumerate(zip_longest(found, expected))
    return next((index for index, (one, other) in both if one != other), None)


def _accepted_length(answers: Sequence[AnswerSample], seed: int) -> AcceptedLength:
    looping = [looping_share(answer.token_ids) >= LOOPING_SHARE for answer in answers]
    steady = [answer for answer, loops in zip(answers, looping, strict=True) if not loops]
    by_kind: dict[str, float] = {}
    for kind in dict.fromkeys(answer.kind for answer in answers):
        units = _lengths(answer for answer in answers if answer.kind == kind)
        if units:
            by_kind[kind] = float(_ratio_of_sums(np.asarray(units, dtype=np.float64)))
    return AcceptedLength(
        overall=_estimate(_ratio_of_sums, _lengths(answers), seed),
        without_looping=_estimate(_ratio_of_sums, _lengths(steady), seed),
        num_looping=sum(looping),
        by_kind=by_kind,
    )


def _lengths(answers: Iterable[AnswerSample]) -> list[tuple[int, int]]:
    """For each prompt, its tokens behind the first, and the passes that gave them."""
    sums: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for answer in answers:
        if answer.num_passes:
            num_tokens, num_passes = sums[answer.prompt_id]
            num_tokens += len(answer.token_ids) - 1
            sums[answer.prompt_id] = (num_tokens, num_passes + answer.num_passes)
    return list(sums.values())


def _positions(answers: Sequence[AnswerSample]) -> Positions:
    num_rounds = sum(answer.num_passes for answer in answers)
    accepted = _sums(answer.speculation.accepted_per_position for answer in answers)
    drafted = _sums(answer.speculation.drafted_per_position for answer in answers)
    return Positions(
        of_rounds=[count / num_rounds for count in accepted if num_rounds],
        of_drafted=[a / d if d else None for a, d in zip_longest(accepted, drafted, fillvalue=0)],
    )


def _k_histogram(answers: Sequence[AnswerSample]) -> dict[int, int]:
    counts = _sums(answer.speculation.depths for answer in answers)
    if counts:
        counts[0] -= len(answers)  # the passes that gave the first tokens draft nothing
    return {depth: count for depth, count in enumerate(counts) if count}


def _sums(rows: Iterable[Sequence[int]]) -> list[int]:
    """Sums by place of rows that need not be equally long."""
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def _cost(runs: Sequence[RunSample]) -> CostSplit | None:
    timed = [run for run in runs if run.num_tokens]
    if not timed or any(len(run.answers) > 1 for run in timed):
        return None
    num_tokens = sum(run.num_tokens for run in timed)
    figures = [run.answers[0].speculation for run in timed]
    draft_ms = sum(one.draft_ms for one in figures)
    verify_ms = sum(one.verify_ms for one in figures)
    total_ms = sum(run.decode_ms for run in timed)
    return CostSplit(
        total=total_ms / num_tokens,
        draft=draft_ms / num_tokens,
        verify=verify_ms / num_tokens,
        other=(total_ms - draft_ms - verify_ms) / num_tokens,
    )
