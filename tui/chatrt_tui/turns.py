"""What the chat remembers: the conversation shown, and the turn that runs in it, ours or another's.

Knows: which response the next question follows, which turns of others belong behind it.
Does not know: the connection, how anything is painted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chatrt.client import TurnResult
    from chatrt.client.batches import OtherTurnBegan
    from chatrt_tui.transcript import AnswerView, UserMessage


@dataclass(slots=True)
class Conversation:
    """The conversation shown: its id, and the response that the next question follows.

    `shown_ids` are responses in the transcript, of which others may be told once more;
    `has_branched` says that the person knows of a branch that is not shown.
    """

    id: str | None = None
    tip_id: str | None = None
    shown_ids: set[str] = field(default_factory=set)
    has_branched: bool = False

    def go_on(self, result: TurnResult) -> None:
        """The next question follows this turn, if it can."""
        if result.response_id is not None and result.usable_as_parent:
            self.tip_id = result.response_id
            self.shown_ids.add(result.response_id)

    def is_followed_by(self, began: OtherTurnBegan) -> bool:
        """Whether another client's turn continues what is shown, and no other branch."""
        return began.parent_id in (None, self.tip_id)


@dataclass(slots=True)
class RunningTurn:
    """A turn of ours that runs."""

    id: int
    question: str
    view: AnswerView
    unsent: bool  # it waits for the connection
    cut_off: bool = False  # the connection was lost in mid-answer
    stopping: bool = False

    @property
    def state(self) -> str:
        """What happens with it, in words."""
        if not self.cut_off:
            return "answering · Esc stops"
        if self.stopping:
            return "stops when the server is back · Esc gives up"
        return "cut off, waiting for the server · Esc stops"


@dataclass(frozen=True, slots=True)
class OtherTurn:
    """A turn of another client that runs."""

    response_id: str
    question: UserMessage
    view: AnswerView

    async def remove(self) -> None:
        """Take it out of the transcript."""
        await self.question.remove()
        await self.view.remove()
