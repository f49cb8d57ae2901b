"""The turns of one conversation as a tree, and which path through it is shown.

Knows: which turn follows which, siblings, the tip that the next question follows.
Does not know: widgets, the connection, how a turn is answered.
Invariant: the path runs from a first turn to the tip without a gap. Only the person's own moves and
`follow` change the tip; merging what the server tells never does.
Cost: a path of n turns is listed in n steps; nothing here asks the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chatrt_tui.items import texts_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from chatrt.client import TurnResult


@dataclass(slots=True, eq=False)
class Turn:
    """One question and its answer.

    `id` is the response's, None until the server has named it; `system` what a system message of
    this turn says. `result` has the figures, once they are known here.
    """

    question: str
    parent: Turn | None = None
    id: str | None = None
    answer: str = ""
    status: str = "completed"
    system: str = ""
    result: TurnResult | None = None
    children: list[Turn] = field(default_factory=list)

    @property
    def is_root(self) -> bool:
        """Whether this is no turn, but what all first turns follow."""
        return self.parent is None

    @property
    def is_over(self) -> bool:
        """Whether the server has all of it."""
        return self.id is not None and self.status != "in_progress"


@dataclass(frozen=True, slots=True)
class Place:
    """A turn is the `number`th of `count` that follow the same turn."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


class Tree:
    """All turns known of a conversation. `tip` is the root while nothing is shown."""

    def __init__(self) -> None:
        self.root = Turn("")
        self.tip = self.root
        self._by_id: dict[str, Turn] = {}
        self._order: list[Turn] = []

    def __len__(self) -> int:
        """Turns of all branches."""
        return len(self._order)

    @property
    def newest(self) -> Turn:
        """The turn that was added last; the root while there is none."""
        return self._order[-1] if self._order else self.root

    @property
    def path(self) -> list[Turn]:
        """The turns shown, from the first to the tip."""
        return self.path_to(self.tip)

    def path_to(self, turn: Turn) -> list[Turn]:
        """The turns from the first to this one."""
        found = []
        while turn.parent is not None:
            found.append(turn)
            turn = turn.parent
        return found[::-1]

    def find(self, response_id: str | None) -> Turn | None:
        """The turn of a response, if it is known."""
        return self._by_id.get(response_id or "")

    def add(self, turn: Turn) -> Turn:
        """Take a new turn behind its `parent`, as the newest of those that follow it."""
        assert turn.parent is not None, "a turn follows another, or the root"
        turn.parent.children.append(turn)
        self._order.append(turn)
        if turn.id is not None:
            self._by_id[turn.id] = turn
        return turn

    def name(self, turn: Turn, response_id: str) -> None:
        """The server has named a turn of ours."""
        turn.id = response_id
        self._by_id[response_id] = turn

    def drop(self, turn: Turn) -> None:
        """Forget a turn that no history has; a tip at or below it goes back before it."""
        assert turn.parent is not None
        if turn in self.path:
            self.tip = turn.parent
        turn.parent.children.remove(turn)
        self._order.remove(turn)
        if turn.id is not None:
            self._by_id.pop(turn.id, None)

    def siblings(self, turn: Turn) -> list[Turn]:
        """All turns that follow the same one, this one among them, in the order they came."""
        return turn.parent.children if turn.parent is not None else [turn]

    def place(self, turn: Turn) -> Place:
        """Where a turn stands among its siblings."""
        siblings = self.siblings(turn)
        return Place(siblings.index(turn) + 1, len(siblings))

    def neighbour(self, turn: Turn, step: int) -> Turn | None:
        """The sibling so many places further, None past either end."""
        siblings = self.siblings(turn)
        index = siblings.index(turn) + step
        return siblings[index] if 0 <= index < len(siblings) else None

    def follow(self, turn: Turn) -> Turn:
        """Show the newest branch through `turn`: the tip is the newest of all that end below it."""
        below = {turn}
        newest = turn
        for one in self._order:  # parents come before their children
            if one.parent in below:
                below.add(one)
                newest = one
        self.tip = newest
        return newest

    def merge(self, bodies: Sequence[Mapping[str, Any]]) -> list[Turn]:
        """Take what the server lists of all branches, the oldest first; returns what was unknown.

        Known turns get what the server has of them. A turn behind one that was deleted becomes a
        first one. Of one that runs its own events tell.
        """
        added = []
        for body in bodies:
            if body.get("status") == "in_progress":
                continue
            known = self.find(str(body.get("id")))
            if known is None:
                parent = self.find(body.get("previous_response_id")) or self.root
                known = self.add(Turn("", parent, str(body.get("id"))))
                added.append(known)
            known.question, known.system = texts_of(body, "user"), texts_of(body, "system")
            known.answer = texts_of(body, "assistant", of="output")
            known.status = str(body.get("status") or "completed")
        return added

    def system_at(self, turn: Turn) -> str:
        """The system prompt that holds at a turn: the last one said on the way to it."""
        said = [one.system for one in self.path_to(turn) if one.system]
        return said[-1] if said else ""
