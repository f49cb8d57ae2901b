"""Pages on demand: a free one, else the page that has been useless for longest.

Knows: what can be given up (cached pages nobody holds, tail pages of parked sessions) and in which
order. Does not know: token ids, what a session is beyond its id.
Invariant: a page in use is never taken. Ages are ticks of the tree's clock; a tail goes before the
cached pages of the same age, the end of a path before its front.
Cost: O(log pages) for each page given up.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.errors import OutOfPages

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from chatrt.pages import PageAllocator
    from chatrt.prefix import PrefixTree


@dataclass(frozen=True, slots=True)
class _Tail:
    page_id: int
    age: int


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """How the page pool is used: free + held = total.

    `cached` pages are known to the tree, `shared` are used by two sessions or more.
    """

    free: int
    held: int
    cached: int
    shared: int
    total: int


class PagePool:
    """Gives pages out of an allocator and takes back what nobody uses now."""

    __slots__ = ("_allocator", "_tails", "_tree")

    def __init__(self, allocator: PageAllocator, tree: PrefixTree) -> None:
        self._allocator = allocator
        self._tree = tree
        # By session id, oldest first: ages only grow.
        self._tails: OrderedDict[int, _Tail] = OrderedDict()

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
            oldest_tail = next(iter(self._tails.values()), None)
            if oldest_tail and (oldest_leaf is None or oldest_tail.age <= oldest_leaf):
                self._tails.popitem(last=False)
                self._allocator.release(oldest_tail.page_id)
            elif self._tree.evict(1) == 0:
                return num_freed
        return count

    def keep_tail(self, session_id: int, page_id: int, age: int) -> None:
        """Takes over a session's hold on its tail page until it is taken back or evicted.

        `age` is the tree's tick of now; no tail kept before may be younger.
        """
        self._tails[session_id] = _Tail(page_id, age)

    def take_tail(self, session_id: int) -> int | None:
        """Hands the tail page back with its hold; None if it was evicted or there was none."""
        tail = self._tails.pop(session_id, None)
        return None if tail is None else tail.page_id

    def release_tail(self, session_id: int) -> None:
        """Gives the tail page up, if it is still there."""
        page_id = self.take_tail(session_id)
        if page_id is not None:
            self._allocator.release(page_id)

    def num_users(self, page_id: int) -> int:
        """How many hold a page, the tree not counted."""
        return self._allocator.num_sharers(page_id) - self._tree.knows(page_id)

    def figures(self, page_ids: Set[int]) -> PoolFigures:
        """How the pool is used now; `page_ids` are the pages in use by sessions."""
        return PoolFigures(
            free=self._allocator.num_free,
            held=self._allocator.num_held,
            cached=self._tree.num_cached,
            shared=sum(self.num_users(page_id) > 1 for page_id in page_ids),
            total=self._allocator.num_pages,
        )

    def check_invariants(self, in_use: Mapping[int, int]) -> None:
        """Asserts that each page is held by its users (counted in `in_use`), tree and tail only."""
        allocator = self._allocator
        assert allocator.num_free + allocator.num_held == allocator.num_pages
        tail_page_ids = [tail.page_id for tail in self._tails.values()]
        for page_id in range(allocator.num_pages):
            num_holders = in_use.get(page_id, 0) + tail_page_ids.count(page_id)
            assert self.num_users(page_id) == num_holders
        self._tree.check_invariants()

    def tails(self) -> dict[int, int]:
        """The tail pages that are kept, by session id."""
        return {session_id: tail.page_id for session_id, tail in self._tails.items()}

    def has_tail(self, session_id: int) -> bool:
        """Whether the session's tail page is still there."""
        return session_id in self._tails
