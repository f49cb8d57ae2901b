"""Plots of one forward and of drafts: decode time by rows, acceptance by position.

Knows: the documents of `bench step` and `bench speculation`. Does not know: files.
Invariant: a plot stands on the run's own figures, nothing is fitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chatrt.bench.plots_style import Plot, measured_on

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

    from chatrt.bench.plots_style import Theme

_COLORS = ("blue", "orange", "green", "pink", "sky", "red")
_MARKERS = "os^vDP"


def decode_by_rows(document: Mapping[str, Any], theme: Theme) -> Figure | None:
    """What a forward takes by its rows, each sample beside the median, over the memory's limit."""
    samples = _by_number(document["samples"]["forward_ms"].get("rows", {}))
    medians = _by_number(document["rows_ms"])
    if not medians:
        return None
    plot = Plot(theme, "One forward by its rows", measured_on(document))
    [axes] = plot.axes
    axes.scatter(
        [rows for rows, values in samples.items() for _ in values],
        [value for values in samples.values() for value in values],
        s=10,
        alpha=0.3,
        linewidths=0,
        color=plot.color("sky"),
        label="each sample",
    )
    axes.plot(
        *zip(*medians.items(), strict=True), color=plot.color("blue"), marker="o", label="median"
    )
    bandwidth_gbs = document["read_bandwidth_gbs"]
    if bandwidth_gbs:
        least_ms = document["step_bytes"] / bandwidth_gbs / 1e6
        plot.bar_line(axes, least_ms, f"reading the weights, {bandwidth_gbs:.0f} GB/s")
    axes.set_xticks(list(medians))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="rows (1 decodes, 5 verify four drafts)", ylabel="forward (ms)")
    return plot.finish()


def acceptance_by_position(document: Mapping[str, Any], theme: Theme) -> Figure | None:
    """Of the rounds, the share that got so far: by place in the chain, drafter and temperature."""
    lines = {
        f"{drafter}, temperature {float(temperature):g}": one["accepted_per_position"]["of_rounds"]
        for drafter, by_temperature in document["drafters"].items()
        for temperature, one in by_temperature.items()
    }
    known = {name: shares for name, shares in lines.items() if shares}
    if not known:
        return None
    plot = Plot(theme, "Accepted drafts by position", measured_on(document))
    [axes] = plot.axes
    for index, (name, shares) in enumerate(known.items()):
        axes.plot(
            range(1, len(shares) + 1),
            shares,
            color=plot.color(_COLORS[index % len(_COLORS)]),
            marker=_MARKERS[index % len(_MARKERS)],
            label=name,
        )
    axes.set_xticks(range(1, max(map(len, known.values())) + 1))
    axes.set_ylim(0, 1)
    axes.set(xlabel="place in the chain of drafts", ylabel="share of rounds accepted so far")
    return plot.finish()


def _by_number(values: Mapping[str, Any]) -> dict[int, Any]:
    """With the keys that JSON made texts as numbers again, in order."""
    return dict(sorted((int(key), value) for key, value in values.items()))
