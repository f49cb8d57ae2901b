"""Pages on demand: a free one, else the page that has been useless for longest.

Knows: what can be given up (cached pages nobody holds, tail pages of parked sessions) and in which
order; which tokens the rows of a tail are of. Does not know: what a session is beyond its id.
Invariant: a page in use is never taken. Ages are those of the tree, pins included; a tail goes
before the cached pages of the same age, the end of a path before its front.
Cost: O(log pages) for each page given up; a search among tails looks at the youngest few.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from chatrt.errors import OutOfPages
from chatrt.prefix import num_common_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from chatrt.pages import PageAllocator
    from chatrt.prefix import PrefixNode, PrefixTree

_MAX_SEARCHED = 8  # tails behind one node; hundreds may lie behind a shared system prompt


@dataclass(frozen=True, slots=True)
class Tail:
    """A page that is filled in part: rows of `token_ids`, behind the tokens of `tip`."""

    page_id: int
    age: int
    tip: PrefixNode
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """How the page pool is used: free + held = total.

    `cached` pages are known to the tree, `shared` are used by two sessions or more. `evicted`
    counts pages given up since the start, `sessions` those of each state.
    """

    free: int
    held: int
    cached: int
    shared: int
    total: int
    evicted: int = 0
    sessions: Mapping[str, int] = field(default_factory=dict)


class PagePool:
    """Gives pages out of an allocator and takes back what nobody uses now."""

    __slots__ = ("_allocator", "_behind", "_by_age", "_num_evicted", "_tails", "_tree")

    def __init__(self, allocator: PageAllocator, tree: PrefixTree) -> None:
        self._allocator = allocator
        self._tree = tree
        self._tails: dict[int, Tail] = {}
        # (age, session id), oldest first; outdated where no such tail is kept now.
        self._by_age: list[tuple[int, int]] = []
        self._num_evicted = 0
        self._behind: dict[PrefixNode, dict[int, Tail]] = {}

    @property
    def num_evictable(self) -> int:
        """Pages that could be freed at once: cached ones that nobody holds, and tails."""
        return self._tree.num_evictable + len(self._tails)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, each held once; frees evictable ones as needed.

        Raises:
            OutOfPages: Free and evictable pages together are fewer; nothing changes then.
        """
        free = self._allocator.num_free
        if count > free:
            if count > free + self.num_evictable:
                raise OutOfPages(count, free, self.num_evictable, self._allocator.num_pages)
            self.evict(count - free)
        return self._allocator.allocate(count)

    def evict(self, count: int) -> int:
        """Frees up to `count` evictable pages, oldest first; returns how many."""
        for num_freed in range(count):
            oldest_leaf = self._tree.oldest()
            oldest_tail = self._oldest_tail()
            if oldest_tail is not None and (oldest_leaf is None or oldest_tail[0] <= oldest_leaf):
                self.release_tail(oldest_tail[1])
            elif self._tree.evict(1) == 0:
                return num_freed
            self._num_evicted += 1
        return count

    def keep_tail(self, session_id: int, tail: Tail) -> None:
        """Takes over a session's hold on its tail page until it is taken back or evicted."""
        self._tails[session_id] = tail
        heappush(self._by_age, (tail.age, session_id))
        if len(self._by_age) > 2 * len(self._tails) + 64:
            self._by_age = sorted((one.age, name) for name, one in self._tails.items())
        self._behind.setdefault(tail.tip, {})[session_id] = tail

    def take_tail(self, session_id: int) -> Tail | None:
        """Hands a tail back with its hold; None if it was evicted or there was none."""
        tail = self._tails.pop(session_id, None)
        if tail is not None:
            beside = self._behind[tail.tip]
            del beside[session_id]
            if not beside:
                del self._behind[tail.tip]
        return tail

    def find_tail(self, tip: PrefixNode, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """The session whose tail behind `tip` begins with most of `token_ids`, and with how many.

        Only the youngest tails there are looked at; None if none begins with the first of the ids.
        """
        wanted = tuple(token_ids)
        youngest = itertools.islice(reversed(self._behind.get(tip, {}).items()), _MAX_SEARCHED)
        shared = [(num_common_tokens(tail.token_ids, wanted), one) for one, tail in youngest]
        num_rows, session_id = max(shared, default=(0, 0))
        return (session_id, num_rows) if num_rows else None

    def release_tail(self, session_id: int) -> None:
        """Gives the tail page up, if it is still there."""
        tail = self.take_tail(session_id)
        if tail is not None:
            self._allocator.release(tail.page_id)

    def _oldest_tail(self) -> tuple[int, int] | None:
        """Age and session of the tail that goes next."""
        while self._by_age:
            age, session_id = self._by_age[0]
            tail = self._tails.get(session_id)
            if tail is not None and tail.age == age:
                return age, session_id
            heappop(self._by_age)
        return None

    def num_users(self, page_id: int) -> int:
        """How many hold a page, the tree not counted."""
        return self._allocator.num_sharers(page_id) - self._tree.knows(page_id)

    def figures(self, page_ids: Set[int], *, states: Mapping[str, int]) -> PoolFigures:
        """How the pool is used now; `page_ids` are those that sessions in `states` may share."""
        return PoolFigures(
            free=self._allocator.num_free,
            held=self._allocator.num_held,
            cached=self._tree.num_cached,
            shared=sum(self.num_users(page_id) > 1 for page_id in page_ids),
            total=self._allocator.num_pages,
            evicted=self._num_evicted,
            sessions=states,
        )

    def check_invariants(self, in_use: Mapping[int, int]) -> None:
        """Asserts that each page is held by its users (counted in `in_use`), tree and tail only."""
        allocator = self._allocator
        assert allocator.num_free + allocator.num_held == allocator.num_pages
        tail_page_ids = [tail.page_id for tail in self._tails.values()]
        for page_id in range(allocator.num_pages):
            num_holders = in_use.get(page_id, 0) + tail_page_ids.count(page_id)
            assert self.num_users(page_id) == num_holders
        assert {(tail.age, name) for name, tail in self._tails.items()} <= set(self._by_age)
        listed = [one for beside in self._behind.values() for one in beside.items()]
        assert dict(listed) == self._tails
        assert len(listed) == len(self._tails)
        self._tree.check_invariants()

    def tails(self) -> dict[int, int]:
        """The tail pages that are kept, by session id."""
        return {session_id: tail.page_id for session_id, tail in self._tails.items()}

    def has_tail(self, session_id: int) -> bool:
        """Whether the session's tail page is still there."""
        return session_id in self._tails
