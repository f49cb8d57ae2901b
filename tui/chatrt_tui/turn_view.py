"""One turn in the transcript: the question, its place among branches, the answer.

Knows: how a turn looks, the keys of a selected one.
Does not know: the tree, what is done about a key: it asks whoever made it.
Invariant: it takes the keyboard only while it is selected; a click leaves the prompt its keys. What
a key asks for is asked before the next key is looked at, however busy the screen is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Static

from chatrt_tui.answer_view import AnswerView
from chatrt_tui.clean import clean_line, clean_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import ComposeResult

    from chatrt_tui.branches import Place, Turn

Action: TypeAlias = Literal[
    "select", "leave", "edit", "regenerate", "fork", "previous", "next", "copy", "copy_code", "up",
    "down", "thought",
]  # fmt: skip
_SYSTEM_CHARS = 60


class UserMessage(Static):
    """What the person said, as they wrote it."""

    DEFAULT_CSS = """
    UserMessage {
        margin: 1 1 1 1;
        padding: 0 1;
        border-left: outer $primary;
        background: $boost;
        height: auto;
    }
    """

    def __init__(self, text: str) -> None:
        super().__init__(clean_text(text), markup=False)

    def show(self, text: str) -> None:
        """Show `text` instead."""
        self.update(clean_text(text))


class BranchLine(Static):
    """`‹ 2/3 ›`: which of several branches this is; a click on either half moves there."""

    DEFAULT_CSS = """
    BranchLine { width: auto; height: 1; margin: 0 2 1 2; color: $text-accent; }
    """
    ALLOW_SELECT = False

    class Clicked(Message):
        """A half was clicked: `step` is -1 or 1."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    def __init__(self, place: Place) -> None:
        super().__init__(f"‹ {place} ›", markup=False)

    def show(self, place: Place) -> None:
        """Show another place."""
        self.update(f"‹ {place} ›")

    def on_click(self, event: events.Click) -> None:
        """Go where the click points."""
        event.stop()
        self.post_message(self.Clicked(-1 if event.x < self.size.width // 2 else 1))


class TurnView(AnswerView, can_focus=False):
    """A turn; `turn.question` and `turn.answer` as they stand, growing if it runs.

    `ask` is told what the person wants with it. It is an answer with its question above it: one box
    around both would be laid out once more for each text that comes.
    """

    DEFAULT_CSS = """
    TurnView {
        height: auto;
        & > .system { padding: 1 2 0 2; color: $text-disabled; height: auto; }
        &.-branched > UserMessage { margin: 1 1 0 1; }
        &.-edited > UserMessage { border-left: outer $warning; }
        &:focus { background: $primary 12%; }
        &:focus > UserMessage { border-left: outer $accent; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key, f"ask('{action}')", label, show=bool(label), key_display=told, priority=True)
        for key, action, label, told in (
            ("e", "edit", "Edit", None),
            ("r", "regenerate", "Regenerate", None),
            ("f", "fork", "Fork", None),
            ("left", "previous", "Branch", "←→"),
            ("right", "next", "", None),
            ("y", "copy", "Copy", None),
            ("c", "copy_code", "Code", None),
            ("t", "thought", "", None),
            ("up,k", "up", "", None),
            ("down,j", "down", "", None),
            ("escape,enter", "leave", "Back", "esc"),
        )
    ]

    def __init__(self, turn: Turn, place: Place, ask: Callable[[TurnView, Action], None]) -> None:
        super().__init__()
        self.turn = turn
        self._ask = ask
        self._question = UserMessage(turn.question)
        self._branch: BranchLine | None = None
        self._place = place
        self._is_folded = False

    def compose(self) -> ComposeResult:
        """From top to bottom; the answer is empty so far."""
        if self.turn.system:
            told = clean_line(self.turn.system)
            cut = told if len(told) <= _SYSTEM_CHARS else told[: _SYSTEM_CHARS - 1] + "…"
            yield Static(f"System: {cut}", markup=False, classes="system")
        yield self._question
        if self._place.count > 1:
            self.add_class("-branched")
            yield self._new_branch_line(self._place)
        yield from super().compose()

    async def show_place(self, place: Place) -> None:
        """Which branch it is, of how many; most turns are the only one and stay as they are."""
        if place == self._place:
            return
        self._place = place
        self.set_class(place.count > 1, "-branched")
        if self._is_folded:
            return  # it is shown when the turn is
        if place.count == 1:
            await self.query(BranchLine).remove()
        elif self._branch is None or not self._branch.is_attached:
            await self.mount(self._new_branch_line(place), after=self._question)
        else:
            self._branch.show(place)

    def _new_branch_line(self, place: Place) -> BranchLine:
        self._branch = BranchLine(place)
        return self._branch

    def show_question(self, text: str) -> None:
        """Another question, as one asked elsewhere becomes known."""
        self._question.show(text)

    async def show_answer(self) -> None:
        """The answer of a turn as the tree has it; one that runs goes on growing."""
        turn = self.turn
        await self.append(turn.answer)
        if not turn.is_over:
            return
        if turn.result is not None:
            await self.finish(turn.result)
        else:
            await self.finish_old(stopped=turn.status in ("incomplete", "cancelled"))

    @property
    def is_folded(self) -> bool:
        """Whether there is only room for it."""
        return self._is_folded

    async def fold(self, num_rows: int) -> None:
        """Take away what is inside of a turn that is over; `num_rows` stay free for it."""
        self._is_folded = True
        self.styles.height = num_rows
        self._start_over()
        await self.remove_children()

    async def unfold(self) -> None:
        """Show again what is inside; its room is kept until all of it is there."""
        self._is_folded = False
        self._pieces, self._branch = [], None
        self._question = UserMessage(self.turn.question)
        await self.mount(*self.compose())
        await self.show_answer()
        self.styles.height = None

    def take_keys(self) -> None:
        """Be the selected turn, for the very next key; the transcript scrolls to it."""
        self.can_focus = True
        self.screen.set_focus(self, scroll_visible=False)

    def takes(self, event: events.Key | events.Paste) -> bool:
        """Whether this is for a selected turn; what is not is meant for the prompt."""
        if isinstance(event, events.Paste):
            return False
        return not event.is_printable or event.key in self._bindings.key_to_bindings

    def on_blur(self) -> None:
        """Not selected any more, unless it is again: clicks go to the prompt."""
        self.can_focus = self.screen.focused is self

    def on_branch_line_clicked(self, event: BranchLine.Clicked) -> None:
        """A click on the branches."""
        event.stop()
        self._ask(self, "previous" if event.step < 0 else "next")

    def on_click(self, event: events.Click) -> None:
        """A click on the question selects the turn, unless it marked text."""
        if event.widget is self._question and not self.screen.get_selected_text():
            self._ask(self, "select")

    def action_ask(self, action: Action) -> None:
        """Say what the person wants."""
        self._ask(self, action)
