"""Plots of time to first token: its distribution, by history, by turn.

Knows: the documents of `bench sessions` and `bench histories`. Does not know: files.
Invariant: failed turns are left out; each plot says in words which clock it shows.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from chatrt.bench.plots_style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    cumulative,
    label_axes,
    measured_on,
    new_plot,
    plain_log,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = {"cold": RED, "warm": BLUE, "forked": GREEN, "restored": PINK}
_CASES = {
    "cold": ("cold", RED, "s"),
    "follow_up": ("follow-up", BLUE, "o"),
    "typed_ahead": ("typed ahead", GREEN, "^"),
    "regenerate": ("regenerate", ORANGE, "v"),
    "fork": ("fork", SKY, "D"),
    "branch_switch": ("branch switch", BLACK, "x"),
    "restored": ("restored after kill -9", PINK, "P"),
}
_TTFT = "time to first token (ms, client)"


def sessions_distribution(document: Mapping[str, Any]) -> Figure | None:
    """Cold against warm turns of `bench sessions`, as cumulative shares."""
    values = {
        kind: [s["ttft_ms"] for s in _good(document) if s["kind"] == kind and s["ttft_ms"]]
        for kind in _KINDS
    }
    return _distribution(document, {kind: (values[kind], _KINDS[kind]) for kind in values})


def histories_distribution(document: Mapping[str, Any]) -> Figure | None:
    """Cold against warm turns of `bench histories`, over all lengths, as cumulative shares."""
    values = {
        name: (
            [s["figures"]["ttft_ms"] for s in _good(document) if s["case"] == case],
            color,
        )
        for case, (name, color, _) in _CASES.items()
        if case in ("cold", "follow_up", "typed_ahead", "restored")
    }
    known = {name: ([v for v in found if v], color) for name, (found, color) in values.items()}
    return _distribution(document, known)


def sessions_by_history(document: Mapping[str, Any]) -> Figure | None:
    """Each follow-up of `bench sessions` at the length of its history."""
    samples = [s for s in _good(document) if s["kind"] != "cold" and s["ttft_ms"]]
    if not samples:
        return None
    figure, (axes,) = new_plot(
        "Time to first token of follow-ups by history", measured_on(document)
    )
    for kind in ("warm", "forked", "restored"):
        chosen = [s for s in samples if s["kind"] == kind]
        if chosen:
            axes.scatter(
                [s["history_tokens"] for s in chosen],
                [s["ttft_ms"] for s in chosen],
                s=18,
                alpha=0.7,
                color=_KINDS[kind],
                label=f"{kind} (n = {len(chosen)})",
            )
    label_axes(axes, "tokens of history", _TTFT)
    return figure


def sessions_by_turn(document: Mapping[str, Any]) -> Figure | None:
    """TTFT, and cached beside computed tokens, from turn to turn of `bench sessions`; medians."""
    samples = [s for s in _good(document) if s["kind"] != "forked" and s["ttft_ms"]]
    turns = sorted({s["turn_index"] for s in samples})
    if not turns:
        return None
    by_turn = [[s for s in samples if s["turn_index"] == turn] for turn in turns]
    figure, (above, below) = new_plot("Turn by turn (medians)", measured_on(document), rows=2)
    above.scatter(
        [s["turn_index"] + 1 for s in samples],
        [s["ttft_ms"] for s in samples],
        s=14,
        alpha=0.35,
        color=BLUE,
        label="each turn",
    )
    above.plot(
        [turn + 1 for turn in turns],
        [statistics.median(s["ttft_ms"] for s in one) for one in by_turn],
        color=BLUE,
        marker="o",
        label="median",
    )
    cached = [statistics.median(s["cached_tokens"] for s in one) for one in by_turn]
    computed = [
        statistics.median(s["input_tokens"] - s["cached_tokens"] for s in one) for one in by_turn
    ]
    numbers = [turn + 1 for turn in turns]
    below.bar(numbers, cached, color=GREEN, width=0.6, label="cached")
    below.bar(numbers, computed, bottom=cached, color=ORANGE, width=0.6, label="computed")
    for axes in (above, below):
        axes.set_xticks(numbers)
        axes.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
        axes.set_ylim(bottom=0)
    label_axes(above, "", _TTFT)
    label_axes(below, "turn (1 is cold)", "tokens of the prompt")
    return figure


def histories_by_length(document: Mapping[str, Any]) -> Figure | None:
    """Every case of `bench histories` by the length of its history: medians, and each turn."""
    by_length = document["ttft_by_history_tokens"]
    if not by_length:
        return None
    figure, (axes,) = new_plot("Time to first token by history", measured_on(document))
    for case, (name, color, marker) in _CASES.items():
        medians = {int(n): one[case]["ttft_ms"]["p50"] for n, one in by_length.items()}
        known = {length: value for length, value in medians.items() if value is not None}
        if known:
            axes.plot(
                *zip(*known.items(), strict=True), color=color, marker=marker, ms=5, label=name
            )
            _dots(axes, [s for s in _good(document) if s["case"] == case], color=color)
    for key, name, style in (
        ("llama_cpp_published_ms", "llama.cpp, published", ":"),
        ("llama_cpp_ms", "llama.cpp, this run", "--"),
    ):
        points = [(int(length), _p50(one[key])) for length, one in by_length.items() if one[key]]
        measured = [(length, value) for length, value in points if value is not None]
        if measured:
            axes.plot(*zip(*measured, strict=True), style, color=GREY, marker=".", label=name)
    steps = [(int(length), one["decode_step_ms"]) for length, one in by_length.items()]
    two_steps = [(length, 2 * step) for length, step in steps if step]
    if two_steps:
        axes.plot(*zip(*two_steps, strict=True), "-.", color=GREY, linewidth=1, label="2 steps")
    plain_log(axes, "x")
    plain_log(axes, "y")
    axes.set_xticks([int(length) for length in by_length])
    axes.minorticks_off()
    label_axes(axes, "tokens of history", _TTFT, outside=True)
    return figure


def _dots(axes: Axes, samples: Sequence[Mapping[str, Any]], *, color: str) -> None:
    """Every turn beside its median."""
    timed = [s for s in samples if s["figures"]["ttft_ms"] is not None]
    axes.scatter(
        [s["history"] for s in timed],
        [s["figures"]["ttft_ms"] for s in timed],
        s=9,
        alpha=0.3,
        color=color,
        linewidths=0,
    )


def _distribution(
    document: Mapping[str, Any], values: Mapping[str, tuple[list[float], str]]
) -> Figure | None:
    known = {name: one for name, one in values.items() if one[0]}
    if not known:
        return None
    figure, (axes,) = new_plot("Time to first token, cold against warm", measured_on(document))
    for name, (found, color) in known.items():
        cumulative(axes, found, label=name, color=color)
    plain_log(axes, "x")
    axes.set_ylim(0, 1.02)
    label_axes(axes, _TTFT, "share of turns at or below", outside=True)
    return figure


def _good(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [sample for sample in document["samples"] if sample["error"] is None]


def _p50(value: dict[str, float | None] | float) -> float | None:
    return value["p50"] if isinstance(value, dict) else value
