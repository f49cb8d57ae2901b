"""Plots of `bench stall`: gaps over time, and what a prompt waits by the gap budget.

Knows: its document. Does not know: files. Invariant: a gap stands at its end, when the delta that
ended it arrived.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from chatrt.bench.plots_style import Plot, measured_on, plain_log
from chatrt.bench.stall_figures import PROMPT_DELAY_BAR

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from chatrt.bench.plots_style import Theme

_STREAM_COLORS = ("blue", "orange", "green", "pink", "sky")


def gaps_over_time(document: Mapping[str, Any], theme: Theme) -> Figure | None:
    """One round of each budget, its middle one: every gap, with the competing prefill marked."""
    rounds = [one for one in map(_middle_round, document["samples"]) if one is not None]
    if not rounds:
        return None
    title = "Chunk gaps while a long prompt arrives"
    plot = Plot(theme, title, measured_on(document), rows=len(rounds))
    for axes, round_ in zip(plot.axes, rounds, strict=True):
        _draw_round(plot, axes, *round_)
    plot.axes[-1].set_xlabel("seconds since the streams began")
    return plot.finish()


def delay_by_budget(document: Mapping[str, Any], theme: Theme) -> Figure | None:
    """Prompt delay, and the gaps' p99, against the gap budget; for more than one budget."""
    runs = [one for one in document["budgets"] if one["prompt_delay_ratio"] is not None]
    if len(runs) < 2:
        return None
    runs = sorted(runs, key=lambda run: run["max_gap_ms"] or float("inf"))
    places = range(len(runs))
    plot = Plot(theme, "What a gap budget costs and keeps", measured_on(document), rows=2)
    above, below = plot.axes
    delays = [run["prompt_delay_ratio"] for run in runs]
    above.plot(places, delays, color=plot.color("ink"), marker="o", label="prompt's delay")
    plot.bar_line(above, PROMPT_DELAY_BAR, f"at most {PROMPT_DELAY_BAR:g} ×", color="orange")
    above.set_ylim(bottom=0)
    above.set_ylabel("a long prompt's TTFT\nbeside streams ÷ alone")
    for key, name, color in (("gap_ms_busy", "busy", "blue"), ("gap_ms_quiet", "quiet", "green")):
        values = [run[key]["p99"] for run in runs]
        below.plot(places, values, color=plot.color(color), marker="o", label=f"gap p99, {name}")
    within = [(place, run["max_gap_ms"]) for place, run in enumerate(runs) if run["max_gap_ms"]]
    below.plot(
        *zip(*within, strict=True), color=plot.color("red"), linestyle="--", lw=1, label="budget"
    )
    plain_log(below, "y")
    below.set(xlabel="gap budget (ms)", ylabel="chunk gap (ms)")
    names = [_budget(run["max_gap_ms"]) for run in runs]
    for axes in plot.axes:
        axes.set_xticks(list(places), names)
    return plot.finish()


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
    plot: Plot,
    axes: Axes,
    budget: float | None,
    streams: list[dict[str, Any]],
    prompt: dict[str, Any],
) -> None:
    start_ms = min(stream["sent_ms"] for stream in streams)
    for stream in streams:
        gaps = list(itertools.pairwise(stream["delta_ms"]))
        index = stream["stream_index"]
        axes.scatter(
            [(end - start_ms) / 1e3 for _, end in gaps],
            [end - start for start, end in gaps],
            s=7,
            alpha=0.75,
            linewidths=0,
            color=plot.color(_STREAM_COLORS[index % len(_STREAM_COLORS)]),
            label=f"stream {index + 1}",
        )
    axes.axvspan(
        (prompt["sent_ms"] - start_ms) / 1e3,
        (prompt["first_ms"] - start_ms) / 1e3,
        color=plot.color("muted"),
        alpha=0.18,
        linewidth=0,
        label=f"prefill of {prompt['figures']['input_tokens']:,} tokens",
    )
    if budget is not None:
        plot.bar_line(axes, budget, "budget")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"chunk gap (ms)\nbudget {_budget(budget)}")


def _budget(max_gap_ms: float | None) -> str:
    return "none" if max_gap_ms is None else f"{max_gap_ms:g}"
