"""Plots of a measurement's document: PNG to look at, SVG to keep.

Knows: matplotlib where it is installed, which plots each document has.
Does not know: how anything was measured. Invariant: a plot shows what its document has, so a saved
document draws the same plots, on light paper and on dark; without values for a plot there is none.
Cost: importing matplotlib takes a second, so nothing is imported before a plot is asked for.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import msgspec

from chatrt.bench.document import encode_line
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from chatrt.bench.plots_style import Theme

_DPI = 150


def require_matplotlib() -> None:
    """Raise InvalidValue unless plots can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidValue("--plot needs matplotlib: install chatrt with its extra [bench]")


def draw_document(
    document: Mapping[str, Any],
    folder: Path,
    *,
    only: Collection[str] | None = None,
    suffixes: Sequence[str] = ("png", "svg"),
) -> list[Path]:
    """Draw the plots of a document into `folder`, made if need be; the files that were written.

    `only` are names of plots, all of the document's if None.

    Raises:
        InvalidValue: matplotlib is not installed.
        OSError: The folder cannot be written.
    """
    require_matplotlib()
    from chatrt.bench.plots_style import THEMES

    folder.mkdir(parents=True, exist_ok=True)
    # A document made a moment ago still has numbers as keys, a saved one has texts.
    saved = msgspec.json.decode(encode_line(document), type=dict[str, Any])
    written = []
    for theme in THEMES:
        for name, figure in _figures(saved, theme, only).items():
            for suffix in suffixes:
                path = folder / f"{document['benchmark']}-{name}-{theme.name}.{suffix}"
                # The date would make the same plot another file each time.
                date = {"Date": None} if suffix == "svg" else None
                figure.savefig(path, dpi=_DPI, bbox_inches="tight", metadata=date)
                written.append(path)
    return written


def _figures(
    document: Mapping[str, Any], theme: Theme, only: Collection[str] | None
) -> dict[str, Figure]:
    """The plots that the document has values for, by name."""
    from chatrt.bench import plots_stall, plots_step, plots_ttft

    plots = {
        "sessions": {
            "ttft-distribution": plots_ttft.sessions_distribution,
            "ttft-by-history": plots_ttft.sessions_by_history,
            "ttft-by-turn": plots_ttft.sessions_by_turn,
        },
        "histories": {
            "ttft-distribution": plots_ttft.histories_distribution,
            "ttft-by-history": plots_ttft.histories_by_length,
        },
        "stall": {
            "gaps": plots_stall.gaps_over_time,
            "delay-by-budget": plots_stall.delay_by_budget,
        },
        "step": {"decode-by-rows": plots_step.decode_by_rows},
        "speculation": {"acceptance-by-position": plots_step.acceptance_by_position},
    }
    drawn = {
        name: draw(document, theme)
        for name, draw in plots.get(document["benchmark"], {}).items()
        if only is None or name in only
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}
