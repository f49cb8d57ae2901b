"""The list of conversations: search, open, rename, export, delete.

Knows: the HTTP routes for conversations, how one is shown on a line.
Does not know: the transcript, the connection. The screen's result is the conversation to open.
Invariant: nothing is deleted at the first press, nothing is written over.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from textual import on, work
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from chatrt.errors import ChatrtError
from chatrt_tui import export
from chatrt_tui.branches import Tree
from chatrt_tui.clean import clean_line
from chatrt_tui.sheet import Sheet

if TYPE_CHECKING:
    from pathlib import Path

    from textual.app import ComposeResult

    from chatrt.client import ClientThread

_SHORTEST_TITLE = 8  # in cells
_UNTITLED = "(no title)"
_HELP = "Enter opens · ^R renames · ^E exports · ^D deletes · Esc goes back"
_SEARCH = "Search in titles and texts"
_TITLE_CHARS = 256  # the server takes no longer ones


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """One conversation of the list."""

    id: str
    title: str
    updated_at: float
    num_turns: int
    last_response_id: str | None

    @classmethod
    def of(cls, row: dict[str, Any]) -> ConversationRow:
        """From the server's object."""
        return cls(
            id=str(row["id"]),
            title=clean_line(str(row.get("title") or "")) or _UNTITLED,
            updated_at=float(row.get("updated_at") or row.get("created_at") or 0),
            num_turns=int(row.get("num_turns") or 0),
            last_response_id=row.get("last_response_id"),
        )


def age(seconds: float) -> str:
    """How long ago something was, in one short word."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return "now"


class ConversationsScreen(Sheet[ConversationRow | None]):
    """Lists conversations; the result is the chosen one, or None.

    `current_id` is the one that is open: it is marked, and cannot be deleted. In those of
    `answering` an answer runs: they are listed even before they have a turn.
    """

    DEFAULT_CSS = """
    ConversationsScreen {
        align: center middle;
        & > Vertical {
            width: 80%;
            max-width: 90;
            height: 80%;
            padding: 1 2;
            background: $surface;
            border: round $border;
            border-title-color: $text;
        }
        & Input { padding: 0 1; background: $boost; margin-bottom: 1; }
        & OptionList {
            height: 1fr;
            border: none;
            padding: 0;
            background: transparent;
            scrollbar-gutter: stable;
            scrollbar-size-vertical: 1;
            text-wrap: nowrap;
            text-overflow: ellipsis;
        }
        & Static { height: auto; color: $text-muted; padding-top: 1; }
    }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Back"),
        Binding("ctrl+r", "rename", "Rename", priority=True),
        Binding("ctrl+e", "export", "Export", priority=True),
        Binding("ctrl+d", "delete", "Delete", priority=True),
        Binding("up", "move(-1)", show=False, priority=True),
        Binding("down", "move(1)", show=False, priority=True),
    ]

    def __init__(
        self,
        client: ClientThread,
        current_id: str | None,
        *,
        folder: Path,
        answering: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self._answering = answering
        self._client = client
        self._routes = client.http
        self._current_id = current_id
        self._folder = folder
        self._rows: list[ConversationRow] = []
        self._to_delete: str | None = None
        self._renamed: ConversationRow | None = None
        self._query = ""
        self._listed: str | None = None  # the query whose rows are shown
        self._enter_waits = False  # for the rows of the query that stands there

    def compose(self) -> ComposeResult:
        """Search line, list, help."""
        with Vertical() as box:
            box.border_title = "Conversations"
            yield Input(placeholder=_SEARCH, compact=True)
            yield OptionList()
            yield Static(_HELP, markup=False)

    def on_mount(self) -> None:
        """Fill the list."""
        self._load("")

    @work(exclusive=True)
    async def _load(self, query: str, *, told: str = "") -> None:
        try:
            rows = await self._routes.conversations(query)
        except ChatrtError as error:
            self._enter_waits = False
            self._tell(error.message)
            return
        if self.is_left:
            return
        self._listed = query
        self._rows = [
            row
            for row in map(ConversationRow.of, rows)
            if row.num_turns or row.id in self._answering
        ]
        shown = self.query_one(OptionList).highlighted or 0
        self._fill(highlighted=min(shown, len(self._rows) - 1) if told else 0)
        none_found = "Nothing found." if query else "No conversations yet."
        self._tell(told if told and self._rows else _HELP if self._rows else f"{told} {none_found}")
        if self._enter_waits:
            self._enter_waits = False
            await self._choose()

    def on_resize(self) -> None:
        """Cut the titles anew, once the list has its new width."""
        self.call_after_refresh(self._fill)

    def _fill(self, highlighted: int | None = None) -> None:
        """List the rows; without `highlighted` the highlight stays where it is."""
        if self.is_left:
            return
        options = self.query_one(OptionList)
        width = options.scrollable_content_region.width
        highlighted = options.highlighted if highlighted is None else highlighted
        options.clear_options()
        options.add_options([Option(self._line(row, width), id=row.id) for row in self._rows])
        options.highlighted = highlighted if self._rows else None

    def _line(self, row: ConversationRow, width: int) -> Content:
        """Title and figures on one line of `width` cells: the title gives way."""
        turns = f"{row.num_turns} turn{'s' if row.num_turns != 1 else ''}"
        is_answering = row.id in self._answering
        here = " · open" if row.id == self._current_id else " · answering" if is_answering else ""
        figures = Content.styled(f"  {turns} · {age(time.time() - row.updated_at)}{here}", "dim")
        width_left = max(width - figures.cell_length, _SHORTEST_TITLE)
        return Content(row.title).truncate(width_left, ellipsis=True) + figures

    def _tell(self, text: str) -> None:
        if not self.is_left:
            self.query_one(Static).update(clean_line(text))

    def _highlighted(self) -> ConversationRow | None:
        if self._listed != self._query:
            return None  # rows of another query than the one that stands there
        index = self.query_one(OptionList).highlighted
        return None if index is None or index >= len(self._rows) else self._rows[index]

    @on(Input.Changed)
    def _search(self, event: Input.Changed) -> None:
        if self._renamed is None and event.value != self._query:
            self._query = event.value
            self._enter_waits = False
            self._load(event.value)

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    async def _choose(self) -> None:
        row = self._highlighted()
        if self._renamed is not None:
            await self._rename(self._renamed, self.query_one(Input).value)
        elif row is not None:
            self.dismiss(row)
        else:
            self._enter_waits = self._listed != self._query

    def action_close(self) -> None:
        """Leave without choosing, or without renaming."""
        if self._renamed is not None:
            self._end_renaming("")
        else:
            self.dismiss(None)

    def action_rename(self) -> None:
        """Let the line above the list be the highlighted conversation's title."""
        row = self._highlighted()
        if row is not None and self._renamed is None:
            self._renamed = row
            line = self.query_one(Input)
            line.placeholder = "The new title"
            line.value = "" if row.title == _UNTITLED else row.title
            line.cursor_position = len(line.value)
            line.focus()
            self._tell("Enter gives it this title · Esc leaves the old one")

    async def _rename(self, row: ConversationRow, title: str) -> None:
        bare = clean_line(title)
        if not bare or len(bare) > _TITLE_CHARS:
            self._tell(f"A title has 1 to {_TITLE_CHARS} characters, this one has {len(bare)}.")
            return
        try:
            await asyncio.wrap_future(self._client.rename(row.id, bare))
        except ChatrtError as error:
            self._tell(error.message)
            return
        self._end_renaming(f"Renamed to “{bare}”.")

    def _end_renaming(self, told: str) -> None:
        self._renamed = None
        if self.is_left:
            return
        line = self.query_one(Input)
        line.placeholder, line.value = _SEARCH, self._query
        self._load(self._query, told=told)

    @work(exclusive=True, group="export")
    async def action_export(self) -> None:
        """Write the highlighted conversation: its newest branch as Markdown, all as JSON."""
        row = self._highlighted()
        if row is None:
            return
        try:
            turns = await self._routes.turns(row.id)
            tree = Tree()
            tree.merge(turns)
            path = self._folder / export.file_name(row.title)
            document = export.as_markdown(row.title, tree.path_to(tree.newest))
            markdown = export.write_new(path.with_suffix(".md"), document)
            document = export.as_json(row.id, row.title, turns)
            json = export.write_new(path.with_suffix(".json"), document)
        except ChatrtError as error:
            self._tell(error.message)
            return
        self._tell(f"Written: {markdown} and {json.name}")

    def action_move(self, step: int) -> None:
        """Move the highlight, whatever has the focus."""
        if self._renamed is not None:
            return
        self._to_delete = None
        options = self.query_one(OptionList)
        options.action_cursor_down() if step > 0 else options.action_cursor_up()

    async def action_delete(self) -> None:
        """Delete the highlighted conversation, at the second press."""
        row = self._highlighted()
        if row is None or self._renamed is not None:
            return
        if row.id == self._current_id:
            self._tell("This one is open: start a new chat first.")
            return
        if self._to_delete != row.id:
            self._to_delete = row.id
            self._tell(f"Ctrl+D again deletes “{row.title}” for good.")
            return
        try:
            await self._routes.delete_conversation(row.id)
        except ChatrtError as error:
            self._tell(error.message)
            return
        self._load(self._query, told=f"Deleted “{row.title}”.")
