"""`chatrt top`: what the server does right now, on one screen that keeps itself up to date.

Knows: when to ask, what to do while the server is away, keys.
Does not know: how a figure reads (`top_figures`), where it stands (`top_board`).
Invariant: the server is asked by a worker, one question at a time, so that a slow server never
holds up a key.
"""

from __future__ import annotations

import asyncio
from itertools import cycle
from typing import TYPE_CHECKING, ClassVar, Protocol

from textual import work
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.widgets import Footer

from chatrt.errors import ChatrtError
from chatrt_tui.top_board import Board
from chatrt_tui.top_figures import ORDERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.screen import Screen

    from chatrt.wire.live import LiveFigures


class LiveSource(Protocol):
    """Where the figures come from: `chatrt.client.HttpRoutes`."""

    async def live(self) -> LiveFigures:
        """What the server does right now.

        Raises:
            ChatrtError: There is no answer, or a refusal.
        """
        ...


class TopApp(App[None]):
    """Shows what `source` says, asked anew `interval_s` after each answer."""

    TITLE = "chatrt top"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "Quit", key_display="q", priority=True),
        Binding("p", "pause", "Pause"),
        Binding("s", "order", "Order"),
    ]

    def __init__(self, source: LiveSource, *, interval_s: float = 1.0) -> None:
        super().__init__()
        self._source = source
        self._interval_s = interval_s
        self._board = Board()
        self._figures: LiveFigures | None = None
        self._is_paused = False
        self._problem = ""
        self._orders = cycle(ORDERS)
        self._order = next(self._orders)

    def compose(self) -> ComposeResult:
        """The figures and the keys."""
        yield self._board
        yield Footer()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Every action, for the command palette."""
        yield SystemCommand("Pause", "Stop or go on asking", self.action_pause)
        yield SystemCommand("Order", "Order running turns otherwise", self.action_order)
        yield from super().get_system_commands(screen)

    def on_mount(self) -> None:
        """Ask for the first time."""
        self._board.focus_table()
        self._show_state()
        self._ask()

    def on_resize(self) -> None:
        """Other columns may fit now."""
        self.call_after_refresh(self._show)

    def action_pause(self) -> None:
        """Leave the screen as it is, or go on."""
        self._is_paused = not self._is_paused
        self._show_state()

    def action_order(self) -> None:
        """Put running turns into the next order."""
        self._order = next(self._orders)
        self._show()

    @work(exclusive=True)
    async def _ask(self) -> None:
        while True:
            if not self._is_paused:
                await self._ask_once()
            await asyncio.sleep(self._interval_s)

    async def _ask_once(self) -> None:
        figures, problem = None, ""
        try:
            figures = await self._source.live()
        except ChatrtError as error:
            problem = error.message
        if self._is_paused:  # since the question
            return
        self._problem = problem
        self._show_state()
        if figures is not None:
            self._figures = figures
            self._show()

    def _show_state(self) -> None:
        state = "asking again" if self._problem else f"every {self._interval_s:g} s"
        self._board.show_state("paused" if self._is_paused else state, self._problem)

    def _show(self) -> None:
        if self._figures is not None:
            self._board.show(self._figures, self._order)
