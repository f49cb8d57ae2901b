"""Plots of `bench stall`: gaps over time, and what a prompt waits by the gap budget.

Knows: its document. Does not know: files. Invariant: a gap stands at its end, when the delta that
ended it arrived.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from chatrt.bench.plots_style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    SKY,
    label_axes,
    measured_on,
    new_plot,
    plain_log,
)
from chatrt.bench.stall_figures import PROMPT_DELAY_BAR

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STREAM_COLORS = (BLUE, ORANGE, GREEN, PINK, SKY)


def gaps_over_time(document: Mapping[str, Any]) -> Figure | None:
    """One round of each budget, its middle one: every gap, with the competing prefill marked."""
    rounds = [one for one in map(_middle_round, document["samples"]) if one is not None]
    if not rounds:
        return None
    figure, axes = new_plot(
        "Chunk gaps while a long prompt arrives", measured_on(document), rows=len(rounds)
    )
    for one, round_ in zip(axes, rounds, strict=True):
        _draw_round(one, *round_)
    axes[-1].set_xlabel("seconds since the streams began", fontsize=9.5)
    return figure


def delay_by_budget(document: Mapping[str, Any]) -> Figure | None:
    """Prompt delay, and the gaps' p99, against the gap budget; for more than one budget."""
    runs = [one for one in document["budgets"] if one["prompt_delay_ratio"] is not None]
    if len(runs) < 2:
        return None
    runs = sorted(runs, key=lambda run: run["max_gap_ms"] or float("inf"))
    names = [_budget(run["max_gap_ms"]) for run in runs]
    places = range(len(runs))
    figure, (left, right) = new_plot(
        "What a gap budget costs and keeps", measured_on(document), columns=2
    )
    left.plot(places, [run["prompt_delay_ratio"] for run in runs], color=BLUE, marker="o")
    left.axhline(PROMPT_DELAY_BAR, color=RED, linestyle="--", linewidth=1, label="bar")
    left.axhline(1.0, color=GREY, linestyle=":", linewidth=1, label="as alone")
    left.set_ylim(bottom=0)
    label_axes(left, "gap budget (ms)", "a long prompt's TTFT beside streams ÷ alone")
    for key, name, color in (("gap_ms_busy", "busy", BLUE), ("gap_ms_quiet", "quiet", GREEN)):
        values = [run[key]["p99"] for run in runs]
        right.plot(places, values, color=color, marker="o", label=f"p99, {name}")
    within = [(place, run["max_gap_ms"]) for place, run in enumerate(runs) if run["max_gap_ms"]]
    right.plot(*zip(*within, strict=True), color=RED, linestyle="--", linewidth=1, label="budget")
    plain_log(right, "y")
    label_axes(right, "gap budget (ms)", "chunk gap (ms)")
    for axes in (left, right):
        axes.set_xticks(list(places), names)
    return figure


def _middle_round(
    sample: Mapping[str, Any],
) -> tuple[float | None, list[dict[str, Any]], dict[str, Any]] | None:
    """The budget, the streams and the prompt of one round that ended well; None without one."""
    prompts = [p for p in sample["prompts"] if p["beside_streams"] and p["first_ms"] is not None]
    if not prompts:
        return None
    prompt = prompts[len(prompts) // 2]
    streams = [s for s in sample["streams"] if s["round_index"] == prompt["round_index"]]
    return sample["max_gap_ms"], streams, prompt


def _draw_round(
    axes: Axes, budget: float | None, streams: list[dict[str, Any]], prompt: dict[str, Any]
) -> None:
    start_ms = min(stream["sent_ms"] for stream in streams)
    labelled: set[int] = set()
    for stream in streams:
        gaps = list(itertools.pairwise(stream["delta_ms"]))
        index = stream["stream_index"]
        axes.scatter(
            [(end - start_ms) / 1e3 for _, end in gaps],
            [end - start for start, end in gaps],
            s=9,
            alpha=0.75,
            linewidths=0,
            color=_STREAM_COLORS[index % len(_STREAM_COLORS)],
            label=None if index in labelled else f"stream {index + 1}",
        )
        labelled.add(index)
    axes.axvspan(
        (prompt["sent_ms"] - start_ms) / 1e3,
        (prompt["first_ms"] - start_ms) / 1e3,
        color=GREY,
        alpha=0.18,
        linewidth=0,
        label=f"a prompt of {prompt['figures']['input_tokens']:,} tokens is prefilled",
    )
    if budget is not None:
        axes.axhline(budget, color=RED, linestyle="--", linewidth=1, label=f"budget, {budget:g} ms")
    axes.set_ylim(bottom=0)
    label_axes(axes, "", f"chunk gap (ms), budget {_budget(budget)}", outside=True)


def _budget(max_gap_ms: float | None) -> str:
    return "none" if max_gap_ms is None else f"{max_gap_ms:g}"
