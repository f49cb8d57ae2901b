"""From turns on histories of several lengths to the figures of a run.

Knows: percentiles, cases, what llama.cpp takes as it was measured elsewhere.
Does not know: servers, tables, JSON.
Invariant: failed turns are counted and take part in nothing else; each percentile has its n.
Source: llama-cpp-python on two AVX-512 cores, SmolLM2-135M in Q4_1, prefix cache on.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.bench.figures import Distribution
from chatrt.bench.histories import CASES, KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from chatrt.bench.histories import HistorySample
    from chatrt.bench.histories_peer import PeerSample

# Follow-up of 15 words: the history's tokens, and milliseconds to the first token.
PUBLISHED_LLAMA_CPP_MS = {260: 105.0, 920: 148.0, 3600: 345.0, 7000: 598.0}


@dataclass(frozen=True, slots=True)
class CaseFigures:
    """One case at one length; what is not a distribution is a median, None without turns.

    `decode_steps` is the server's median TTFT over what one token takes without drafts at this
    length. `restore_of_cold` is `restore_ms` over the prefill of a cold turn.
    """

    ttft_ms: Distribution
    server_ttft_ms: Distribution
    stages_ms: dict[str, float]
    history_tokens: float | None
    input_tokens: float | None
    cached_tokens: float | None
    computed_tokens: float | None
    typed_ahead_tokens: float | None
    tpot_ms: float | None
    decode_steps: float | None
    restore_of_cold: float | None


@dataclass(frozen=True, slots=True)
class HistoryFigures:
    """One length of history.

    `decode_step_ms` is the time per token of the turns without drafts, `pass_ms` what a pass of the
    target took in the others; both are medians. `llama_cpp_published_ms` was measured elsewhere.
    """

    history: int
    cases: dict[str, CaseFigures]
    decode_step_ms: float | None
    pass_ms: float | None
    llama_cpp_published_ms: float | None
    llama_cpp_ms: Distribution | None
    llama_cpp_cold_ms: Distribution | None


@dataclass(frozen=True, slots=True)
class HistoriesFigures:
    """The figures of a run: `ttft_ms` by kind over all lengths, `by_history` by length and case.

    `cached_fraction` is cached over input tokens by case. `turns` counts those that ended well,
    `failed` the others, `failures` says of what, `not_run` counts those that never ended.
    """

    turns: int
    failed: int
    failures: dict[str, int]
    not_run: int
    ttft_ms: dict[str, Distribution]
    cached_fraction: dict[str, float | None]
    by_history: tuple[HistoryFigures, ...]


def histories_figures(
    samples: Sequence[HistorySample],
    *,
    num_planned: int,
    peer: Sequence[PeerSample] | None = None,
) -> HistoriesFigures:
    """The figures of `samples`; `peer` is what llama.cpp took beside them, None if not measured."""
    good = [sample for sample in samples if sample.error is None]
    failures = Counter(sample.error for sample in samples if sample.error is not None)
    lengths = dict.fromkeys(sorted(sample.history for sample in samples))
    return HistoriesFigures(
        turns=len(good),
        failed=len(samples) - len(good),
        failures=dict(failures),
        not_run=num_planned - len(samples),
        ttft_ms={
            kind: Distribution.of(s.figures.ttft_ms for s in good if s.case in cases)
            for kind, cases in KINDS.items()
        },
        cached_fraction={case: _cached_fraction(_of_case(good, case)) for case in CASES},
        by_history=tuple(
            _history_figures(length, [s for s in good if s.history == length], peer)
            for length in lengths
        ),
    )


def _history_figures(
    history: int, samples: Sequence[HistorySample], peer: Sequence[PeerSample] | None
) -> HistoryFigures:
    plain = _of_case(samples, "plain")
    step_ms = _median(sample.figures.tpot_ms for sample in plain)
    prefill_ms = _median(s.figures.stages_ms.get("prefill_ms") for s in _of_case(samples, "cold"))
    beside = None if peer is None else [sample for sample in peer if sample.history == history]
    return HistoryFigures(
        history=history,
        cases={case: _case_figures(_of_case(samples, case), step_ms, prefill_ms) for case in CASES},
        decode_step_ms=step_ms,
        pass_ms=_median(sample.figures.pass_ms for sample in samples if sample not in plain),
        llama_cpp_published_ms=PUBLISHED_LLAMA_CPP_MS.get(history),
        llama_cpp_ms=None if beside is None else Distribution.of(s.ttft_ms for s in beside),
        llama_cpp_cold_ms=None if beside is None else Distribution.of(s.cold_ms for s in beside),
    )


def _case_figures(
    samples: Sequence[HistorySample], step_ms: float | None, cold_prefill_ms: float | None
) -> CaseFigures:
    server = Distribution.of(sample.figures.server_ttft_ms for sample in samples)
    restore_ms = _median(sample.figures.stages_ms.get("restore_ms") for sample in samples)
    return CaseFigures(
        ttft_ms=Distribution.of(sample.figures.ttft_ms for sample in samples),
        server_ttft_ms=server,
        stages_ms=_median_stages(samples),
        history_tokens=_median(sample.history_tokens for sample in samples),
        input_tokens=_median(sample.figures.input_tokens for sample in samples),
        cached_tokens=_median(sample.figures.cached_tokens for sample in samples),
        computed_tokens=_median(sample.figures.computed_tokens for sample in samples),
        typed_ahead_tokens=_median(sample.figures.typed_ahead_tokens for sample in samples),
        tpot_ms=_median(sample.figures.tpot_ms for sample in samples),
        decode_steps=_ratio(server.p50, step_ms),
        restore_of_cold=_ratio(restore_ms, cold_prefill_ms),
    )


def _of_case(samples: Sequence[HistorySample], case: str) -> list[HistorySample]:
    return [sample for sample in samples if sample.case == case]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _median_stages(samples: Sequence[HistorySample]) -> dict[str, float]:
    names = dict.fromkeys(name for sample in samples for name in sample.figures.stages_ms)
    medians = {name: _median(s.figures.stages_ms.get(name) for s in samples) for name in names}
    return {name: value for name, value in medians.items() if value is not None}


def _cached_fraction(samples: Sequence[HistorySample]) -> float | None:
    return _ratio(
        float(sum(sample.figures.cached_tokens for sample in samples)),
        float(sum(sample.figures.input_tokens for sample in samples)),
    )
