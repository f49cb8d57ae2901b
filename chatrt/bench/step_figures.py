"""From raw samples of forwards to the figures of `bench step`.

Knows: MEASURING's definitions, bytes of weights and KV. Does not know: clocks, tables, JSON.
Invariant: a figure without samples is None or absent; times are medians, a ratio is one of medians
of the same run.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from chatrt.bench.step import StepSamples
    from chatrt.kvcache import KVCache
    from chatrt.models.weights import DecoderWeights

_Key = TypeVar("_Key", int, str)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What a step of one row reads: `weight_bytes`, and `kv_bytes_per_token` of its context."""

    weight_bytes: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, weights: DecoderWeights, kv: KVCache) -> StepBytes:
        """Layers and head; of an embedding that is not the head too, only one row is read."""
        untied = weights.embedding is not weights.head
        return cls(
            weights.num_bytes - (weights.embedding.num_bytes if untied else 0),
            kv.num_bytes // (kv.num_pages * kv.page_size),
        )


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Milliseconds are medians; dicts go by number of rows, sequences or tokens.

    `decode_ms` is one row at the start of a sequence, and `roofline_fraction` weighs its
    `step_bytes` against the bandwidth; by context, the bytes of KV are added. `rows_ratio` and
    `sequences_ratio` are relative to `decode_ms`, `kv_added_ratio` is the time that a context adds,
    over the time that reading its KV takes at that bandwidth; alone, it is that of the longest
    context. `overhead_ms` is what a step of the engine takes beside its forward. `stage_ms` is the
    decode step by op family. `contended_ratio` is the speed beside a busy process over that alone,
    of means: steps that wait for the core and steps that do not are both part of it.
    """

    read_bandwidth_gbs: float | None
    step_bytes: int
    decode_ms: float | None
    roofline_fraction: float | None
    rows_ms: dict[int, float]
    rows_ratio: dict[int, float]
    sequences_ms: dict[int, float]
    sequences_ratio: dict[int, float]
    decode_ms_by_context: dict[int, float]
    kv_bytes_by_context: dict[int, int]
    roofline_fraction_by_context: dict[int, float]
    kv_added_ratio_by_context: dict[int, float]
    kv_added_ratio: float | None
    prefill_ms: dict[int, float]
    prefill_tps: dict[int, float]
    overhead_ms: dict[str, float]
    stage_ms: dict[str, float] | None
    stage_ms_by_case: dict[str, dict[str, float]] | None
    quiet_ms: float | None
    contended_ms: float | None
    contended_ratio: float | None


def step_figures(samples: StepSamples, read: StepBytes) -> StepFigures:
    """The figures of a run, whole or interrupted."""
    rows_ms = _medians(samples.forward_ms.get("rows", {}))
    sequences_ms = _medians(samples.forward_ms.get("sequences", {}))
    prefill_ms = _medians(samples.forward_ms.get("prefill", {}))
    decode_ms = rows_ms.get(1)
    bandwidth_gbs = _median(samples.read_bandwidth_gbs)
    by_context = {0: decode_ms} if decode_ms is not None else {}
    by_context |= _medians(samples.forward_ms.get("context", {}))
    kv_bytes = {context: context * read.kv_bytes_per_token for context in by_context}
    rooflines = {
        context: (read.weight_bytes + kv_bytes[context]) / (bandwidth_gbs * 1e6 * context_ms)
        for context, context_ms in by_context.items()
        if bandwidth_gbs is not None and context_ms
    }
    added = _added_ratios(by_context, kv_bytes, bandwidth_gbs)
    stages = {name: _medians(parts) for name, parts in samples.stage_ms.items()} or None
    return StepFigures(
        read_bandwidth_gbs=bandwidth_gbs,
        step_bytes=read.weight_bytes,
        decode_ms=decode_ms,
        roofline_fraction=rooflines.get(0),
        rows_ms=rows_ms,
        rows_ratio=_ratios(rows_ms, decode_ms),
        sequences_ms=sequences_ms,
        sequences_ratio=_ratios(sequences_ms, decode_ms),
        decode_ms_by_context=by_context,
        kv_bytes_by_context=kv_bytes,
        roofline_fraction_by_context=rooflines,
        kv_added_ratio_by_context=added,
        kv_added_ratio=added[max(added)] if added else None,
        prefill_ms=prefill_ms,
        prefill_tps={n: 1000 * n / length_ms for n, length_ms in prefill_ms.items() if length_ms},
        overhead_ms=_medians(samples.turn_ms),
        stage_ms=None if stages is None else stages.get("rows 1"),
        stage_ms_by_case=stages,
        quiet_ms=_median(samples.quiet_ms),
        contended_ms=_median(samples.contended_ms),
        contended_ratio=_speed_ratio(samples.quiet_ms, samples.contended_ms),
    )


def _added_ratios(
    by_context: Mapping[int, float], kv_bytes: Mapping[int, int], bandwidth_gbs: float | None
) -> dict[int, float]:
    if not bandwidth_gbs or 0 not in by_context:
        return {}
    return {
        context: (context_ms - by_context[0]) * bandwidth_gbs * 1e6 / kv_bytes[context]
        for context, context_ms in by_context.items()
        if context
    }


def _speed_ratio(quiet_ms: Sequence[float], contended_ms: Sequence[float]) -> float | None:
    if not quiet_ms or not contended_ms:
        return None
    return statistics.fmean(quiet_ms) / statistics.fmean(contended_ms)


def _ratios(times_ms: Mapping[int, float], base_ms: float | None) -> dict[int, float]:
    return {n: one_ms / base_ms for n, one_ms in times_ms.items()} if base_ms else {}


def _medians(samples: Mapping[_Key, Sequence[float]]) -> dict[_Key, float]:
    return {key: statistics.median(values) for key, values in samples.items() if values}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
