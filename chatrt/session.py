"""A session: the token ids of one live sequence, with its page table.

Knows: token ids, page ids, counters. Does not know: how pages are found, shared or given up, which
is `chatrt.session_manager`'s, the only one to change a session.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chatrt.prefix import PrefixNode


class SessionState(Enum):
    """Whether a session has its pages at hand."""

    ACTIVE = "active"
    PARKED = "parked"  # between turns: pages live in the tree, only the tail page is its own
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class Session:
    """One live sequence. Only `SessionManager` changes it.

    Positions `[0, num_computed)` have their KV written; page `page_ids[i]` holds positions
    `[i * page_size, (i + 1) * page_size)`. A parked session has no page table: its full pages are
    found again in the tree, its tail page waits in the pool. `tip` is the tree's node of its last
    full page (of a parked session: as it was then).
    """

    session_id: int
    salt: str
    token_ids: list[int]
    tip: PrefixNode
    page_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    state: SessionState = SessionState.ACTIVE

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not computed yet; 1 after a decode step."""
        return len(self.token_ids) - self.num_computed


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The first `num_rows` rows of page `src` have to be copied into page `dst`."""

    src: int
    dst: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Attached:
    """A session with its pages at hand: `num_reused` tokens need no computing.

    The copies must be done in order, and before any row is written: a later call may free a source
    and hand it out again.
    """

    session: Session
    num_reused: int
    copies: tuple[PageCopy, ...]
