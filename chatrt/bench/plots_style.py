"""How every plot looks: readable at half a page's width, on light paper and on dark.

Knows: matplotlib's objects. Does not know: any one measurement. Invariant: no global state of
matplotlib is touched; a figure is drawn by itself; the same thing has the same colour everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

_SIZE_INCHES = (5.4, 3.5)
_FURTHER = 0.6  # of the first one's size: what each further row or column of axes adds
_LEGEND_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours for one kind of paper; `colors` are told apart whatever colours a person sees."""

    name: str
    paper: str
    ink: str
    muted: str
    grid: str
    colors: Mapping[str, str]


# Okabe and Ito's colours; on dark paper the darker ones are lightened.
LIGHT = Theme(
    name="light",
    paper="#FFFFFF",
    ink="#222222",
    muted="#777777",
    grid="#E4E4E4",
    colors={
        "blue": "#0072B2",
        "orange": "#E69F00",
        "green": "#009E73",
        "pink": "#CC79A7",
        "sky": "#56B4E9",
        "red": "#D55E00",
    },
)
DARK = Theme(
    name="dark",
    paper="#0D1117",
    ink="#E6EDF3",
    muted="#9198A1",
    grid="#2A313A",
    colors={
        "blue": "#4AA8E0",
        "orange": "#F0B429",
        "green": "#2FC79A",
        "pink": "#E29BC4",
        "sky": "#9AD4F5",
        "red": "#FF8A4C",
    },
)
THEMES = (LIGHT, DARK)


class Plot:
    """One plot being drawn: its figure, and its axes row by row.

    `subtitle` says on what it was measured.
    """

    def __init__(
        self, theme: Theme, title: str, subtitle: str = "", *, columns: int = 1, rows: int = 1
    ) -> None:
        width, height = _SIZE_INCHES
        size = (width * (1 + _FURTHER * (columns - 1)), height * (1 + _FURTHER * (rows - 1)))
        self.theme = theme
        self.figure = Figure(figsize=size, facecolor=theme.paper)
        self.figure.set_layout_engine("constrained")
        self.figure.suptitle(title, fontsize=11, fontweight="bold", color=theme.ink)
        grid = self.figure.subplots(rows, columns, squeeze=False)
        self.axes: list[Axes] = [one for row in grid for one in row]
        self.axes[0].set_title(subtitle, fontsize=7.5, loc="left", color=theme.muted)
        for one in self.axes:
            self._style(one)

    def color(self, name: str) -> str:
        """`ink`, `muted` or one of the theme's colours, as matplotlib takes it."""
        own = {"ink": self.theme.ink, "muted": self.theme.muted}
        return own.get(name) or self.theme.colors[name]

    def cumulative(self, axes: Axes, values: Sequence[float], *, label: str, color: str) -> None:
        """What share of the values lies at or below each of them."""
        ordered = sorted(values)
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        axes.step(
            [ordered[0], *ordered],
            [0.0, *shares],
            where="post",
            label=f"{label} (n = {len(ordered)})",
            color=self.color(color),
            linewidth=1.8,
        )

    def bar_line(self, axes: Axes, value: float, label: str, *, color: str = "red") -> None:
        """A level to hold against: dashed, right across."""
        axes.axhline(value, color=self.color(color), linestyle="--", linewidth=1, label=label)

    def finish(self) -> Figure:
        """The figure, with one legend below all axes; what several axes show is named once."""
        named: dict[str, Any] = {}
        for axes in self.axes:
            handles, labels = axes.get_legend_handles_labels()
            named |= dict(zip(labels, handles, strict=True))
        if named:
            self.figure.legend(
                list(named.values()),
                list(named),
                loc="outside lower center",
                ncols=min(len(named), _LEGEND_COLUMNS),
                frameon=False,
                fontsize=8.5,
                labelcolor=self.theme.ink,
            )
        return self.figure

    def _style(self, axes: Axes) -> None:
        theme = self.theme
        axes.set_facecolor(theme.paper)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(theme.muted)
        axes.grid(True, axis="both", color=theme.grid, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8.5, colors=theme.muted, labelcolor=theme.ink)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set_color(theme.ink)
            label.set_fontsize(9)


def plain_log(axes: Axes, which: str) -> None:
    """A logarithmic axis (`x` or `y`) whose numbers read as numbers."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def measured_on(document: Mapping[str, Any]) -> str:
    """The model, what it ran on, and the day, as the document has them."""
    threads = document["num_threads"]
    device = f"{document['device']}, {threads} threads" if document["device"] else "unknown device"
    return f"{document['model']} on {device}, {document['started_at'][:10]}"
