"""Plots of time to first token: its distribution, by history, by turn.

Knows: the documents of `bench sessions` and `bench histories`. Does not know: files.
Invariant: failed turns are left out; each plot says in words which clock it shows.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from chatrt.bench.plots_style import Plot, measured_on, plain_log
from chatrt.bench.suite import number_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from chatrt.bench.plots_style import Theme

_KINDS = {"cold": "red", "warm": "blue", "forked": "green", "restored": "pink"}
_CASES = {
    "cold": ("cold", "red", "s"),
    "follow_up": ("follow-up", "blue", "o"),
    "typed_ahead": ("typed ahead", "green", "^"),
    "regenerate": ("regenerate", "orange", "v"),
    "fork": ("fork", "sky", "D"),
    "branch_switch": ("branch switch", "ink", "x"),
    "restored": ("after kill -9", "pink", "P"),
}
_DISTRIBUTED = ("cold", "follow_up", "typed_ahead", "restored")
_TTFT = "time to first token (ms, client)"


def sessions_distribution(document: Mapping[str, Any], theme: Theme) -> Figure | None:
    """Cold against warm turns of `bench sessions`, as cumulative shares."""
    good = [s for s in _good(document) if s["ttft_ms"]]
    values = {
        kind: ([s["ttft_ms"] for s in good if s["kind"] == kind], color)
        for kind, color in _KINDS.items()
    }
    return _distribution(document, theme, values)


def histories_distribution(document: Mapping[str, Any], theme: Theme) -> Figure | None:
    """Cold against warm turns of `bench histories`, over all lengths, as cumulative shares."""
    good = [s for s in _good(document) if s["figures"]["ttft_ms"]]
    values = {
        name: ([s["figures"]["ttft_ms"] for s in good if s["case"] == case], color)
        for case, (name, color, _) in _CASES.items()
        if case in _DISTRIBUTED
    }
    return _distribution(document, theme, values)


def sessions_by_history(document: Mapping[str, Any], theme: Theme) -> Figure | None:
    """Each follow-up of `bench sessions` at the length of its history."""
    samples = [s for s in _good(document) if s["kind"] != "cold" and s["ttft_ms"]]
    if not samples:
        return None
    plot = Plot(theme, "Time to first token of follow-ups by history", measured_on(document))
    [axes] = plot.axes
    for kind in ("warm", "forked", "restored"):
        chosen = [s for s in samples if s["kind"] == kind]
        if chosen:
            axes.scatter(
                [s["history_tokens"] for s in chosen],
                [s["ttft_ms"] for s in chosen],
                s=18,
                alpha=0.7,
                color=plot.color(_KINDS[kind]),
                label=f"{kind} (n = {len(chosen)})",
            )
    axes.set_ylim(bottom=0)
    axes.set(xlabel="tokens of history", ylabel=_TTFT)
    return plot.finish()


def sessions_by_turn(document: Mapping[str, Any], theme: Theme) -> Figure | None:
    """TTFT, and cached beside computed tokens, from turn to turn of `bench sessions`; medians."""
    samples = [s for s in _good(document) if s["kind"] in ("cold", "warm") and s["ttft_ms"]]
    turns = sorted({s["turn_index"] for s in samples})
    if not turns:
        return None
    by_turn = {turn + 1: [s for s in samples if s["turn_index"] == turn] for turn in turns}
    plot = Plot(theme, "Turn by turn (medians)", measured_on(document), rows=2)
    above, below = plot.axes
    above.scatter(
        [s["turn_index"] + 1 for s in samples],
        [s["ttft_ms"] for s in samples],
        s=14,
        alpha=0.4,
        color=plot.color("sky"),
        label="each turn",
    )
    medians = [statistics.median(s["ttft_ms"] for s in one) for one in by_turn.values()]
    above.plot(list(by_turn), medians, color=plot.color("blue"), marker="o", label="median TTFT")
    _tokens_by_turn(plot, below, by_turn)
    for axes in plot.axes:
        axes.set_xticks(list(by_turn))
        axes.set_xlim(min(by_turn) - 0.5, max(by_turn) + 0.5)
        axes.set_ylim(bottom=0)
    above.set_ylabel("TTFT (ms, client)")
    below.set(xlabel="turn (1 is cold)", ylabel="tokens of the prompt")
    return plot.finish()


def _tokens_by_turn(
    plot: Plot, axes: Axes, by_turn: Mapping[int, Sequence[Mapping[str, Any]]]
) -> None:
    numbers = list(by_turn)
    cached = [statistics.median(s["cached_tokens"] for s in one) for one in by_turn.values()]
    computed = [
        statistics.median(s["input_tokens"] - s["cached_tokens"] for s in one)
        for one in by_turn.values()
    ]
    axes.bar(numbers, cached, color=plot.color("green"), width=0.6, label="cached")
    axes.bar(
        numbers, computed, bottom=cached, color=plot.color("orange"), width=0.6, label="computed"
    )


def histories_by_length(document: Mapping[str, Any], theme: Theme) -> Figure | None:
    """Every case of `bench histories` by the length of its history: medians, and each turn."""
    by_length = document["ttft_by_history_tokens"]
    if not by_length:
        return None
    plot = Plot(theme, "Time to first token by history", measured_on(document))
    [axes] = plot.axes
    for case, (name, color, marker) in _CASES.items():
        medians = {int(n): number_at(one, (case, "ttft_ms", "p50")) for n, one in by_length.items()}
        known = {length: value for length, value in medians.items() if value is not None}
        if known:
            axes.plot(
                *zip(*known.items(), strict=True),
                color=plot.color(color),
                marker=marker,
                ms=4.5,
                linewidth=1.3,
                label=name,
            )
            samples = [s for s in _good(document) if s["case"] == case]
            _dots(axes, samples, color=plot.color(color))
    _beside(plot, axes, by_length)
    plain_log(axes, "x")
    plain_log(axes, "y")
    axes.set_xticks([int(length) for length in by_length])
    axes.minorticks_off()
    axes.set(xlabel="tokens of history", ylabel=_TTFT)
    return plot.finish()


def _beside(plot: Plot, axes: Axes, by_length: Mapping[str, Any]) -> None:
    """What the cases are held against: llama.cpp, and two decode steps."""
    points = [(int(length), one.get("llama_cpp_ms")) for length, one in by_length.items()]
    theirs = [(length, found["p50"]) for length, found in points if found and found["p50"]]
    if theirs:
        color = plot.color("muted")
        axes.plot(*zip(*theirs, strict=True), "--", color=color, marker=".", label="llama.cpp")
    steps = [(int(length), one["decode_step_ms"]) for length, one in by_length.items()]
    two_steps = [(length, 2 * step) for length, step in steps if step]
    if two_steps:
        axes.plot(
            *zip(*two_steps, strict=True),
            "-.",
            color=plot.color("muted"),
            linewidth=1,
            label="2 decode steps",
        )


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
    document: Mapping[str, Any], theme: Theme, values: Mapping[str, tuple[list[float], str]]
) -> Figure | None:
    known = {name: one for name, one in values.items() if one[0]}
    if not known:
        return None
    plot = Plot(theme, "Time to first token, cold against warm", measured_on(document))
    [axes] = plot.axes
    for name, (found, color) in known.items():
        plot.cumulative(axes, found, label=name, color=color)
    plain_log(axes, "x")
    axes.set_ylim(0, 1.02)
    axes.set(xlabel=_TTFT, ylabel="share of turns at or below")
    return plot.finish()


def _good(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [sample for sample in document["samples"] if sample["error"] is None]
