"""`response.chatrt`: a turn's own figures, as PROTOCOL 4 lists them.

Knows: stamps, counters, nanoseconds. Does not know: the wire's order of events, the engine.
Invariant: the stages of TTFT are consecutive, so they add up to `ttft_ms`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from chatrt.errors import InvalidValue
from chatrt.percentiles import percentile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatrt.turn import Divergence, FinishedEvent, KVFigures, SpeculationFigures, Stamps


def turn_figures(
    stamps: Stamps,
    finished: FinishedEvent,
    *,
    kv: KVFigures,
    delta_times_ns: Sequence[int],
    first_sent_ns: int | None,
    token: Callable[[int], str],
) -> dict[str, Any]:
    """The object for a terminal event.

    `first_sent_ns` is None if no text was sent; `token` spells a token id, and raises
    `InvalidValue` for one that the vocabulary lacks.
    """
    stamps.sent_ns = first_sent_ns or 0
    num_gaps = finished.num_generated - 1
    decode_ms = (finished.last_token_ns - finished.first_token_ns) / 1e6
    timed = num_gaps > 0 and decode_ms > 0
    ttft_ms = (first_sent_ns - stamps.received_ns) / 1e6 if first_sent_ns else None
    return {
        "ttft_ms": _rounded(ttft_ms),
        "stages": {name: _rounded(value) for name, value in stamps.stages_ms().items()},
        "tpot_ms": _rounded(decode_ms / num_gaps) if timed else None,
        "gap_ms": gap_figures(delta_times_ns),
        "decode_tps": _rounded(num_gaps / decode_ms * 1e3) if timed else None,
        "kv": _kv(kv, token),
        "seed": finished.seed,
        "speculation": _speculation(finished.speculation),
        "clock": {"received_ns": stamps.received_ns, "first_sent_ns": first_sent_ns},
    }


def gap_figures(times_ns: Sequence[int]) -> dict[str, float | int | None]:
    """Percentiles of the gaps between deltas, with their number."""
    gaps = sorted((b - a) / 1e6 for a, b in itertools.pairwise(times_ns))
    return {
        "p50": _rounded(percentile(gaps, 0.50)),
        "p95": _rounded(percentile(gaps, 0.95)),
        "p99": _rounded(percentile(gaps, 0.99)),
        "max": _rounded(gaps[-1]) if gaps else None,
        "n": len(gaps),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _kv(kv: KVFigures, token: Callable[[int], str]) -> dict[str, Any]:
    return {
        "prefix": kv.prefix,
        "reused_tokens": kv.reused_tokens,
        "restored_tokens": kv.restored_tokens,
        "restored_from": kv.restored_from,
        "computed_tokens": kv.computed_tokens,
        "typed_ahead_tokens": kv.typed_ahead_tokens,
        "dropped_turns": kv.dropped_turns,
        "resident_pages": kv.resident_pages,
        "shared_pages": kv.shared_pages,
        "miss_reason": kv.miss_reason,
        "first_divergence": _divergence(kv.first_divergence, token),
    }


def _divergence(
    divergence: Divergence | None, token: Callable[[int], str]
) -> dict[str, Any] | None:
    if divergence is None:
        return None
    return {
        "position": divergence.position,
        "held": _spelled(divergence.held, token),
        "asked": _spelled(divergence.asked, token),
    }


def _spelled(token_id: int | None, token: Callable[[int], str]) -> dict[str, Any] | None:
    if token_id is None:
        return None
    try:
        return {"id": token_id, "text": token(token_id)}
    except InvalidValue:  # a padded output layer has ids that the vocabulary does not name
        return {"id": token_id, "text": ""}


def _speculation(figures: SpeculationFigures) -> dict[str, Any]:
    return {
        "drafter": figures.drafter,
        "steps": figures.steps,
        "drafted": figures.drafted,
        "accepted": figures.accepted,
        "accepted_per_position": list(figures.accepted_per_position),
        "depths": list(figures.depths),
        "draft_ms": round(figures.draft_ms, 3),
        "verify_ms": round(figures.verify_ms, 3),
        "mean_accepted_length": round(figures.mean_accepted_length, 4),
    }
