"""The person's moves in the tree of turns: ask, edit, regenerate, fork, switch, undo; copying.

Knows: what each move needs of the tree and the transcript, which turn is selected.
Does not know: how a turn streams (`TurnFlow`), other clients' turns (`SharedFlow`), painting.
Invariant: no move changes the tree while a turn runs that the path ends in; what is half-typed
survives all of them. All moves run on this widget's own queue, one after the other; keys that come
meanwhile wait (`is_moving`), so that each meets what the one before it has made.
Cost: a move asks the server nothing, but for the question of an edit or a new answer.
"""

from __future__ import annotations

import random
from inspect import isawaitable
from typing import TYPE_CHECKING

from textual import on
from textual.message import Message

from chatrt_tui import figures
from chatrt_tui.commands import as_prompt
from chatrt_tui.flow import WELCOME
from chatrt_tui.prompt import Prompt
from chatrt_tui.reasoning import split_thought
from chatrt_tui.shared import SharedFlow
from chatrt_tui.status import StatusLine
from chatrt_tui.transcript import Transcript
from chatrt_tui.turn_view import TurnView
from chatrt_tui.turns import Edit

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt.client import TurnResult
    from chatrt_tui.branches import Turn
    from chatrt_tui.turn_view import Action

_STILL_COMING = "The answer is still coming. Esc stops it; your text stays here."
_NO_SERVER = "No server answers yet. Esc gives your last message up; your text stays here."
_OTHERS_TURN = "Another client is being answered here. Yours can follow; your text stays."
_SEEDS = 2**31


class BranchingFlow(SharedFlow):
    """The flow of turns with the person's own branches."""

    _edit: Edit | None = None
    _sent_edit: Edit | None = None  # of the turn that runs
    _num_asked_for = 0  # moves that are not made yet

    class Moved(Message):
        """A move that was asked for is made."""

    @property
    def editing(self) -> bool:
        """Whether the prompt holds an earlier question that is being written anew."""
        return self._edit is not None

    @property
    def _next_parent(self) -> Turn:
        edit = self._edit
        if edit is not None and edit.turn.parent is not None:
            return edit.turn.parent
        return super()._next_parent

    @on(Prompt.Submitted)
    async def _submit(self, event: Prompt.Submitted) -> None:
        """Send the prompt as the next turn, or in place of the question that is edited."""
        if self.is_busy:  # it began as Enter was pressed
            self.query_one(Prompt).give_back(as_prompt(event.text))
            self._say_not_now()
            return
        edit, parent = self._edit, self._next_parent
        self._sent_edit = edit
        self._set_edit(None)
        await self._ask(event.text, parent)
        if edit is not None:
            self.query_one(Prompt).give_back(edit.draft)

    async def _end_turn(self, result: TurnResult) -> None:
        running, edit, self._sent_edit = self._turn, self._sent_edit, None
        await super()._end_turn(result)
        if edit is None or running is None or result.usable_as_parent:
            return
        # It is still an edit: asked again as it stands, it belongs where it did before.
        prompt, question = self.query_one(Prompt), as_prompt(running.turn.question)
        if prompt.text in (question, edit.draft):
            self._set_edit(edit)
            prompt.show(question)

    @on(Prompt.NotNow)
    def _say_not_now(self) -> None:
        turn = self._turn
        if turn is None:
            self.notify(_OTHERS_TURN)
        else:
            self.notify(_NO_SERVER if turn.unsent or turn.cut_off else _STILL_COMING)

    def make(self, move: Callable[..., object], *arguments: object) -> None:
        """Make a move behind those that are asked for already; keys wait for it."""
        self._num_asked_for += 1
        self.call_later(self._make, move, *arguments)

    @property
    def is_moving(self) -> bool:
        """Whether a move is asked for that is not made yet."""
        return self._num_asked_for > 0

    async def _make(self, move: Callable[..., object], *arguments: object) -> None:
        self.app.clear_notifications()  # what they told is of before
        try:
            made = move(*arguments)
            if isawaitable(made):
                await made
        finally:
            self._num_asked_for -= 1
            self.post_message(self.Moved())

    def act(self, view: TurnView, action: Action) -> None:
        """Do what the person wants with a turn."""
        self.make(self._act, view, action)

    async def _act(self, view: TurnView, action: Action) -> None:
        turn = view.turn
        if self.query_one(Transcript).view(turn) is not view:
            self.query_one(Prompt).take_keys()  # it was refused, or is of one that was left
            return
        match action:
            case "select":
                view.take_keys()
            case "leave":
                self.query_one(Prompt).take_keys()
            case "up" | "down":
                self.select(-1 if action == "up" else 1)
            case "edit":
                self.edit(turn)
            case "regenerate":
                await self.regenerate(turn)
            case "fork":
                await self.fork(turn)
            case "previous" | "next":
                await self.switch(turn, -1 if action == "previous" else 1)
            case "copy":
                self.copy(split_thought(view.text).answer)
            case "copy_code":
                self.copy_code(view)
            case "thought":
                view.toggle_thought()

    @property
    def selected(self) -> TurnView | None:
        """The turn that has the keyboard; none that was refused, of which only words are left."""
        focused = self.app.focused
        if not isinstance(focused, TurnView):
            return None
        return focused if self.query_one(Transcript).view(focused.turn) is focused else None

    def select(self, step: int) -> None:
        """Select the turn above (-1) or below (1) the selected one, the newest one to begin with.

        Below the newest one is the prompt.
        """
        transcript = self.query_one(Transcript)
        views, selected = transcript.views, self.selected
        if not views:
            self.notify("There is no turn yet.")
            return
        index = len(views) if selected is None else views.index(selected)
        index += step
        if index >= len(views):
            self.query_one(Prompt).take_keys()
            transcript.anchor()
        elif index < 0:
            transcript.load_older()
        else:
            views[index].take_keys()
            transcript.bring(views[index])

    def target(self) -> Turn | None:
        """The turn that a command is about: the selected one, else the last one shown."""
        path = self._conversation.tree.path
        return self.selected.turn if self.selected else path[-1] if path else None

    def branching_turn(self) -> Turn | None:
        """The turn whose branches a command means: the selected one, else the last that has any."""
        tree, selected = self._conversation.tree, self.selected
        if selected is not None:
            return selected.turn
        return next((one for one in reversed(tree.path) if tree.place(one).count > 1), None)

    def edit(self, turn: Turn) -> None:
        """Write a question anew: it comes into the prompt, Enter asks it in a branch of its own."""
        if self._may_move():
            prompt = self.query_one(Prompt)
            draft = prompt.text if self._edit is None else self._edit.draft
            self._set_edit(Edit(turn, draft))
            prompt.show(as_prompt(turn.question))
            prompt.take_keys()

    def leave_edit(self) -> None:
        """Edit nothing after all; what was in the prompt before is back."""
        if self._edit is not None:
            draft = self._edit.draft
            self._set_edit(None)
            self.query_one(Prompt).show(draft)

    def _give_edit_up(self) -> None:
        """Another move ends an edit: the draft is back, what was written is in the history."""
        if self._edit is not None:
            prompt = self.query_one(Prompt)
            prompt.remember(prompt.text)
            self.leave_edit()

    def _set_edit(self, edit: Edit | None) -> None:
        if edit is self._edit:
            return  # a footer made anew would hold up what comes next
        transcript = self.query_one(Transcript)
        for shown, is_edited in ((self._edit, False), (edit, True)):
            view = transcript.view(shown.turn) if shown is not None else None
            if view is not None:
                view.set_class(is_edited, "-edited")
        self._edit = edit
        told = "" if edit is None else "Editing an earlier message · Esc leaves it"
        self.query_one(Prompt).border_title = told
        self.app.refresh_bindings()

    async def regenerate(self, turn: Turn) -> None:
        """Have a question answered once more, with another seed, in a branch of its own."""
        if self._may_move() and turn.parent is not None:
            if self._conversation.settings.temperature == 0:
                self.notify("The temperature is 0: the same words come again. /temp varies them.")
            self._give_edit_up()
            self._sent_edit = None
            self.query_one(Prompt).hold_sending()
            await self._ask(turn.question, turn.parent, seed=random.randrange(_SEEDS))
            self.query_one(Prompt).take_keys()

    async def fork(self, turn: Turn) -> None:
        """Go back to a turn: the next question follows it, beside what followed it so far."""
        if not self._may_move():
            return
        if turn is self._conversation.tree.tip:
            self.notify("This is the last turn shown: the next question follows it anyway.")
            return
        await self._move_to(turn)
        self.query_one(Prompt).take_keys()

    async def undo(self) -> None:
        """Go back one turn."""
        tip = self._conversation.tree.tip
        if tip.parent is None:
            self.notify("There is no turn to go back from.")
        elif self._may_move():
            await self._move_to(tip.parent)

    async def redo(self) -> None:
        """Go forward one turn, into the newest branch."""
        tip = self._conversation.tree.tip
        if not tip.children:
            self.notify("Nothing follows the last turn shown.")
        elif self._may_move():
            await self._move_to(tip.children[-1])

    async def switch(self, turn: Turn, step: int) -> None:
        """Show the sibling of a turn so many places further, with the newest branch behind it."""
        tree = self._conversation.tree
        other = tree.neighbour(turn, step)
        if other is None:
            place = tree.place(turn)
            only = "This turn has no other branch: e edits it, r regenerates it."
            self.notify(only if place.count == 1 else f"This is branch {place}.")
        elif self._may_move():
            had_keys = self.selected is not None
            await self._move_to(tree.follow(other))
            view = self.query_one(Transcript).view(other)
            if view is not None:
                self.query_one(Transcript).bring(view, to_top=True)
                if had_keys:
                    view.take_keys()

    async def _move_to(self, tip: Turn) -> None:
        tree = self._conversation.tree
        self._give_edit_up()
        tree.tip = tip
        told = ""
        if tip.children:
            count = len(tip.children)
            goes_on = f"{count} branches go on" if count > 1 else "The conversation goes on"
            told = f"{goes_on} from here. Your next question begins another; /redo goes forward."
        await self.query_one(Transcript).show_path(tree.path, told=told, welcome=WELCOME)
        self._show_figures()
        self._changed()
        self._show_state()
        self._type_ahead()

    def _show_figures(self) -> None:
        """The figures of the last turn shown, while none runs."""
        result = self._conversation.tree.tip.result
        if not self.is_busy:
            shown = figures.status(result, self._num_context) if result else ""
            self.query_one(StatusLine).show_figures(shown)

    def _may_move(self) -> bool:
        if self.is_busy:
            self._say_not_now()
        return not self.is_busy

    def copy(self, text: str) -> None:
        """Copy a text, over OSC 52 where the terminal takes it."""
        if text.strip():
            self.app.copy_to_clipboard(text)
            self.notify("Copied.", timeout=1.5)
        else:
            self.notify("There is nothing to copy yet.")

    def copy_answer(self) -> None:
        """Copy the answer of the selected turn, or the newest one."""
        view = self.selected or next(reversed(self.query_one(Transcript).views), None)
        self.copy(split_thought(view.text).answer if view is not None else "")

    def copy_code(self, view: TurnView) -> None:
        """Copy the newest code block of an answer; again for the one before it."""
        blocks = view.code_blocks
        if not blocks:
            self.notify("There is no code in this answer.")
            return
        number = next((n for n, code in enumerate(blocks) if code == self.app.clipboard), 0)
        self.app.copy_to_clipboard(blocks[number - 1])
        place = f" ({(number - 1) % len(blocks) + 1} of {len(blocks)})" if len(blocks) > 1 else ""
        self.notify(f"Copied the code{place}.", timeout=1.5)
