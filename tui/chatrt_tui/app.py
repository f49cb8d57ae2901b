"""The terminal client's app: keys, commands and screens around one `Chat`.

Knows: which key does what. Does not know: turns, the connection, painting.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Input, TextArea

from chatrt_tui.chat import Chat
from chatrt_tui.conversations import ConversationRow, ConversationsScreen
from chatrt_tui.transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.screen import Screen

_QUIT_WINDOW_S = 3.0


class ChatApp(App[None]):
    """Chat with the server at `url`; `typing_ahead` sends what is typed before Enter, too."""

    TITLE = "chatrt"
    # Toasts keep away from the banner and from where an answer grows. Inline, a screen of
    # automatic height would have none: the transcript takes what is left, of nothing.
    CSS = """
    ToastRack { dock: top; align: right top; margin: 2 0 0 0; }
    Toast { width: auto; max-width: 80%; margin: 0; padding: 0 1; }
    Screen:inline { height: 66vh; min-height: 20; border: none; }
    Chat:inline { border-top: solid $border-blurred; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop"),
        Binding("ctrl+n", "new_chat", "New chat"),
        Binding("ctrl+o", "conversations", "Conversations"),
        Binding("ctrl+t", "details", "Details"),
        Binding("ctrl+c", "copy_or_quit", "Copy / quit", show=False, priority=True),
        Binding("pageup", "scroll_page(-1)", show=False, priority=True),
        Binding("pagedown", "scroll_page(1)", show=False, priority=True),
        Binding("ctrl+end", "scroll_to_end", show=False, priority=True),
    ]

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        model: str | None = None,
        typing_ahead: bool = True,
    ) -> None:
        super().__init__()
        self._chat = Chat(url, api_key, model=model, typing_ahead=typing_ahead)
        self._asked_to_quit_s = float("-inf")

    def compose(self) -> ComposeResult:
        """The chat and its keys."""
        yield self._chat
        yield Footer()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Every action, for the command palette."""
        yield SystemCommand("New chat", "Begin a new conversation", self.action_new_chat)
        yield SystemCommand(
            "Conversations", "Search, open or delete conversations", self.action_conversations
        )
        if self._chat.answering:
            yield SystemCommand("Stop", "Stop the answer, keep what came", self.action_stop)
        yield SystemCommand("Details", "Show each turn's figures in full", self.action_details)
        yield SystemCommand(
            "Copy answer", "Copy the newest answer as Markdown", self.action_copy_answer
        )
        change = "off" if self._chat.typing_ahead else "on"
        told, toggle = "Send what is being typed before Enter", self._chat.toggle_typing_ahead
        yield SystemCommand(f"Typing ahead: turn {change}", told, toggle)
        yield from super().get_system_commands(screen)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """`stop` shows only while there is something to stop."""
        return self._chat.answering if action == "stop" else True

    def on_notify(self) -> None:
        """One toast at a time: this runs before Textual's own handler adds the new one."""
        self.clear_notifications()
        for screen in self.screen_stack:  # else each old toast leaves an empty line behind
            screen.query("ToastHolder").remove()

    def action_stop(self) -> None:
        """Stop the answer that runs."""
        self._chat.stop()

    def action_new_chat(self) -> None:
        """Leave this conversation and begin another."""
        self._chat.call_later(self._chat.start_new)

    def action_conversations(self) -> None:
        """Show the list of conversations, unless it is shown already."""
        if not isinstance(self.screen, ConversationsScreen):
            screen = ConversationsScreen(self._chat.client.http, self._chat.conversation_id)
            self.push_screen(screen, self._open)

    def _open(self, row: ConversationRow | None) -> None:
        if row is not None:
            self._chat.open(row)

    def action_details(self) -> None:
        """Show or hide the details of every turn."""
        self._chat.query_one(Transcript).toggle_details()

    def action_copy_answer(self) -> None:
        """Copy the newest answer."""
        self._copy(self._chat.query_one(Transcript).last_answer())

    def action_copy_or_quit(self) -> None:
        """Copy what is selected; with nothing selected, quit at the second press."""
        focused = self.focused
        selected = focused.selected_text if isinstance(focused, TextArea | Input) else ""
        selected = selected or self.screen.get_selected_text() or ""
        if selected:
            self._copy(selected)
        elif time.monotonic() - self._asked_to_quit_s < _QUIT_WINDOW_S:
            self.exit()
        else:
            self._asked_to_quit_s = time.monotonic()
            self.notify("Ctrl+C again quits.", timeout=_QUIT_WINDOW_S)

    def action_scroll_page(self, direction: int) -> None:
        """Page through the transcript, wherever the focus is."""
        transcript = self._chat.query_one(Transcript)
        if direction < 0:
            transcript.scroll_page_up(animate=False)
        else:
            transcript.scroll_page_down(animate=False)

    def action_scroll_to_end(self) -> None:
        """Back to the end of the transcript, and stay there."""
        self._chat.query_one(Transcript).anchor()

    def _copy(self, text: str) -> None:
        if text:
            self.copy_to_clipboard(text)
            self.notify("Copied.", timeout=1.5)
