"""A conversation that others use too: their turns are shown as they come, or told as branches.

Knows: the one turn of another client that follows what is shown, which turns are new in the tree.
Does not know: the person's own moves between branches, sockets.
Invariant: nothing shown ever gives way to another branch. A turn is in the tree once, however often
it is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chatrt.client.batches import (
    OtherTurnBegan,
    OtherTurnDone,
    OtherTurnText,
    ThreadEvent,
    Watching,
)
from chatrt_tui.branches import Turn
from chatrt_tui.commands import as_prompt
from chatrt_tui.flow import TurnFlow
from chatrt_tui.prompt import Prompt
from chatrt_tui.status import StatusLine
from chatrt_tui.transcript import Transcript
from chatrt_tui.turns import OtherTurn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from chatrt.client import TurnResult
    from chatrt_tui.turn_view import TurnView

_ASKED_ELSEWHERE = "(asked by another client; its words come with the end of the answer)"
_BRANCHED = (
    "Another client goes on in a branch of its own. Once answered it is beside yours: "
    "select the turn with Ctrl+↑, then ← and →."
)


class SharedFlow(TurnFlow):
    """The flow of turns with those of other clients."""

    _other: OtherTurn | None = None
    _untold: Sequence[Mapping[str, Any]] = ()  # what was told of the tree while a turn of ours ran

    @property
    def is_busy(self) -> bool:
        """Whether a turn runs that the next question would follow, whoever asked."""
        return self._turn is not None or self._other is not None

    @property
    def _growing(self) -> TurnView | None:
        if self._turn is None and self._other is not None:
            return self._other.view
        return super()._growing

    def _text_of(self, event: ThreadEvent) -> str | None:
        if isinstance(event, OtherTurnText):
            return event.text if self._is_other(event.response_id) else ""
        return super()._text_of(event)

    async def _take(self, event: ThreadEvent) -> None:
        here = self._conversation.id
        match event:
            case Watching(conversation_id, turns) if conversation_id == here:
                await self._catch_up(turns)
            case OtherTurnBegan(conversation_id) if conversation_id == here:
                await self._begin_other(event)
            case OtherTurnDone(conversation_id) if conversation_id == here:
                await self._end_other(event)
            case _:
                await super()._take(event)

    def _is_other(self, response_id: str) -> bool:
        return self._other is not None and self._other.turn.id == response_id

    async def _end_turn(self, result: TurnResult) -> None:
        await super()._end_turn(result)
        turns, self._untold = self._untold, ()
        if turns:
            await self._merge(turns)

    async def _catch_up(self, turns: Sequence[Mapping[str, Any]]) -> None:
        """Show what others asked while nothing was heard of them; what still runs comes again."""
        other, self._other = self._other, None
        if other is not None:
            self._conversation.tree.drop(other.turn)
            await self.query_one(Transcript).remove_turn(other.turn)
            self.query_one(Prompt).allow_sending()
        if self._turn is not None:
            self._untold = turns
            return
        await self._merge(turns)
        self._show_state()
        self._type_ahead()

    async def _merge(self, turns: Sequence[Mapping[str, Any]]) -> None:
        """Take what is new in the tree: what follows a tip that nothing followed is shown."""
        tree, tip = self._conversation.tree, self._conversation.tree.tip
        was_end = not tip.children
        added = tree.merge(turns)
        transcript = self.query_one(Transcript)
        if was_end and tip.children:
            tree.follow(tip)
            asked = (as_prompt(turn.question) for turn in tree.path if turn in added)
            self.query_one(Prompt).remember(*asked)
            await transcript.show_path(tree.path)
        if not set(added) <= set(tree.path):
            await self._tell_of_branch()
        await transcript.refresh_places()

    async def _begin_other(self, event: OtherTurnBegan) -> None:
        here = self._conversation
        if here.tree.find(event.response_id) is not None:
            return  # it was over before it was told
        if self.is_busy or not here.is_followed_by(event):
            await self._tell_of_branch()
            return
        turn = Turn(_ASKED_ELSEWHERE, here.tree.tip, event.response_id, status="in_progress")
        here.tree.tip = here.tree.add(turn)
        self._other = OtherTurn(turn, await self.query_one(Transcript).add_turn(turn))
        self.query_one(Prompt).hold_sending()
        self.query_one(StatusLine).show_figures("")
        self._show_state()
        self._type_ahead()

    async def _end_other(self, event: OtherTurnDone) -> None:
        if not self._is_other(event.response_id):
            if self._turn is not None:
                self._untold = event.turns
            else:
                await self._merge(event.turns)
            return
        other, self._other = self._other, None
        assert other is not None
        await self._finish(other.turn, other.view, event.result)
        await self._merge(event.turns)
        if other.turn.question != _ASKED_ELSEWHERE:
            self.query_one(Prompt).remember(as_prompt(other.turn.question))
            other.view.show_question(other.turn.question)

    async def _tell_of_branch(self) -> None:
        if not self._conversation.has_branched:
            self._conversation.has_branched = True
            await self.query_one(Transcript).add_note(_BRANCHED)

    def _state(self) -> str:
        is_connected = self._connection.kind == "connected"
        if self._turn is None and self._other is not None and is_connected:
            return "another client is being answered"
        return super()._state()
