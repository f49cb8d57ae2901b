"""One frame of `chatrt top` for pipes and scripts: the same words and columns, without a screen.

Knows: rich's tables. Does not know: Textual, terminals, where the figures come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rich.console import Group
from rich.table import Table
from rich.text import Text

from chatrt.wire.live import LiveTurn, RecentTurn
from chatrt_tui.top_figures import (
    LIVE_COLUMNS,
    RECENT_COLUMNS,
    drafts_line,
    fitting,
    headline,
    meters,
    more_pages,
    ordered,
    page_parts,
    work_line,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.wire.live import LiveFigures
    from chatrt_tui.top_figures import Column

T = TypeVar("T", LiveTurn, RecentTurn)


def frame(figures: LiveFigures, num_cells: int) -> Group:
    """What the screen shows, for a console that is `num_cells` wide."""
    server = figures.server
    pages = " · ".join(f"{name} {number}" for name, number in page_parts(server))
    lines = (
        headline(server),
        " · ".join(series.title for series in meters(figures)),
        f"{pages} {more_pages(server)}",
        work_line(server),
        drafts_line(server),
    )
    return Group(
        *(Text(line, overflow="ellipsis", no_wrap=True) for line in lines),
        Text(),
        _table("Your turns that run", LIVE_COLUMNS, ordered(figures.turns, "age"), num_cells),
        Text(),
        _table(
            "Your turns that ended, times in ms", RECENT_COLUMNS, figures.recent[::-1], num_cells
        ),
    )


def _table(
    title: str, columns: Sequence[Column[T]], rows: Sequence[T], num_cells: int
) -> Table | Text:
    if not rows:
        return Text(f"{title}: none")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    shown = fitting(columns, num_cells)
    for column in shown:
        table.add_column(
            column.title,
            justify="left" if column.is_text else "right",
            width=column.width,
            no_wrap=True,
        )
    for row in rows:
        table.add_row(*(Text(column.text(row)) for column in shown))
    return table
