"""The parts of `chatrt top`: small meters, the bar of pages, a table that changes in place.

Knows: how each is painted in some cells. Does not know: where the figures come from.
Invariant: nothing wraps; colours are the theme's, and words and shapes say the same without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rich.text import Text
from textual.containers import Vertical
from textual.content import Content
from textual.coordinate import Coordinate
from textual.widgets import DataTable, Sparkline, Static

from chatrt.wire.live import LiveServer, LiveTurn, RecentTurn
from chatrt_tui.top_figures import cells_of, fitting, more_pages, page_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult

    from chatrt_tui.top_figures import Column, Series

T = TypeVar("T", LiveTurn, RecentTurn)
_PARTS = (("█", "$primary"), ("▓", "$warning"), ("░", "$foreground 60%"))  # as `page_parts` has it


class Meter(Vertical):
    """A figure's percentiles in words, and its course as a line below."""

    DEFAULT_CSS = """
    Meter {
        width: 1fr;
        height: 2;
        padding-right: 2;
        & > Static { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._words = Static(markup=False)
        self._line = Sparkline()

    def compose(self) -> ComposeResult:
        """Words and line."""
        yield self._words
        yield self._line

    def show(self, series: Series) -> None:
        """Show other values."""
        self._words.update(series.title)
        self._line.data = list(series.values_ms) or None


class PagesBar(Static):
    """The device's pages by state: a bar, and below it the same in words."""

    DEFAULT_CSS = """
    PagesBar { height: 2; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._server = LiveServer()

    def show(self, server: LiveServer) -> None:
        """Show how the pages are used now."""
        self._server = server
        self.refresh()

    def render(self) -> Content:
        """Two lines."""
        parts = page_parts(self._server)
        cells = cells_of([number for _, number in parts], self.size.width)
        bar = [
            Content.styled(glyph * number, style)
            for (glyph, style), number in zip(_PARTS, cells, strict=True)
        ]
        words: list[Content | tuple[str, str] | str] = []
        for (glyph, style), (name, number) in zip(_PARTS, parts, strict=True):
            words += [(glyph, style), f" {name} {number} "]
        words.append(more_pages(self._server))
        return Content.assemble(*bar, "\n", *words)


class FiguresTable(DataTable[Text], Generic[T]):
    """Rows that change in place: what one looks at stays where it is. Arrows scroll."""

    DEFAULT_CSS = """
    FiguresTable {
        height: 1fr;
        min-height: 3;
        background: transparent;
        scrollbar-size-vertical: 1;
        & > .datatable--header { background: $boost; text-style: bold; }
    }
    """

    def __init__(self, columns: Sequence[Column[T]], **options: Any) -> None:
        super().__init__(show_cursor=False, zebra_stripes=False, **options)
        self._all_columns: Sequence[Column[T]] = columns
        self._shown: list[Column[T]] = []

    def show(self, rows: Sequence[T], num_cells: int) -> None:
        """Show these rows, in the columns for a screen of so many cells."""
        columns = fitting(self._all_columns, num_cells)
        if columns != self._shown:
            self._shown = columns
            self.clear(columns=True)
            for column in columns:
                self.add_column(_cell(column, column.title), width=column.width)
        for _ in range(self.row_count - len(rows)):
            self.remove_row(self.ordered_rows[-1].key)
        for index, row in enumerate(rows):
            cells = [_cell(column, column.text(row)) for column in columns]
            if index >= self.row_count:
                self.add_row(*cells)
            else:
                self._change(index, cells)

    def _change(self, index: int, cells: Sequence[Text]) -> None:
        for place, cell in enumerate(cells):
            coordinate = Coordinate(index, place)
            if self.get_cell_at(coordinate) != cell:
                self.update_cell_at(coordinate, cell)


def _cell(column: Column[T], text: str) -> Text:
    return Text(
        text, justify="left" if column.is_text else "right", overflow="ellipsis", no_wrap=True
    )
