"""How every plot looks: one size, one quiet style, the same colour for the same thing.

Knows: matplotlib's objects. Does not know: any one measurement. Invariant: no global state of
matplotlib is touched; a figure is drawn by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

# Okabe and Ito's colours, which people tell apart whatever colours they see.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, BLACK, GREY = "#56B4E9", "#D55E00", "#222222", "#9A9A9A"
_SIZE_INCHES = (8.0, 4.6)


def new_plot(
    title: str, subtitle: str = "", *, columns: int = 1, rows: int = 1
) -> tuple[Figure, list[Axes]]:
    """An empty plot with its axes, row by row; `subtitle` says on what it was measured."""
    width, height = _SIZE_INCHES
    figure = Figure(figsize=(width * (1 + 0.45 * (columns - 1)), height * (1 + 0.45 * (rows - 1))))
    figure.set_layout_engine("constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold", color=BLACK)
    if subtitle:
        figure.supxlabel(subtitle, x=0.995, ha="right", fontsize=8, color=GREY)
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = [one for row in grid for one in row]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(True, axis="both", color="#E4E4E4", linewidth=0.7)
        one.set_axisbelow(True)
        one.tick_params(labelsize=9)
    return figure, axes


def plain_log(axes: Axes, which: str) -> None:
    """A logarithmic axis (`x` or `y`) whose numbers read as numbers."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def cumulative(axes: Axes, values: Sequence[float], *, label: str, color: str) -> None:
    """What share of the values lies at or below each of them."""
    ordered = sorted(values)
    shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
    axes.step(
        [ordered[0], *ordered],
        [0.0, *shares],
        where="post",
        label=f"{label} (n = {len(ordered)})",
        color=color,
        linewidth=1.8,
    )


def label_axes(axes: Axes, x: str, y: str, *, outside: bool = False) -> None:
    """Names of the axes, and the legend, on request beside the plot."""
    axes.set_xlabel(x, fontsize=9.5)
    axes.set_ylabel(y, fontsize=9.5)
    where: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)} if outside else {}
    axes.legend(frameon=False, fontsize=8.5, **where)


def measured_on(document: Mapping[str, Any]) -> str:
    """The model, what it ran on, and the day, as the document has them."""
    threads = document["num_threads"]
    device = f"{document['device']}, {threads} threads" if document["device"] else "unknown device"
    return f"{document['model']} on {device}, {document['started_at'][:10]}"
