"""Pages on their way back to the engine: in order, a bounded number ahead of it.

    # pages       [0, taken)       [taken, read)           [read, end)
    # where       the engine's     ready, a reference      still in a tier, or nowhere

Knows: tickets, what was asked for, what is ready. Does not know: tiers, files, threads (the
archive's lock is held). Invariant: indices of a ticket arrive once each, ascending; after a page
without a payload, and after `abandon`, nothing arrives.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Set

    from chatrt.archive.keys import PageKey, PageRecord

NUM_AHEAD = 16

TIER_HOST = "host"
TIER_DISK = "disk"
TIER_NONE = "none"


@dataclass(frozen=True, slots=True)
class Loaded:
    """One page of a load: `index` into its records, and the payload, which is not to be changed.

    `tier` is where it was: host (the write queue included), disk or none. A payload of None says
    that this page and all behind it cannot be had.
    """

    ticket: int
    index: int
    payload: bytes | bytearray | None
    tier: str


@dataclass(slots=True, eq=False)
class Load:
    """What one call of `load` asked for, and how far it is."""

    ticket: int
    records: tuple[PageRecord, ...]
    num_read: int = 0
    ended: bool = False
    ready: deque[Loaded] = field(default_factory=deque)

    @property
    def num_taken(self) -> int:
        """Pages that the engine has."""
        return self.num_read - len(self.ready)

    def wanted(self) -> PageRecord | None:
        """The page to read next; None at the end or far enough ahead of the engine."""
        if self.ended or len(self.ready) >= NUM_AHEAD:
            return None
        return self.records[self.num_read]

    def deliver(self, payload: bytes | bytearray | None, tier: str) -> None:
        """The next page is ready, or cannot be had."""
        self.ready.append(Loaded(self.ticket, self.num_read, payload, tier))
        self.num_read += 1
        self.ended = payload is None or self.num_read == len(self.records)

    def cut(self, keys: Set[PageKey]) -> bool:
        """Takes back what is ready from the first page in `keys` on; whether there was any."""
        for place, page in enumerate(self.ready):
            if page.payload is not None and self.records[page.index].key in keys:
                while len(self.ready) > place:
                    self.ready.pop()
                    self.num_read -= 1
                self.deliver(None, TIER_NONE)
                return True
        return False


class Loads:
    """All loads under way, oldest first."""

    def __init__(self) -> None:
        self._loads: dict[int, Load] = {}
        self._tickets = itertools.count(1)

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads.values())

    def is_open(self, load: Load) -> bool:
        """Whether a load is neither over nor abandoned."""
        return load.ticket in self._loads

    def open(self, records: Sequence[PageRecord]) -> Load:
        """Begins a load under a ticket of its own."""
        load = Load(next(self._tickets), tuple(records), ended=not records)
        if records:
            self._loads[load.ticket] = load
        return load

    def take(self, most: int) -> list[Loaded]:
        """What is ready, at most so many pages, in order within each ticket.

        Loads of which all was taken are over.
        """
        taken: list[Loaded] = []
        for load in list(self._loads.values()):
            while load.ready and len(taken) < most:
                taken.append(load.ready.popleft())
            if load.ended and not load.ready:
                del self._loads[load.ticket]
        return taken

    def abandon(self, ticket: int) -> None:
        """Forgets a load; an unknown ticket is one that is over."""
        self._loads.pop(ticket, None)
