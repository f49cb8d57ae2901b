"""Which pages a tier holds and which of them goes next: the least recently used leaf.

Knows: keys, parents, sizes, when a page was last used. Does not know: payloads, files.
Invariant: a page is never offered for eviction while a page behind it is held, so what is left of
a sequence is always its front. A page may be held without its parent, but where there was no room
for a page, none behind it may push out others (`refuse`, `was_refused`).
Cost: O(log pages) amortised for each call, no scans. Not safe for threads, but `in` is.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chatrt.archive.keys import PageKey


# Enough for a long sequence of 16-token pages; older refusals are forgotten.
NUM_REFUSED = 4096


@dataclass(slots=True, eq=False)
class IndexEntry:
    """One page of a tier; a page is as young as the youngest that was ever behind it."""

    key: PageKey
    parent: PageKey
    num_bytes: int
    last_used_s: float


class PageIndex:
    """The pages of one tier by key, and their leaves by age."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._entries: dict[PageKey, IndexEntry] = {}
        self._num_children: Counter[PageKey] = Counter()
        # Entries may be outdated; one is valid if its page still is a leaf with that age.
        self._leaves: list[tuple[float, int, IndexEntry]] = []
        self._arrivals = itertools.count()
        self._refused: dict[PageKey, None] = {}

    def __contains__(self, key: PageKey) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PageKey]:
        return iter(self._entries)

    def get(self, key: PageKey) -> IndexEntry | None:
        """The page's entry, None if it is not held."""
        return self._entries.get(key)

    def num_children(self, key: PageKey) -> int:
        """How many held pages lie directly behind this page, which need not be held itself."""
        return self._num_children.get(key, 0)

    def add(self, entry: IndexEntry) -> None:
        """Holds a page that is not held yet."""
        assert entry.key not in self._entries, "a page is added to a tier once"
        self._refused.pop(entry.key, None)
        self._entries[entry.key] = entry
        self._num_children[entry.parent] += 1
        self.num_bytes += entry.num_bytes
        self._offer(entry)

    def refuse(self, key: PageKey) -> None:
        """Notes that there was no room for a page."""
        self._refused[key] = None
        if len(self._refused) > NUM_REFUSED:
            del self._refused[next(iter(self._refused))]

    def was_refused(self, key: PageKey) -> bool:
        """Whether there was no room for a page, so that none behind it is of use."""
        return key in self._refused

    def touch(self, key: PageKey, now_s: float) -> None:
        """Makes a page young, if it is held; a clock that went back makes nothing older."""
        entry = self._entries.get(key)
        if entry is not None and now_s > entry.last_used_s:
            entry.last_used_s = now_s
            self._offer(entry)

    def remove(self, key: PageKey) -> IndexEntry | None:
        """Holds a page no longer; returns its entry, None if it was not held."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self.num_bytes -= entry.num_bytes
        self._num_children[entry.parent] -= 1
        if self._num_children[entry.parent] == 0:
            del self._num_children[entry.parent]
        parent = self._entries.get(entry.parent)
        if parent is not None:
            parent.last_used_s = max(parent.last_used_s, entry.last_used_s)
            self._offer(parent)
        return entry

    def clear(self) -> None:
        """Holds nothing any more."""
        self._entries.clear()
        self._num_children.clear()
        self._leaves.clear()
        self._refused.clear()
        self.num_bytes = 0

    def oldest_leaf(self, *, spare: PageKey | None = None) -> IndexEntry | None:
        """The page that eviction takes next, never `spare`; None if there is none."""
        top = self._top()
        if top is None or top[2].key != spare:
            return None if top is None else top[2]
        heappop(self._leaves)
        second = self._top()
        heappush(self._leaves, top)
        return None if second is None else second[2]

    def _top(self) -> tuple[float, int, IndexEntry] | None:
        while self._leaves and not self._is_valid(self._leaves[0]):
            heappop(self._leaves)
        return self._leaves[0] if self._leaves else None

    def _is_valid(self, leaf: tuple[float, int, IndexEntry]) -> bool:
        last_used_s, _, entry = leaf
        return (
            self._entries.get(entry.key) is entry
            and entry.last_used_s == last_used_s
            and entry.key not in self._num_children
        )

    def _offer(self, entry: IndexEntry) -> None:
        """Puts a page among the leaves, with its present age, if it is one."""
        leaf = (entry.last_used_s, next(self._arrivals), entry)
        if not self._is_valid(leaf):
            return
        heappush(self._leaves, leaf)
        if len(self._leaves) > 2 * len(self._entries) + 64:
            valid = {one[2].key: one for one in self._leaves if self._is_valid(one)}
            self._leaves = list(valid.values())
            heapify(self._leaves)
