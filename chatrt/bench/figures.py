"""From samples of turns to the figures of a run, by MEASURING's definitions.

Knows: percentiles, kinds of turns, buckets of history. Does not know: servers, tables, JSON.
Invariant: failed turns are counted and take part in nothing else; each percentile has its n.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from chatrt.bench.goodput import Goodput, SessionSummary, Targets, goodput, session_summaries
from chatrt.bench.turn_sample import ABANDONED, CANCELLED, KINDS
from chatrt.percentiles import percentile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from chatrt.bench.turn_sample import TurnSample

FIRST_BUCKET_TOKENS = 128
P99_NEEDS = 100  # below that many values a p99 is little more than the largest


@dataclass(frozen=True, slots=True)
class Distribution:
    """Nearest-rank percentiles of `n` values; None without values."""

    n: int
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self:
        """The distribution of the values that are not None."""
        ordered = sorted(value for value in values if value is not None)
        return cls(
            n=len(ordered),
            p50=percentile(ordered, 0.50),
            p95=percentile(ordered, 0.95),
            p99=percentile(ordered, 0.99),
            max=ordered[-1] if ordered else None,
        )


@dataclass(frozen=True, slots=True)
class HistoryBucket:
    """Client TTFT of follow-ups whose history is `[from_tokens, to_tokens)` tokens long."""

    from_tokens: int
    to_tokens: int
    ttft_ms: Distribution


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """The figures of a run; dicts go by kind of turn.

    `ttft_ms` and `gap_ms` are the client's, `server_ttft_ms`, `stages_ms` (medians) and `tpot_ms`
    the server's; `client_minus_server_ms` is what the way between them takes, turn by turn.
    `cached_fraction` is cached over input tokens, with `all` for all kinds together. `turns` counts
    those that went as planned, `failed` those that did not, `failures` says of what, `not_run`
    counts turns that were planned and never ended. `cancelled` and `abandoned` turns are among
    `turns`. `late_ms` is how much later than due turns were sent. `restored_nothing` counts turns
    behind a restart for which the server brought no page back.
    """

    turns: int
    failed: int
    failures: dict[str, int]
    not_run: int
    ttft_ms: dict[str, Distribution]
    server_ttft_ms: dict[str, Distribution]
    client_minus_server_ms: Distribution
    stages_ms: dict[str, dict[str, float]]
    tpot_ms: Distribution
    gap_ms: Distribution
    cached_fraction: dict[str, float | None]
    ttft_by_history_tokens: tuple[HistoryBucket, ...]
    goodput: Goodput
    by_session: tuple[SessionSummary, ...]
    late_ms: Distribution
    cancelled: int
    cancel_ms: Distribution
    abandoned: int
    restored_nothing: int


def session_figures(
    samples: Sequence[TurnSample], *, num_planned: int, targets: Targets | None = None
) -> SessionFigures:
    """The figures of `samples`; `num_planned` turns were to be run, `targets` None is the usual."""
    targets = targets or Targets()
    good = [sample for sample in samples if sample.error is None]
    by_kind = {kind: [sample for sample in good if sample.kind == kind] for kind in KINDS}
    failures = Counter(sample.error for sample in samples if sample.error is not None)
    return SessionFigures(
        turns=len(good),
        failed=len(samples) - len(good),
        failures=dict(failures),
        not_run=num_planned - len(samples),
        ttft_ms={k: Distribution.of(s.ttft_ms for s in ss) for k, ss in by_kind.items()},
        server_ttft_ms={
            k: Distribution.of(s.server_ttft_ms for s in ss) for k, ss in by_kind.items()
        },
        client_minus_server_ms=Distribution.of(s.client_minus_server_ms for s in good),
        stages_ms={kind: _median_stages(ss) for kind, ss in by_kind.items()},
        tpot_ms=Distribution.of(s.tpot_ms for s in good),
        gap_ms=Distribution.of(gap for s in good for gap in s.gaps_ms),
        cached_fraction={
            **{kind: _cached_fraction(ss) for kind, ss in by_kind.items()},
            "all": _cached_fraction(good),
        },
        ttft_by_history_tokens=_by_history(good),
        goodput=goodput(samples, targets),
        by_session=session_summaries(samples, targets),
        late_ms=Distribution.of(s.late_ms for s in good),
        cancelled=sum(s.status == CANCELLED for s in good),
        cancel_ms=Distribution.of(s.cancel_ms for s in good),
        abandoned=sum(s.status == ABANDONED for s in good),
        restored_nothing=sum(s.after_restart and not s.restored_tokens for s in good),
    )


def _median_stages(samples: Sequence[TurnSample]) -> dict[str, float]:
    names = dict.fromkeys(name for sample in samples for name in sample.stages_ms)
    return {
        name: statistics.median(s.stages_ms[name] for s in samples if name in s.stages_ms)
        for name in names
    }


def _cached_fraction(samples: Sequence[TurnSample]) -> float | None:
    num_input = sum(sample.input_tokens for sample in samples)
    return sum(sample.cached_tokens for sample in samples) / num_input if num_input else None


def _by_history(samples: Sequence[TurnSample]) -> tuple[HistoryBucket, ...]:
    """Buckets `[0, 128)`, `[128, 256)`, `[256, 512)` and so on, those that have turns."""
    buckets: dict[int, list[TurnSample]] = {}
    for sample in samples:
        if sample.kind != "cold":
            start = 1 << (sample.history_tokens.bit_length() - 1) if sample.history_tokens else 0
            buckets.setdefault(start if start >= FIRST_BUCKET_TOKENS else 0, []).append(sample)
    return tuple(
        HistoryBucket(
            start, 2 * start or FIRST_BUCKET_TOKENS, Distribution.of(s.ttft_ms for s in inside)
        )
        for start, inside in sorted(buckets.items())
    )
