"""Answers that go on in conversations that were left, and what becomes of them.

Knows: which turns of ours run where nobody looks, and how one of them is shown again.
Does not know: why a conversation is left, painting.
Invariant: leaving stops nothing. A turn that was left is told of once, at its end, unless one has
come back to it; then it is the turn that runs here, with all of its text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatrt.client.batches import ConversationMade, ThreadEvent, TurnDone, TurnEvent
from chatrt.client.messages import CREATED_TYPE
from chatrt_tui import figures
from chatrt_tui.branching import BranchingFlow
from chatrt_tui.clean import clean_line
from chatrt_tui.commands import as_prompt
from chatrt_tui.prompt import Prompt
from chatrt_tui.transcript import Transcript
from chatrt_tui.turns import settle

if TYPE_CHECKING:
    from chatrt.client import TurnResult
    from chatrt_tui.turns import Conversation, RunningTurn


@dataclass(frozen=True, slots=True)
class _Left:
    """A turn that runs in a conversation that is not shown."""

    conversation: Conversation
    running: RunningTurn


class LeavingFlow(BranchingFlow):
    """The flow of turns with those that were left."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._left: dict[int, _Left] = {}  # by what the client's thread calls the turn

    @property
    def answering_elsewhere(self) -> frozenset[str]:
        """The conversations that are not shown and in which an answer of ours runs."""
        ids = (left.conversation.id for left in self._left.values())
        return frozenset(one for one in ids if one is not None)

    def _leave_turn(self) -> None:
        """Let the turn that runs go on by itself."""
        if self._turn is not None:
            self._left[self._turn.number] = _Left(self._conversation, self._turn)
            title = clean_line(self._conversation.title)
            self.notify(f"“{title}” is answered meanwhile.", markup=False)
        self._turn = self._sent_edit = None

    def _returned_to(self, conversation_id: str) -> Conversation | None:
        """The conversation as it was left, if an answer runs in it; it is the one that runs here.

        Behind it the path is shown, and then `_show_running`.
        """
        for number, left in self._left.items():
            if left.conversation.id == conversation_id:
                del self._left[number]
                self._turn, turn = left.running, left.running.turn
                turn.answer = "".join(left.running.received)
                left.conversation.tree.tip = turn
                self.query_one(Prompt).hold_sending()
                return left.conversation
        return None

    def _show_running(self) -> None:
        """The turn that runs goes on growing in the widget that it has by now."""
        if self._turn is not None:
            view = self.query_one(Transcript).view(self._turn.turn)
            assert view is not None, "a turn that runs is the last of the path shown"
            self._turn.view = view
            self._show_state()

    def _text_of(self, event: ThreadEvent) -> str | None:
        if isinstance(event, TurnEvent) and event.event.delta and event.turn_id in self._left:
            self._left[event.turn_id].running.received.append(event.event.delta)
            return ""
        return super()._text_of(event)

    async def _take(self, event: ThreadEvent) -> None:
        left = self._left.get(getattr(event, "turn_id", -1))
        if left is None:
            await super()._take(event)
            return
        match event:
            case ConversationMade(_, conversation_id):
                left.conversation.id = conversation_id
            case TurnEvent(_, inner) if inner.type == CREATED_TYPE:
                left.conversation.tree.name(left.running.turn, inner.data["response"]["id"])
            case TurnDone(number, result):
                del self._left[number]
                self._end_left(left, result)
            case _:
                pass  # what is told of a connection, or adds no text

    def _end_left(self, left: _Left, result: TurnResult) -> None:
        turn, tree = left.running.turn, left.conversation.tree
        settle(turn, result)
        title = clean_line(left.conversation.title)
        if result.usable_as_parent:
            self.notify(f"“{title}” has its answer.", markup=False)
            return
        tree.drop(turn)
        self.query_one(Prompt).remember(as_prompt(turn.question))
        told = f"“{title}”: {figures.ending(result)}"
        self.notify(told, severity="warning", markup=False)
