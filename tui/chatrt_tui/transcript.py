"""The transcript: the turns of the path shown, of which the newest are mounted.

Knows: which turns of a path have widgets, mounting older ones as one scrolls up, which of them are
folded, staying at the end only while the reader is there.
Does not know: the connection, the tree; it is told which turns to show.
Invariant: the mounted turns are the last ones of the path without a gap, the newest included. What
older turns add above never moves what one reads.
Cost: a change of branch mounts what differs and no more; a path of any length shows its last turns
first, the others behind that, one at a time, so that a key press comes in between. Turns some
screens away from what one reads are folded: of however many there are, a few are laid out.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeAlias

from textual import work
from textual.containers import VerticalScroll
from textual.widgets import Static

from chatrt_tui.answer_view import Note
from chatrt_tui.containers import Blank
from chatrt_tui.turn_view import TurnView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual.geometry import Region
    from textual.widget import Widget

    from chatrt_tui.branches import Place, Turn
    from chatrt_tui.turn_view import Action

_Placed: TypeAlias = "tuple[TurnView, Region]"
# So many turns are mounted unasked, some of them at once; past the most the oldest leave.
FIRST_TURNS = 12
MOST_TURNS = 24
_AT_ONCE = 3
_OLDER_AT_ONCE = 4
# Screens between what one reads and a turn that is whole again, and one that is folded.
_WHOLE_WITHIN = 1
_FOLDED_FROM = 3


class Transcript(VerticalScroll, Blank, can_focus=False):
    """A path of turns; anchored to its end until the reader scrolls away.

    `place` says where a turn stands among its siblings; `ask` is told what is wanted with it.
    """

    DEFAULT_CSS = """
    Transcript {
        height: 1fr;
        scrollbar-size-vertical: 1;
        scrollbar-background: $background;
        scrollbar-color: $foreground 15%;
        padding-bottom: 1;
        & > .welcome { padding: 1 2; color: $text-muted; height: auto; }
        & > .goes-on { padding: 1 2 0 2; color: $text-muted; height: auto; }
    }
    """

    def __init__(
        self, place: Callable[[Turn], Place], ask: Callable[[TurnView, Action], None]
    ) -> None:
        super().__init__()
        self._place = place
        self._ask = ask
        self._path: list[Turn] = []
        self._views: dict[Turn, TurnView] = {}  # of the last turns of the path, in order
        self._changes = asyncio.Lock()  # of which turns have widgets, but for one more at the end
        self._is_extending = False
        self._is_folding = False

    def on_mount(self) -> None:
        """Stay at the end."""
        self.anchor()

    @property
    def views(self) -> list[TurnView]:
        """The mounted turns, the oldest first."""
        return list(self._views.values())

    @property
    def num_hidden(self) -> int:
        """Turns of the path that have no widgets yet."""
        return len(self._path) - len(self._views)

    def view(self, turn: Turn) -> TurnView | None:
        """The widget of a turn, if it has one."""
        return self._views.get(turn)

    async def show_path(self, path: Sequence[Turn], *, told: str = "", welcome: str = "") -> None:
        """Show these turns in place of those shown; what both begin with stays as it is.

        `told` is a remark behind the last turn; `welcome` stands where there is none.
        """
        async with self._changes:
            with self.app.batch_update():
                await self.query(".welcome, .goes-on, .-remark").remove()
                await self._show_turns(path)
                if told:
                    await self.mount(Static(told, markup=False, classes="goes-on"))
                elif welcome and not path:
                    await self.mount(Static(welcome, markup=False, classes="welcome"))
            self.anchor()
        self._fill()

    async def _show_turns(self, path: Sequence[Turn]) -> None:
        num_common = _num_common(self._path, path)
        common = set(path[:num_common])
        kept = {turn: view for turn, view in self._views.items() if turn in common}
        goes_on = bool(kept) and len(path) - num_common <= _AT_ONCE
        if not goes_on:
            kept, num_common = {}, max(0, len(path) - 1)  # the others come behind it
        gone = [view for turn, view in self._views.items() if turn not in kept]
        self._path, self._views = list(path), kept
        if gone:
            await self.remove_children(gone)
        # The newest first: it is what one looks at.
        views = {turn: self._new_view(turn) for turn in path[num_common:]}
        await self.refresh_places()
        self._views = {**kept, **views}
        for view in list(self._views.values())[:-1]:
            view.is_earlier = True
        above: TurnView | None = None
        for view in reversed(views.values()):
            await (self.mount(view) if above is None else self.mount(view, before=above))
            await view.show_answer()
            above = view

    @work(group="fill")
    async def _fill(self) -> None:
        """Mount older turns, one after the other, until there is something to scroll."""
        while self.num_hidden and len(self._views) < FIRST_TURNS:
            async with self._changes:
                await self._mount_older()

    async def _mount_older(self) -> None:
        """Give the youngest turn without widgets some, above the others."""
        if not self.num_hidden or not self.is_attached:
            return  # another path is shown by now, or none
        turn = self._path[self.num_hidden - 1]
        view = self._new_view(turn)
        view.is_earlier = True
        first = next(iter(self._views.values()), None)
        await self.mount(view, before=first)
        self._views = {turn: view, **self._views}
        await view.show_answer()

    async def add_turn(self, turn: Turn) -> TurnView:
        """Show a turn at the end, its answer empty so far; who reads further up stays there."""
        await self.query(".welcome, .goes-on").remove()
        if self._views:
            self.views[-1].is_earlier = True
        self._path.append(turn)
        view = self._views[turn] = self._new_view(turn)
        await self.mount(view)
        return view

    def _new_view(self, turn: Turn) -> TurnView:
        return TurnView(turn, self._place(turn), self._ask)

    def bring(self, view: TurnView, *, to_top: bool = False) -> None:
        """Have a turn on the screen; of a tall one its top, where it says which branch it is."""

        def scroll() -> None:
            is_tall = view.outer_size.height > self.size.height
            self.scroll_to_widget(view, top=to_top or is_tall, animate=False, force=True)

        self.call_after_refresh(scroll)

    async def remove_turn(self, turn: Turn) -> None:
        """Take the last turn away again."""
        self._path.remove(turn)
        await self._views.pop(turn).remove()

    def let_go(self, turn: Turn) -> None:
        """The last turn is no part of the path: it is shown until another path is."""
        self._path.remove(turn)
        self._views.pop(turn).add_class("-remark")

    async def add_note(self, text: str) -> None:
        """A remark at the end, until another path is shown."""
        note = Note(text)
        note.add_class("-remark")
        await self.mount(note)

    async def refresh_places(self) -> None:
        """The tree has grown: say anew which branch each turn is, and which is the newest."""
        for turn, view in list(self._views.items()):
            await view.show_place(self._place(turn))
            view.is_earlier = turn is not self._path[-1]

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Near the top older turns are mounted."""
        super().watch_scroll_y(old_value, new_value)
        self._begin_folding()
        if new_value < self.size.height and not self._is_at_end:
            self.load_older()

    @property
    def _is_at_end(self) -> bool:
        return self.is_anchored and not self._anchor_released

    def load_older(self) -> None:
        """Mount some more of the older turns, if there are any without widgets."""
        if self.num_hidden and not self._is_extending:
            self._is_extending = True
            self._extend()

    @work(group="older")
    async def _extend(self) -> None:
        """Mount older turns; what one reads stays where it is."""
        try:
            async with self._changes:
                with self.app.batch_update():
                    for _ in range(_OLDER_AT_ONCE):
                        await self._mount_older()
                    below = self.max_scroll_y - self.scroll_y  # nothing was laid out since
                    # One layout, not painted: only behind it one knows how far all has moved.
                    self.screen._refresh_layout()
                    if not self._is_at_end:
                        y = self.max_scroll_y - below
                        self.scroll_to(y=y, animate=False, immediate=True)
        finally:
            self._is_extending = False

    def anchor(self, anchor: bool = True) -> None:
        """Be at the end, and stay there."""
        super().anchor(anchor)
        self.call_after_refresh(self._begin_folding)  # no scrolling tells of it

    def _begin_folding(self) -> None:
        is_long = len(self._views) > MOST_TURNS
        if self._is_folding or not (is_long or any(view.is_folded for view in self.views)):
            return
        self._is_folding = True
        self._fold_and_unfold()

    @work(group="fold")
    async def _fold_and_unfold(self) -> None:
        """Have whole turns around what one reads and folded ones far from it."""
        try:
            while self.is_attached:
                async with self._changes:
                    folded, far = self._out_of_place()
                    if folded is not None:
                        await self._unfold(*folded)
                    for view, region in far:
                        await view.fold(region.height)
                    if folded is None and not far:
                        return
        finally:
            self._is_folding = False

    def _out_of_place(self) -> tuple[_Placed | None, list[_Placed]]:
        """The turn to be unfolded next, nearest to what one reads, and those to be folded."""
        top, screen = self.scroll_offset.y, self.size.height
        regions = self._regions()
        folded: list[tuple[int, _Placed]] = []
        far: list[_Placed] = []
        may_fold = len(self._views) > MOST_TURNS
        for turn, view in self._views.items():
            region = regions.get(view)
            if region is None:
                continue
            away = max(top - region.bottom, region.y - (top + screen))
            if view.is_folded and away <= _WHOLE_WITHIN * screen:
                folded.append((away, (view, region)))
            elif may_fold and away >= _FOLDED_FROM * screen and self._may_fold(turn, view):
                far.append((view, region))
        return min(folded, key=lambda one: one[0], default=(0, None))[1], far

    def _regions(self) -> dict[Widget, Region]:
        """Where everything inside is, on the screen or not."""
        placements = self.arrange(self.scrollable_content_region.size).placements
        return {placement.widget: placement.region for placement in placements}

    def _may_fold(self, turn: Turn, view: TurnView) -> bool:
        is_newest = turn is self._path[-1]
        return turn.is_over and not (view.is_folded or view.has_focus or is_newest)

    async def _unfold(self, view: TurnView, region: Region) -> None:
        """Show a turn again; what one reads stays where it is."""
        with self.app.batch_update():
            await view.unfold()
            self.screen._refresh_layout()  # not painted: only behind it one can scroll there
            # Not by its own size, which is told only to widgets that are on the screen.
            grown = self._regions()[view].height - region.height if view.is_attached else 0
            if grown and region.bottom <= self.scroll_offset.y and not self._is_at_end:
                self.scroll_to(y=self.scroll_y + grown, animate=False, immediate=True)

    async def trim(self) -> None:
        """Take the widgets of old turns away again, where the reader is at the end anyway."""
        async with self._changes:
            if len(self._views) > MOST_TURNS and self._is_at_end:
                old = list(self._views)[: len(self._views) - FIRST_TURNS]
                await self.remove_children([self._views.pop(turn) for turn in old])

    def last_answer(self) -> str:
        """The text of the newest answer, empty if there is none."""
        shown = self.query_children(TurnView)
        return shown.last().text if shown else ""


def _num_common(one: Sequence[Turn], other: Sequence[Turn]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a is not b), min(len(one), len(other)))
