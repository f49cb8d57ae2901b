"""What the chat remembers: the conversation shown, and the turn that runs in it, ours or another's.

Knows: how a question is put to the server so that it follows the turn it should.
Does not know: the connection, how anything is painted.
Invariant: a question follows exactly one turn of the tree, or begins a branch of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chatrt.client import ResponseRequest
from chatrt.client.messages import message_item
from chatrt_tui.branches import Tree, Turn
from chatrt_tui.settings import TurnSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.client import TurnResult
    from chatrt.client.batches import OtherTurnBegan
    from chatrt_tui.turn_view import TurnView


@dataclass(slots=True)
class Conversation:
    """The conversation shown: its id, its title, its turns.

    `settings` are those of its next turn. `has_branched` says that the person was told of a branch
    that is not shown.
    """

    id: str | None = None
    title: str = ""
    tree: Tree = field(default_factory=Tree)
    settings: TurnSettings = field(default_factory=TurnSettings)
    has_branched: bool = False

    def request(self, text: str, parent: Turn, *, seed: int | None = None) -> ResponseRequest:
        """`text` as the question that follows `parent`; a `seed` goes before that of the settings.

        The system prompt is said where it is not what holds there already.
        """
        settings = self.settings
        question: str | list[dict[str, Any]] = text
        if settings.system and settings.system != self.tree.system_at(parent):
            question = [message_item("system", settings.system), message_item("user", text)]
        begins_branch = parent.is_root and len(self.tree) > 0
        sampling = settings.sampling()
        return ResponseRequest(
            input=question,
            model=settings.model,
            previous_response_id=parent.id,
            conversation=self.id if parent.is_root else None,
            truncation="auto",
            sampling=sampling if seed is None else {**sampling, "seed": seed},
            chatrt={**settings.options(), **({"new_branch": True} if begins_branch else {})},
        )

    def new_turn(self, text: str, parent: Turn) -> Turn:
        """The turn that asks `text` behind `parent`, added to the tree as its tip."""
        system = self.settings.system
        told = system if system != self.tree.system_at(parent) else ""
        turn = self.tree.add(Turn(text, parent, system=told, status="in_progress"))
        self.tree.tip = turn
        return turn

    def is_followed_by(self, began: OtherTurnBegan) -> bool:
        """Whether another client's turn continues what is shown, and no other branch."""
        tip = self.tree.tip
        if began.parent_id is not None:
            return began.parent_id == tip.id
        return not began.begins_branch and tip is self.tree.newest


@dataclass(slots=True)
class RunningTurn:
    """A turn of ours that runs. `number` is what the client's thread calls it.

    `tip_before` was shown when it was asked, in another branch if it is an edit.
    """

    number: int
    turn: Turn
    view: TurnView
    unsent: bool  # it waits for the connection
    tip_before: Turn
    received: list[str] = field(default_factory=list)  # its text so far, as it came
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
    """A turn of another client that runs behind what is shown."""

    turn: Turn
    view: TurnView


@dataclass(frozen=True, slots=True)
class Edit:
    """A question of before that is being written anew; `draft` was in the prompt."""

    turn: Turn
    draft: str


def settle(turn: Turn, result: TurnResult) -> None:
    """A turn has ended: keep what is known of it."""
    turn.answer, turn.status, turn.result = result.text, result.status, result


def ttfts_ms(path: Sequence[Turn]) -> list[float]:
    """The times to first token that are known along a path, in order."""
    return [
        turn.result.ttft_ms
        for turn in path
        if turn.result is not None and turn.result.ttft_ms is not None
    ]
