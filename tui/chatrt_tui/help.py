"""All keys and commands on one screen.

Knows: the keys in words. Does not know: what they do.
Invariant: every command of `commands` is listed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from chatrt_tui.commands import COMMANDS
from chatrt_tui.sheet import Sheet

if TYPE_CHECKING:
    from textual.app import ComposeResult

_KEYS = {
    "Writing": (
        ("Enter", "send"),
        ("Ctrl+J, Alt+Enter", "new line"),
        ("↑ ↓", "earlier messages, in an empty prompt"),
        ("Ctrl+L", "empty the prompt; ↑ brings it back"),
        ("Ctrl+G", "write in your editor ($VISUAL, $EDITOR)"),
        ("Tab", "complete a command"),
        ("Esc", "stop the answer; leave an edit"),
    ),
    "Reading": (
        ("PgUp PgDn", "scroll"),
        ("Ctrl+End", "back to the end"),
        ("Ctrl+↑ Ctrl+↓", "select a turn"),
        ("Ctrl+T", "how the turn was answered; Alt+↑ Alt+↓ scroll it"),
        ("Ctrl+C", "copy what is marked; twice: quit"),
    ),
    "A selected turn": (
        ("e", "edit its message, in a branch of its own"),
        ("r", "have it answered once more"),
        ("f", "fork: go on from here"),
        ("← →", "other branches, ‹ 2/3 ›"),
        ("y", "copy the answer"),
        ("c", "copy its code, again for the block before"),
        ("t", "open or close its thought"),
    ),
    "Everywhere": (
        ("Ctrl+N", "new chat"),
        ("Ctrl+O", "conversations"),
        ("Ctrl+P", "command palette"),
        ("F1", "this help"),
    ),
}
_KEY_CELLS = 18


class HelpScreen(Sheet[None]):
    """Keys and commands; any of Esc, q, Enter or F1 leaves."""

    DEFAULT_CSS = """
    HelpScreen {
        align: center middle;
        & > VerticalScroll {
            width: 76; max-width: 100%; height: auto; max-height: 100%;
            padding: 0 2; background: $surface; border: round $border;
            border-title-color: $text; border-subtitle-color: $text-muted;
            scrollbar-size-vertical: 1;
        }
        & Static { height: auto; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,f1", "leave", "Back", key_display="esc"),
    ]

    def compose(self) -> ComposeResult:
        """All of it in one text."""
        with VerticalScroll() as box:
            box.border_title, box.border_subtitle = "Help", "↑ ↓ scroll · Esc goes back"
            yield Static(help_text())

    def action_leave(self) -> None:
        """Back to the chat."""
        self.dismiss(None)


def help_text() -> Content:
    """Keys, then commands."""
    lines: list[Content] = []
    for heading, keys in _KEYS.items():
        lines.append(Content.styled(heading, "bold $text-accent"))
        lines += [
            Content.assemble((f"  {key.ljust(_KEY_CELLS)}", "bold"), does) for key, does in keys
        ]
    lines.append(Content.styled("Commands, typed into the prompt", "bold $text-accent"))
    width = max(len(command.usage) for command in COMMANDS) + 2
    for command in COMMANDS:
        usage = f"  {command.usage}".ljust(width + 2)
        lines.append(Content.assemble((usage, "bold"), command.told))
    lines.append(Content("  A message that begins with / is typed with two of them: //"))
    return Content("\n").join(lines)
