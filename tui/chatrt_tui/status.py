"""The status line under the transcript, and the banner above it.

Knows: how a state and figures are laid out on one line.
Does not know: where they come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.containers import Horizontal
from textual.widgets import Static

from chatrt_tui.clean import clean_line

if TYPE_CHECKING:
    from textual.app import ComposeResult


_GAP = 2  # between the two
_LEAST_STATE = 10  # characters


class StatusLine(Horizontal):
    """Figures of the last turn on the left, what the program is doing on the right.

    Where both do not fit, the right gives way.
    """

    _num_figures = 0
    _num_state = 0

    DEFAULT_CSS = """
    StatusLine {
        height: 1;
        padding: 0 2;
        color: $text-muted;
        & > Static { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
        & #figures { width: auto; max-width: 100%; padding-right: 2; }
        &.-full > #state { display: none; }
        & #state { width: 1fr; text-align: right; }
    }
    """

    def compose(self) -> ComposeResult:
        """Two labels."""
        yield Static(id="figures", markup=False)
        yield Static(id="state", markup=False)

    def show_figures(self, text: str) -> None:
        """Show the figures of a turn."""
        self._num_figures = len(text)
        self.query_one("#figures", Static).update(text)
        self._fit()

    def show_state(self, text: str) -> None:
        """Show what is going on."""
        self._num_state = len(text)
        self.query_one("#state", Static).update(text)
        self._fit()

    def on_resize(self) -> None:
        """There may be room for more, or for less."""
        self._fit()

    def _fit(self) -> None:
        """A state of which one would read a letter or two is not shown at all."""
        room = self.content_size.width - self._num_figures - _GAP
        self.set_class(0 < room < min(self._num_state, _LEAST_STATE), "-full")


class Banner(Static):
    """A line at the top that tells of a lost connection; hidden while there is nothing to tell."""

    DEFAULT_CSS = """
    Banner {
        display: none;
        height: auto;
        padding: 0 2;
        background: $warning 25%;
        color: $text-warning;
        &.-shown { display: block; }
    }
    """

    def __init__(self) -> None:
        super().__init__(id="banner", markup=False)

    def tell(self, text: str) -> None:
        """Show `text`."""
        self.update(clean_line(text))
        self.add_class("-shown")

    def hide(self) -> None:
        """Show nothing."""
        self.remove_class("-shown")
