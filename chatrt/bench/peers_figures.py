"""From turns of chatrt and its peers to times and ratios.

Knows: medians, which turns make a pair. Does not know: processes, servers, tables, JSON.
Invariant: a ratio is a peer's time ÷ ours of the same conversation in the same round, never of two
medians: what a shared machine does to one of a pair, it does to the other. Each spread has its n.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from chatrt.bench.peers import OURS
from chatrt.bench.peers_process import PEERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from chatrt.bench.peers import Measure, PeersSample
    from chatrt.bench.stall_figures import StallFigures

# What is compared, by its name in the JSON: our samples and a peer's. A peer drafts nothing, so
# that its plain decode stands against ours with drafts, too.
_PAIRS: dict[str, tuple[Measure, Measure]] = {
    "decode": ("decode", "decode"),
    "decode_speculation": ("decode_speculation", "decode"),
    "prefill": ("prefill", "prefill"),
    "ttft_cold": ("ttft_cold", "ttft_cold"),
    "ttft_warm": ("ttft_warm", "ttft_warm"),
}
ONE_STREAM = "serves one conversation at a time in its process, so that nothing can be beside it"
_PER_TOKEN = ("decode", "decode_speculation")


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle and the ends of `n` values; None without values."""

    median: float | None
    min: float | None
    max: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self:
        """The spread of the values that are not None."""
        known = [value for value in values if value is not None]
        if not known:
            return cls(None, None, None, 0)
        return cls(float(statistics.median(known)), min(known), max(known), len(known))


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: `time_ms` and `prompt_tokens` by engine, `ratio` by peer.

    `name` is that of the JSON; `history` None: all lengths together, or none. `prompt_tokens` and
    `computed_tokens` (those that were not cached) are medians, None where they are not told.
    """

    name: str
    history: int | None
    time_ms: dict[str, Spread]
    ratio: dict[str, Spread]
    prompt_tokens: dict[str, float | None]
    computed_tokens: dict[str, float | None]


def comparisons(samples: Sequence[PeersSample], peers: Sequence[str]) -> list[Row]:
    """A row for each comparison, then one for each history of those that have histories."""
    histories = sorted({one.history for one in samples if one.history is not None})
    rows = [_row(name, None, samples, peers) for name in _PAIRS]
    for name in ("ttft_cold", "ttft_warm"):
        for history in histories:
            those = [one for one in samples if one.history == history]
            rows.append(_row(name, history, those, peers))
    return rows


def ratios_document(rows: Sequence[Row], *, prefill_tokens: int) -> dict[str, Any]:
    """The rows as the JSON document has them.

    `ratio` goes by comparison and peer, `time_ms`, `prompt_tokens` and `computed_tokens` by
    comparison and engine; `by_history` holds the same by length. Null is what was not measured.
    """
    document: dict[str, Any] = {}
    by_history: dict[str, Any] = {}
    for row in rows:
        name = f"prefill_{prefill_tokens}" if row.name == "prefill" else row.name
        into = document
        if row.history is not None:
            into = by_history.setdefault(str(row.history), {})
        nothing = dict.fromkeys((OURS, *PEERS))
        values = dataclasses.asdict(row)
        for field in ("time_ms", "prompt_tokens", "computed_tokens"):
            into.setdefault(field, {})[name] = nothing | values[field]
        into.setdefault("ratio", {})[name] = dict.fromkeys(PEERS) | values["ratio"]
    return document | {"by_history": by_history}


def gaps_document(gaps: StallFigures | None) -> dict[str, Any]:
    """`gap_ms` by engine: ours alone and beside a prompt, null for peers, which `gap_notes` say."""
    ours = None
    if gaps is not None:
        both = {"alone": gaps.gap_ms_quiet, "beside_a_prompt": gaps.gap_ms_busy}
        ours = {name: dataclasses.asdict(one) for name, one in both.items()}
    return {
        "gap_ms": {OURS: ours, **dict.fromkeys(PEERS)},
        "gap_notes": {peer: f"{name} {ONE_STREAM}" for peer, name in PEERS.items()},
    }


def _row(
    name: str, history: int | None, samples: Sequence[PeersSample], peers: Sequence[str]
) -> Row:
    measures = dict.fromkeys(peers, _PAIRS[name][1]) | {OURS: _PAIRS[name][0]}
    turns = {
        engine: [one for one in samples if (one.engine, one.measure) == (engine, measure)]
        for engine, measure in measures.items()
    }
    times = {
        engine: {(one.round_index, one.history): time_ms(one) for one in those}
        for engine, those in turns.items()
    }
    return Row(
        name=name,
        history=history,
        time_ms={engine: Spread.of(found.values()) for engine, found in times.items()},
        ratio={peer: _ratio(times[peer], times[OURS]) for peer in peers},
        prompt_tokens={
            engine: Spread.of(one.times.prompt_tokens for one in those).median
            for engine, those in turns.items()
        },
        computed_tokens={
            engine: Spread.of(_computed_tokens(one) for one in those).median
            for engine, those in turns.items()
        },
    )


def time_ms(sample: PeersSample) -> float | None:
    """What a turn is judged by: its time per token for decode, else the time to its first text."""
    return sample.times.tpot_ms if sample.measure in _PER_TOKEN else sample.times.ttft_ms


def _computed_tokens(sample: PeersSample) -> float | None:
    cached = sample.times.cached_tokens
    return None if cached is None else sample.times.prompt_tokens - cached


def _ratio(
    theirs: Mapping[tuple[int, int | None], float | None],
    ours: Mapping[tuple[int, int | None], float | None],
) -> Spread:
    return Spread.of(
        their_ms / our_ms
        for pair, their_ms in theirs.items()
        if their_ms is not None and (our_ms := ours.get(pair))
    )
