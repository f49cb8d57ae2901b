"""The terminal client's app: keys, commands and screens around one `Chat`.

Knows: which key does what, and in which order. Does not know: turns, the connection, painting.
Invariant: a key is looked at when what the keys before it asked of the chat is done. Else those
pressed within milliseconds, or that a slow line brings at once, would act on a turn that was left.
"""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeGuard

from textual import events, on
from textual.app import App, ComposeResult, SystemCommand
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Input, TextArea

from chatrt_tui.chat import Chat
from chatrt_tui.clean import clean_text
from chatrt_tui.commanding import Commander
from chatrt_tui.commands import COMMANDS, parse
from chatrt_tui.connection import connecting_to
from chatrt_tui.prompt import Prompt
from chatrt_tui.state import Remembered, keep, recall
from chatrt_tui.turn_view import TurnView

if TYPE_CHECKING:
    import ssl as ssl_module
    from collections.abc import Iterable
    from pathlib import Path

    from textual.screen import Screen
    from textual.theme import Theme

_QUIT_WINDOW_S = 3.0
_OWN_COMMANDS = {"Theme", "Quit", "Keys"}  # Textual's, of which ours say the same


class ChatApp(App[None]):
    """Chat with the server at `url`; `typing_ahead` sends what is typed before Enter, too.

    `ssl` verifies a server of `wss://`; `state_file` remembers the theme, if it is given.
    """

    TITLE = "chatrt"
    # Toasts keep away from the banner and from where an answer grows. Their width is of the
    # terminal: of the holder it would be another one when the height is found than when it is
    # painted, and a last line would be missing. Inline, a screen of automatic height would have
    # none: the transcript takes what is left, of nothing.
    CSS = """
    ToastRack { dock: top; align: right top; margin: 2 0 0 0; }
    Toast { width: auto; max-width: 75vw; margin: 0; padding: 0 1; }
    Screen:inline { height: 66vh; min-height: 20; border: none; }
    Chat:inline { border-top: solid $border-blurred; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+n", "command('/new')", "New"),
        Binding("ctrl+o", "command('/chats')", "Chats"),
        Binding("ctrl+t", "command('/stats')", "Details"),
        Binding("f1", "command('/help')", "Help"),
        Binding("ctrl+g", "command('/editor')", show=False),
        Binding("ctrl+c", "copy_or_quit", "Copy / quit", show=False, priority=True),
    ]

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        typing_ahead: bool = True,
        ssl: ssl_module.SSLContext | None = None,
        state_file: Path | None = None,
    ) -> None:
        super().__init__()
        self._chat = Chat(connecting_to(url, api_key, ssl), typing_ahead=typing_ahead)
        self._commander = Commander(self, self._chat)
        self._state_file = state_file
        self._asked_to_quit_s = float("-inf")
        self._waiting: deque[events.Key | events.Paste] = deque()

    def compose(self) -> ComposeResult:
        """The chat and its keys."""
        yield self._chat
        yield Footer()

    def on_mount(self) -> None:
        """The colours of the last time."""
        theme = recall(self._state_file).theme
        if theme in self.available_themes:
            self.theme = theme
        self.theme_changed_signal.subscribe(self, self._keep_theme)

    async def on_event(self, event: events.Event) -> None:
        """Keys and pasted text wait for the moves before them."""
        if not _is_typed(event):
            await super().on_event(event)
        elif self._chat.is_moving or self._waiting:
            self._waiting.append(event)
        else:
            await self._take_typed(event)

    @on(Chat.Moved)
    async def _take_waiting(self) -> None:
        while self._waiting and not self._chat.is_moving:
            await self._take_typed(self._waiting.popleft())

    async def _take_typed(self, event: events.Key | events.Paste) -> None:
        if isinstance(event, events.Paste):
            event.text = clean_text(event.text.replace("\r\n", "\n").replace("\r", "\n"))
        focused = self.focused
        if isinstance(focused, TurnView) and not focused.takes(event):
            self._chat.query_one(Prompt).take_keys()
        await super().on_event(event)

    def pop_screen(self) -> AwaitComplete:
        """Leave a screen; a palette left twice, by two keys that came as one, is left once."""
        return AwaitComplete() if len(self.screen_stack) < 2 else super().pop_screen()

    def _keep_theme(self, theme: Theme) -> None:
        keep(self._state_file, Remembered(theme=theme.name))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Every command, for the command palette."""
        if self._chat.answering:
            yield SystemCommand("Stop", "Stop the answer, keep what came", self._chat.stop)
        turn = "off" if self._chat.typing_ahead else "on"
        for command in COMMANDS:
            title = f"{command.title}: turn {turn}" if command.name == "typing" else command.title
            yield SystemCommand(title, command.told, partial(self._commander.run, command))
        for theirs in super().get_system_commands(screen):
            if theirs.title not in _OWN_COMMANDS:
                yield theirs

    def on_notify(self) -> None:
        """One toast at a time: this runs before Textual's own handler adds the new one."""
        self.clear_notifications()
        for screen in self.screen_stack:  # else each old toast leaves an empty line behind
            screen.query("ToastHolder").remove()

    @on(Prompt.Commanded)
    def _run_command(self, event: Prompt.Commanded) -> None:
        self._commander.run(event.command, event.argument)

    @on(Prompt.Unknown)
    def _tell_unknown(self, event: Prompt.Unknown) -> None:
        self._commander.tell(event.told)

    def action_command(self, text: str) -> None:
        """Do what a command says."""
        command, argument = parse(text)
        if command is not None:
            self._commander.run(command, argument)

    def action_copy_or_quit(self) -> None:
        """Copy what is selected; with nothing selected, quit at the second press."""
        focused = self.focused
        selected = focused.selected_text if isinstance(focused, TextArea | Input) else ""
        selected = selected or self.screen.get_selected_text() or ""
        if selected:
            self._chat.copy(selected)
        elif time.monotonic() - self._asked_to_quit_s < _QUIT_WINDOW_S:
            self.exit()
        else:
            self._asked_to_quit_s = time.monotonic()
            self.notify("Ctrl+C again quits.", timeout=_QUIT_WINDOW_S)


def _is_typed(event: events.Event) -> TypeGuard[events.Key | events.Paste]:
    """Whether this comes from the terminal; what was forwarded comes up again from a widget."""
    return isinstance(event, events.Key | events.Paste) and not event.is_forwarded
