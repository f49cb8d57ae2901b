"""Does what a command says, from the prompt or the palette.

Knows: which move of the chat, or which screen, each command is.
Does not know: how a move is made; how a command is typed (`commands`).
Invariant: a command that cannot be done says why, and what was typed is in the prompt again. Moves
are queued on the chat, so that they never come between two halves of another one.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from textual.app import SuspendNotSupported

from chatrt.errors import ChatrtError, InvalidValue
from chatrt_tui import export
from chatrt_tui.clean import clean_line
from chatrt_tui.conversations import ConversationRow, ConversationsScreen
from chatrt_tui.prompt import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import App

    from chatrt_tui.branches import Turn
    from chatrt_tui.chat import Chat
    from chatrt_tui.commands import Command
    from chatrt_tui.settings import TurnSettings

_NO_TURN = "there is no turn yet"


class Commander:
    """Runs commands for `app` on its `chat`."""

    def __init__(self, app: App[None], chat: Chat) -> None:
        self._app = app
        self._chat = chat
        self._folder = _folder()  # as it is now: it may be gone when it is asked for
        self._does: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "new": lambda _: self._queue(chat.start_new),
            "chats": self._chats,
            "model": self._model,
            "system": self._system,
            "temp": self._temperature,
            "settings": lambda _: self._form("temperature"),
            "edit": lambda _: self._queue(chat.edit, self._turn()),
            "regen": lambda _: self._queue(chat.regenerate, self._turn()),
            "fork": lambda _: self._queue(chat.fork, self._turn()),
            "branch": self._branch,
            "undo": lambda _: self._queue(chat.undo),
            "redo": lambda _: self._queue(chat.redo),
            "title": self._title,
            "export": self._export,
            "copy": lambda _: self._queue(chat.copy_answer),
            "stats": lambda _: self._queue(chat.toggle_details),
            "theme": self._theme,
            "typing": self._typing,
            "editor": self._editor,
            "quit": lambda _: app.exit(),
        }

    def run(self, command: Command, argument: str = "") -> None:
        """Do it."""
        self._app.clear_notifications()  # what they told is of before
        try:
            self._does[command.name](argument)
        except InvalidValue as error:
            self.tell(f"{command.usage}: {error.message}")
            if argument:
                self._chat.query_one(Prompt).give_back(f"/{command.name} {argument}")

    def tell(self, text: str) -> None:
        """Say something that was not done."""
        self._app.notify(clean_line(text), severity="warning", markup=False)

    def _queue(self, move: Callable[..., object], *arguments: object) -> None:
        self._chat.make(move, *arguments)

    def _turn(self) -> Turn:
        turn = self._chat.target()
        if turn is None:
            raise InvalidValue(_NO_TURN)
        return turn

    def _help(self, _: str) -> None:
        from chatrt_tui.help import HelpScreen

        if not isinstance(self._app.screen, HelpScreen):
            self._app.push_screen(HelpScreen())

    def _chats(self, _: str) -> None:
        if not isinstance(self._app.screen, ConversationsScreen):
            here, client = self._chat.conversation.id, self._chat.client
            answering = self._chat.answering_elsewhere
            screen = ConversationsScreen(client, here, folder=self._folder, answering=answering)
            self._app.push_screen(screen, self._open)

    def _open(self, row: ConversationRow | None) -> None:
        if row is not None:
            self._chat.open(row)

    # Settings

    def _form(self, focus_on: str) -> None:
        from chatrt_tui.settings_form import SettingsScreen

        screen = SettingsScreen(
            self._chat.conversation.settings, self._chat.models, focus_on=focus_on
        )

        def apply(made: TurnSettings | None) -> None:
            if made is not None:
                self._queue(self._chat.apply, made)

        self._app.push_screen(screen, apply)

    def _model(self, argument: str) -> None:
        if not argument:
            self._form("model")
        elif argument not in self._chat.models:
            served = ", ".join(self._chat.models) or "none that is known yet"
            raise InvalidValue(f"{argument} is not served here, but {served}")
        else:
            settings = replace(self._chat.conversation.settings, model=argument)
            self._queue(self._chat.apply, settings)

    def _system(self, argument: str) -> None:
        if not argument:
            self._form("system")
        else:
            settings = replace(self._chat.conversation.settings, system=argument)
            self._queue(self._chat.apply, settings)

    def _temperature(self, argument: str) -> None:
        if not argument:
            self._form("temperature")
        else:
            settings = self._chat.conversation.settings.with_number("temperature", argument)
            self._queue(self._chat.apply, settings)

    def _typing(self, argument: str) -> None:
        if argument not in ("", "on", "off"):
            raise InvalidValue(f"{argument} is neither on nor off")
        if not argument or (argument == "on") != self._chat.typing_ahead:
            self._queue(self._chat.toggle_typing_ahead)

    def _theme(self, argument: str) -> None:
        themes = self._app.available_themes
        if not argument:
            self._app.search_themes()
        elif argument not in themes:
            raise InvalidValue(f"{argument} is none of {', '.join(sorted(themes))}")
        else:
            self._app.theme = argument

    # Branches, files

    def _branch(self, argument: str) -> None:
        turn, tree = self._chat.branching_turn(), self._chat.conversation.tree
        if turn is None:
            raise InvalidValue("no turn shown has another branch; /edit or /regen makes one")
        place = tree.place(turn)
        steps = {
            "": 1 if place.number < place.count else 1 - place.count,
            "next": 1,
            "previous": -1,
        }
        if argument in steps:
            step = steps[argument]
        elif argument.isdecimal() and 1 <= int(argument) <= place.count:
            step = int(argument) - place.number
        else:
            raise InvalidValue(f"{argument} is none of next, previous or 1 to {place.count}")
        if step:
            self._queue(self._chat.switch, turn, step)

    def _title(self, argument: str) -> None:
        if argument:
            self._chat.rename(argument)
        else:
            self._chat.query_one(Prompt).give_back(f"/title {self._chat.conversation.title}")

    def _export(self, argument: str) -> None:
        here = self._chat.conversation
        path = here.tree.path
        if here.id is None or not path:
            raise InvalidValue(_NO_TURN)
        target = export.target_of(argument, here.title, self._folder)
        if target.suffix.lower() == ".json":
            self._app.run_worker(self._export_json(here.id, here.title, target))
        else:
            self._written(export.write_new(target, export.as_markdown(here.title, path)))

    async def _export_json(self, conversation_id: str, title: str, target: Path) -> None:
        try:
            turns = await self._chat.client.http.turns(conversation_id)
            self._written(export.write_new(target, export.as_json(conversation_id, title, turns)))
        except ChatrtError as error:
            self.tell(error.message)

    def _written(self, path: Path) -> None:
        self._app.notify(f"Written: {path}", markup=False)

    def _editor(self, _: str) -> None:
        from chatrt_tui import editor

        prompt = self._chat.query_one(Prompt)
        command = editor.editor_command(os.environ)
        failed: InvalidValue | None = None
        try:
            with self._app.suspend():
                try:
                    prompt.show(editor.write_in(command, prompt.text))
                except InvalidValue as error:
                    failed = error  # raised in here it would leave the terminal to nobody
        except SuspendNotSupported:
            raise InvalidValue("this terminal cannot be given to an editor") from None
        if failed is not None:
            raise failed
        self._app.refresh()


def _folder() -> Path:
    """Where files are written that are named without one."""
    try:
        return Path.cwd()
    except OSError:
        return Path.home()
