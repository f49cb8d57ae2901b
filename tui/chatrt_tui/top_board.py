"""Everything that `chatrt top` shows, from the whole server at the top to single turns below.

Knows: what stands where. Does not know: when the server is asked, keys.
Invariant: what was shown last stays while nothing new comes. Parts are held, not looked up: figures
that arrive while the screen is being taken down do no harm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.containers import Horizontal, Vertical
from textual.widgets import Static

from chatrt_tui.status import Banner
from chatrt_tui.top_figures import (
    LIVE_COLUMNS,
    RECENT_COLUMNS,
    drafts_line,
    headline,
    meters,
    ordered,
    work_line,
)
from chatrt_tui.top_widgets import FiguresTable, Meter, PagesBar

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from chatrt.wire.live import LiveFigures, LiveTurn, RecentTurn


class Board(Vertical):
    """The figures of one server."""

    DEFAULT_CSS = """
    Board {
        height: 1fr;
        padding: 0 1;
        & #head { height: 1; color: $text-muted; }
        & #meters { height: 2; }
        & .line { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
        & .title { color: $text-muted; }
        & .server { width: 1fr; padding-right: 2; }
        & .state { width: auto; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._server = _line("server")
        self._state = _line("state")
        self._banner = Banner()
        self._meters = (Meter(), Meter(), Meter())
        self._pages = PagesBar()
        self._work = _line()
        self._drafts = _line()
        self._live_title = _line("title")
        self._live: FiguresTable[LiveTurn] = FiguresTable(LIVE_COLUMNS, id="live")
        self._recent: FiguresTable[RecentTurn] = FiguresTable(RECENT_COLUMNS, id="recent")

    def compose(self) -> ComposeResult:
        """Lines, meters, bar and tables."""
        yield Horizontal(self._server, self._state, id="head")
        yield self._banner
        yield Horizontal(*self._meters, id="meters")
        yield self._pages
        yield self._work
        yield self._drafts
        yield self._live_title
        yield self._live
        title = _line("title")
        title.update("Your turns that ended, the newest first")
        yield title
        yield self._recent

    def focus_table(self) -> None:
        """Let arrows scroll the turns that run."""
        self._live.focus()

    def show_state(self, state: str, problem: str = "") -> None:
        """Say what the program does, and in a banner what is wrong, if anything is."""
        self._state.update(state)
        if problem:
            self._banner.tell(problem)
        else:
            self._banner.hide()

    def show(self, figures: LiveFigures, order: str) -> None:
        """Show these figures, turns that run in an order of `ORDERS`."""
        server, num_cells = figures.server, self.app.size.width
        self._server.update(headline(server))
        for meter, series in zip(self._meters, meters(figures), strict=True):
            meter.show(series)
        self._pages.show(server)
        self._work.update(work_line(server))
        self._drafts.update(drafts_line(server))
        self._live_title.update(f"Your turns that run, by {order}, times in ms")
        self._live.show(ordered(figures.turns, order), num_cells)
        self._recent.show(figures.recent[::-1], num_cells)


def _line(*classes: str) -> Static:
    """A line that is cut where the screen ends."""
    return Static(classes=" ".join(("line", *classes)), markup=False)
