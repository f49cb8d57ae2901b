"""The prompt: a text area in which Enter sends.

Knows: its own text, the prompts sent before, which texts are commands.
Does not know: conversations, the server, what a command does. It posts `Prompt.Submitted`,
`Prompt.Commanded`, `Prompt.Unknown` and `Prompt.NotNow`.
Invariant: nothing but sending and the person's own keys ever changes the text. Keys take effect in
the order in which they were pressed: sending takes the text in the same step as the key press, and
keys that edit do not bubble, as bindings do, through parents that may be busy painting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.binding import Binding
from textual.message import Message
from textual.widgets import TextArea

from chatrt_tui import commands
from chatrt_tui.clean import clean_text
from chatrt_tui.clean_area import CleanTextArea

if TYPE_CHECKING:
    from textual import events

    from chatrt_tui.commands import Command

# The last two are how Shift+Enter and Alt+Enter arrive from terminals with `modifyOtherKeys`.
_NEWLINE_KEYS = frozenset({"ctrl+j", "alt+enter", "shift+enter", "shift+\r", "\r"})
_EDITING = {binding.key: binding.action for binding in Binding.make_bindings(TextArea.BINDINGS)}


class Prompt(CleanTextArea):
    """Enter sends; Ctrl+J, Alt+Enter and Shift+Enter make a new line; ↑ and ↓ recall.

    Ctrl+L empties it; what was there can be recalled.
    """

    DEFAULT_CSS = """
    Prompt {
        height: auto;
        min-height: 3;
        max-height: 12;
        border: round $border-blurred;
        background: transparent;
        padding: 0 1;
        scrollbar-size-vertical: 1;
        border-title-color: $text-warning;
        border-subtitle-color: $text-muted;
        &:focus { border: round $border; }
        & .text-area--cursor-line { background: transparent; }
    }
    """

    class Submitted(Message):
        """The person sends `text`, which is not blank."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Commanded(Message):
        """The person gives a command."""

        def __init__(self, command: Command, argument: str) -> None:
            super().__init__()
            self.command = command
            self.argument = argument

    class Unknown(Message):
        """The person gives a command that there is not; `told` says so, the text stays."""

        def __init__(self, told: str) -> None:
            super().__init__()
            self.told = told

    class NotNow(Message):
        """The person tries to send while sending is off; the text stays."""

    def __init__(self) -> None:
        super().__init__(
            id="prompt",
            highlight_cursor_line=False,
            placeholder="Write a message. Enter sends, Ctrl+J makes a new line, / lists commands.",
        )
        self._may_send = True
        self._history: list[str] = []
        self._recalled: int | None = None  # index into the history of the text shown

    def take_keys(self) -> None:
        """Have the keyboard, for the very next key."""
        self.screen.set_focus(self)

    def allow_sending(self) -> None:
        """Enter sends again; after a prompt was sent it does not, until this is called."""
        self._may_send = True

    def hold_sending(self) -> None:
        """Enter does not send until `allow_sending` is called."""
        self._may_send = False

    def give_back(self, text: str) -> None:
        """Put a text that could not be sent back, unless something new was typed."""
        if not self.text.strip():
            self.show(text)

    def show(self, text: str) -> None:
        """Put `text` in place of what is there, the cursor at its end."""
        self.text = text
        self.move_cursor(self.document.end)

    def remember(self, *texts: str) -> None:
        """Add texts to the history, the newest last."""
        self._history += [clean_text(text) for text in texts if text.strip()]
        self._recalled = None

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            self._send()
        elif event.key in _NEWLINE_KEYS:
            event.stop()
            event.prevent_default()
            self._replace_via_keyboard("\n", *self.selection)
        elif event.key == "ctrl+l":
            event.stop()
            event.prevent_default()
            self.remember(self.text)
            self.show("")
        elif event.key == "tab" and commands.is_command(self.text):
            event.stop()
            event.prevent_default()
            self.show(commands.completion(self.text) or self.text)
        elif event.key in _EDITING:
            event.stop()
            event.prevent_default()
            await self.run_action(_EDITING[event.key])
        else:
            await super()._on_key(event)

    def action_cursor_up(self, select: bool = False) -> None:
        """Move up; in an empty or a recalled prompt, show the prompt sent before."""
        index = len(self._history) if self._recalled is None else self._recalled
        if not select and self._may_recall() and self.cursor_at_first_line and index > 0:
            self._recall(index - 1)
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        """Move down; in a recalled prompt, show the prompt sent after it."""
        recalled = None if select else self._recalled
        if recalled is not None and self._may_recall() and self.cursor_at_last_line:
            self._recall(recalled + 1)
        else:
            super().action_cursor_down(select)

    def _send(self) -> None:
        if not self.text.strip():
            return
        if commands.is_command(self.text):
            self._command()
            return
        if not self._may_send:
            self.post_message(self.NotNow())
            return
        self._may_send = False
        self.post_message(self.Submitted(commands.as_message(self.text)))
        self.remember(self.text)
        self.text = ""

    def _command(self) -> None:
        command, argument = commands.parse(self.text)
        if command is None:
            self.post_message(self.Unknown(commands.unknown(self.text)))
            return
        self.post_message(self.Commanded(command, argument))
        self.remember(self.text)
        self.text = ""

    def _may_recall(self) -> bool:
        """Whether the text is empty, or a recalled one that was not changed."""
        shown = None if self._recalled is None else self._history[self._recalled]
        return not self.text or self.text == shown

    def _recall(self, index: int) -> None:
        if index < len(self._history):
            self._recalled = index
            self.show(self._history[index])
        else:
            self._recalled = None
            self.show("")
