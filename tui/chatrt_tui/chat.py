"""The chat: one conversation at a time, with its settings, its details and its keys.

Knows: opening, leaving and renaming conversations, settings, which turn the details are about.
Does not know: turns and branches (`LeavingFlow`, and what that builds on), painting, what a command
is called.
Invariant: whatever is left says so; nothing here waits for the server on the painting loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.widgets import TextArea

from chatrt.client.messages import result_of
from chatrt.errors import ChatrtError
from chatrt_tui.clean import clean_line
from chatrt_tui.commands import as_prompt, candidates
from chatrt_tui.details import Details
from chatrt_tui.hints import CommandHints
from chatrt_tui.leaving import LeavingFlow
from chatrt_tui.prompt import Prompt
from chatrt_tui.status import Banner, StatusLine
from chatrt_tui.transcript import Transcript
from chatrt_tui.turns import Conversation, ttfts_ms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from textual import events
    from textual.app import ComposeResult

    from chatrt_tui.branches import Turn
    from chatrt_tui.conversations import ConversationRow
    from chatrt_tui.settings import TurnSettings

_BESIDE_COLUMNS = 110  # from this width on details stand beside the transcript
_COURSE_TURNS = 40


class Chat(LeavingFlow):
    """One conversation at a time, over one connection."""

    DEFAULT_CSS = """
    Chat { height: 1fr; & > Prompt { margin: 0 1; } }
    Chat > #main { height: 1fr; layout: horizontal; }
    Chat > #main.-narrow { layout: vertical; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop"),
        Binding("escape", "leave_edit", "Leave edit"),
        Binding("ctrl+up", "select(-1)", "Turns", key_display="^↑", priority=True),
        Binding("ctrl+down", "select(1)", show=False, priority=True),
        Binding("pageup", "scroll_page(-1)", show=False, priority=True),
        Binding("pagedown", "scroll_page(1)", show=False, priority=True),
        Binding("alt+up", "scroll_details(-1)", show=False, priority=True),
        Binding("alt+down", "scroll_details(1)", show=False, priority=True),
        Binding("ctrl+end", "scroll_to_end", show=False, priority=True),
    ]

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield Banner()
        with Container(id="main"):
            yield Transcript(lambda turn: self._conversation.tree.place(turn), self.act)
            yield Details()
        yield StatusLine()
        yield CommandHints()
        yield Prompt()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What Esc does shows only while there is something to stop or to leave."""
        if action == "stop":
            return self.answering
        return self.editing if action == "leave_edit" else True

    def action_stop(self) -> None:
        """Stop the answer that runs."""
        self.stop()

    def action_leave_edit(self) -> None:
        """Edit nothing after all."""
        self.leave_edit()

    def action_select(self, step: int) -> None:
        """Select the turn above or below."""
        self.select(step)

    def action_scroll_page(self, direction: int) -> None:
        """Page through the transcript, wherever the focus is."""
        transcript = self.query_one(Transcript)
        if direction < 0:
            transcript.scroll_page_up(animate=False)
        else:
            transcript.scroll_page_down(animate=False)

    def action_scroll_details(self, direction: int) -> None:
        """Move the details, of which a small terminal shows a part."""
        self.query_one(Details).scroll_relative(y=3 * direction, animate=False)

    def action_scroll_to_end(self) -> None:
        """Back to the end of the transcript, and stay there."""
        self.query_one(Transcript).anchor()

    @on(TextArea.Changed)
    def _hint(self) -> None:
        """List the commands that a half-typed slash may become."""
        self.query_one(CommandHints).show(candidates(self.query_one(Prompt).text))

    def on_resize(self, event: events.Resize) -> None:
        """Details stand beside the transcript where there is room, else below it."""
        is_narrow = event.size.width < _BESIDE_COLUMNS
        self.query_one("#main").set_class(is_narrow, "-narrow")
        self.query_one(Details).set_class(is_narrow, "-below")

    # Details -------------------------------------------------------------------------------------

    def toggle_details(self) -> None:
        """Show or hide how the selected turn, or the newest one, was answered."""
        self.query_one(Details).toggle_class("-shown")
        self._explain()

    def on_descendant_focus(self) -> None:
        """Another turn may be selected now."""
        self._explain()

    def _changed(self) -> None:
        super()._changed()
        self.query_one(Prompt).border_subtitle = self._conversation.settings.summary()
        self._explain()

    def _explain(self) -> None:
        details = self.query_one(Details)
        turn = self.target()
        if not details.is_shown:
            return
        if turn is None:
            details.explain("There is no turn yet.", None, ())
            return
        tree = self._conversation.tree
        path = tree.path_to(turn)
        place = tree.place(turn)
        branch = f" · branch {place}" if place.count > 1 else ""
        heading = f"Turn {len(path)} of {len(tree.path)}{branch}"
        details.explain(heading, turn.result, ttfts_ms(path[-_COURSE_TURNS:]))
        if any(one.result is None and one.is_over for one in path[-_COURSE_TURNS:]):
            self._fetch_figures(path[-_COURSE_TURNS:])

    @work(exclusive=True, group="figures")
    async def _fetch_figures(self, turns: Sequence[Turn]) -> None:
        """Have the server say of turns of before how they were answered, the newest first."""
        for turn in reversed(turns):
            if turn.result is None and turn.is_over and turn.id is not None:
                try:
                    turn.result = result_of(await self.client.http.response(turn.id))
                except ChatrtError:
                    return  # the details then go without
        self._show_figures()
        self._explain()

    # Conversations -------------------------------------------------------------------------------

    async def start_new(self) -> None:
        """Leave this conversation and begin another, with the same settings."""
        settings = self._conversation.settings
        self._leave()
        self._conversation.settings = settings
        await self._move_to(self._conversation.tree.root)

    def open(self, row: ConversationRow) -> None:
        """Show an old conversation, to go on with it."""
        if row.id != self._conversation.id:
            self._fetch(row)

    @work(exclusive=True, group="open")
    async def _fetch(self, row: ConversationRow) -> None:
        try:
            turns = await self.client.http.turns(row.id)
        except ChatrtError as error:
            self.notify(clean_line(error.message), severity="error", markup=False)
            return
        # Back on this widget's own queue, so that no turn begins or ends in between.
        self.call_later(self._show_old, row, turns)

    async def _show_old(self, row: ConversationRow, turns: Sequence[Mapping[str, Any]]) -> None:
        settings = self._conversation.settings
        self._leave()
        returned = self._returned_to(row.id)
        here = self._conversation = returned or Conversation(row.id, row.title)
        here.tree.merge(turns)
        tip = here.tree.newest if returned is None else here.tree.tip
        here.settings = replace(settings, system=here.tree.system_at(tip))
        asked = (as_prompt(turn.question) for turn in here.tree.path_to(tip))
        self.query_one(Prompt).remember(*asked)
        await self._move_to(tip)
        self._show_running()
        self.client.watch(row.id)
        if tip.is_over:
            self._fetch_figures((tip,))

    def _leave(self) -> None:
        self._give_edit_up()
        self._leave_turn()
        self._other = None
        self._untold = ()
        self.client.watch(None)
        self.query_one(Prompt).allow_sending()
        self._conversation = Conversation()

    @work(group="rename")
    async def rename(self, title: str) -> None:
        """Give the conversation another title."""
        here, title = self._conversation, clean_line(title)
        if here.id is None:
            self.notify("The conversation gets its title with its first message.")
            return
        try:
            await asyncio.wrap_future(self.client.rename(here.id, title))
        except ChatrtError as error:
            self.notify(clean_line(error.message), severity="error", markup=False)
            return
        here.title = title
        self.notify(f"The title is “{title}” now.", markup=False)

    # Settings ------------------------------------------------------------------------------------

    def apply(self, settings: TurnSettings) -> None:
        """Have the next turns answered with these settings."""
        before, self._conversation.settings = self._conversation.settings, settings
        if before != settings:
            told = settings.summary() or "the model's own settings"
            self.notify(f"From the next turn on: {clean_line(told)}.", markup=False)
            if before.system and not settings.system and self._conversation.tree.path:
                self.notify("What was said so far keeps its system prompt; a new chat has none.")
        self._changed()
        self._show_state()
        self._type_ahead()
