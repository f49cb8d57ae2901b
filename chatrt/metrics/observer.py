"""Who is told of turns that ended: metrics, and whatever else watches a server.

Knows: what is told. Does not know: who listens.
Invariant: an observer is told on the event loop's thread, of each turn once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from chatrt.turn import FinishedEvent, TurnRequest


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn that is over.

    `ended_ns` is when its terminal event went to its readers, `cancel_asked_ns` when somebody
    first asked for its end, if anybody did.
    """

    request: TurnRequest
    event: FinishedEvent
    ended_ns: int
    cancel_asked_ns: int | None = None


class TurnObserver(Protocol):
    """Watches turns."""

    def ended(self, turn: EndedTurn) -> None:
        """A turn is over."""
        ...

    def first_sent(self, turn: EndedTurn, time_ns: int) -> None:
        """A transport took the turn's first delta at `time_ns`.

        Told behind `ended`, once, of turns that did not fail and whose text anybody read.
        """
        ...
