"""A radix tree over token ids: which page already holds the KV of which prefix.

    root of a salt ── page (16 ids) ── page ── page       a node is one full page of tokens
                                    └─ page ── page       and everything in front of it

Knows: token ids, page ids, who runs through a node, the rank of a pin. Does not know: sessions,
tensors, time: pins end when they are told to.
Invariant: the tree holds one reference on the page of each node. Whoever else holds the page of a
node also holds that node or one below it (`hold`), so a node that nobody holds is reclaimable, and
so is everything below it. Page content is found by comparing ids, never hashes alone.
Cost: `match` and `insert` O(pages); `hold`, `unhold`, `evict` O(log pages) amortised, no scans.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chatrt.pages import PageAllocator

_RANK_SHIFT = 48  # ages of a higher rank are larger than all of a lower one


@dataclass(slots=True, eq=False, repr=False)
class PrefixNode:
    """One full page on the path from its salt's root; a root stands for no tokens and no page.

    `depth` counts the pages from the root down to here. `num_holds` counts the holders whose path
    ends here plus the held children, `num_marks` those who would like to find the path again.
    `last_used` is an age, larger is younger: the tick of its last use, above which `rank` counts. A
    node is as young as its youngest descendant ever was. `key` is what an archive calls the path up
    to here, once it was asked.
    """

    token_ids: tuple[int, ...]
    page_id: int | None
    parent: PrefixNode | None
    depth: int
    last_used: int
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)
    sorted_keys: list[tuple[int, ...]] = field(default_factory=list)
    num_holds: int = 0
    num_marks: int = 0
    linked: bool = True
    rank: int = 0
    key: bytes = b""

    def ancestor(self, depth: int) -> PrefixNode:
        """The node on this path with `depth` pages, `0 <= depth <= self.depth`."""
        node = self
        while node.depth > depth:
            assert node.parent is not None
            node = node.parent
        return node


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest known prefix: full pages, then `num_partial` leading rows of one more page.

    `tip` is the node of the last full page (a root when there is none), `partial` the node of the
    page that matches in part. Neither is protected from eviction before it is held.
    """

    page_ids: tuple[int, ...]
    partial_page_id: int | None
    num_partial: int
    page_size: int
    tip: PrefixNode
    partial: PrefixNode | None

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV is known."""
        return len(self.page_ids) * self.page_size + self.num_partial


class PrefixTree:
    """Finds, keeps and evicts pages by the tokens that they hold; one root for each salt."""

    def __init__(self, allocator: PageAllocator, page_size: int = 16) -> None:
        self.page_size = page_size
        self._allocator = allocator
        self._roots: dict[str, PrefixNode] = {}
        self._node_of_page: dict[int, PrefixNode] = {}
        self._num_held = 0
        self._ticks = itertools.count(1)
        # Evictable leaves by age: (last_used, order of arrival, node). Entries may be outdated;
        # one is valid if its node still is an evictable leaf with that age.
        self._leaves: list[tuple[int, int, PrefixNode]] = []
        self._arrivals = itertools.count()

    @property
    def num_cached(self) -> int:
        """Pages that the tree knows."""
        return len(self._node_of_page)

    @property
    def num_evictable(self) -> int:
        """Pages that repeated leaf eviction would free: those of nodes that nobody holds."""
        return len(self._node_of_page) - self._num_held

    def knows(self, page_id: int) -> bool:
        """Whether a node of the tree stands for this page."""
        return page_id in self._node_of_page

    def nodes(self) -> Iterator[PrefixNode]:
        """Every node that has a page, in no particular order."""
        return iter(self._node_of_page.values())

    def match(self, salt: str, token_ids: Sequence[int], *, limit: int) -> PrefixMatch:
        """The longest prefix of `token_ids[:limit]` that is known under `salt`; makes it young."""
        limit = min(limit, len(token_ids))
        path = self._path(salt, token_ids, limit)
        tip = path[-1]
        start = tip.depth * self.page_size
        rest = tuple(token_ids[start : min(start + self.page_size, limit)])
        partial, num_partial = _longest_inside(tip, rest)
        self._touch(tip)
        if partial is not None:
            self._touch(partial)
        return PrefixMatch(
            page_ids=tuple(node.page_id for node in path if node.page_id is not None),
            partial_page_id=None if partial is None else partial.page_id,
            num_partial=num_partial,
            page_size=self.page_size,
            tip=tip,
            partial=partial,
        )

    def insert(
        self,
        salt: str,
        token_ids: Sequence[int],
        page_ids: Sequence[int],
        *,
        start_page: int = 0,
        parent: PrefixNode | None = None,
    ) -> PrefixNode:
        """Makes the full pages of a sequence known and returns the node of the last of them.

        `page_ids[i]` holds tokens `[i * page_size, (i + 1) * page_size)`; what does not fill a page
        is left out. Pages before `start_page` are known already; `parent`, the node of the page
        before it, spares the walk there. Where the same tokens are known under another page, that
        page stays, and the caller keeps its own as a duplicate.
        """
        size = self.page_size
        node = parent
        if node is None:
            node = self._path(salt, token_ids, start_page * size)[-1]
        assert node.depth == start_page, f"{node.depth} pages are known, not {start_page}"
        for index in range(start_page, min(len(page_ids), len(token_ids) // size)):
            key = tuple(token_ids[index * size : (index + 1) * size])
            node = node.children.get(key) or self._link(node, key, page_ids[index])
        self._touch(node)
        return node

    def hold(self, node: PrefixNode) -> None:
        """Protects a node and everything above it until `unhold`."""
        step: PrefixNode | None = node
        while step is not None:
            step.num_holds += 1
            if step.num_holds > 1:
                return
            if step.parent is not None:
                self._num_held += 1
            step = step.parent

    def unhold(self, node: PrefixNode) -> None:
        """Takes back one `hold`; the node counts as used until now."""
        self._touch(node)
        step: PrefixNode | None = node
        while step is not None:
            assert step.num_holds > 0, "a node was let go more often than held"
            step.num_holds -= 1
            if step.num_holds > 0:
                return
            if step.parent is not None:
                self._num_held -= 1
                self._offer(step)
            step = step.parent

    def mark(self, node: PrefixNode) -> None:
        """Notes that someone means to come back to this path: `wipe` spares it, eviction not."""
        node.num_marks += 1

    def unmark(self, node: PrefixNode) -> None:
        """Takes back one `mark`, also after the node was evicted."""
        while not node.linked:
            assert node.parent is not None
            node = node.parent
        assert node.num_marks > 0, "a node was unmarked more often than marked"
        node.num_marks -= 1

    def pin(self, node: PrefixNode, rank: int) -> None:
        """Eviction takes this path after all of lower rank, until `unpin`; `rank` is above 0."""
        node.rank = max(node.rank, rank)
        self._touch(node)

    def unpin(self, node: PrefixNode) -> None:
        """The path is as others are, and was used just now; also after its end was evicted."""
        while not node.linked:
            assert node.parent is not None
            node = node.parent
        node.rank = 0
        self._touch(node)

    def age(self, rank: int) -> int:
        """How old something of this rank is that is used now, beside nodes' `last_used`."""
        return (rank << _RANK_SHIFT) + next(self._ticks)

    def oldest(self) -> int | None:
        """When the leaf that eviction takes next was last used; None if nothing is evictable."""
        while self._leaves and not _is_valid(self._leaves[0]):
            heappop(self._leaves)
        return self._leaves[0][0] if self._leaves else None

    def evict(self, count: int) -> int:
        """Frees up to `count` pages, leaf first, oldest first; returns how many."""
        num_freed = 0
        while num_freed < count and self.oldest() is not None:
            self._unlink(heappop(self._leaves)[2])
            num_freed += 1
        return num_freed

    def wipe(self, salt: str, token_ids: Sequence[int]) -> int:
        """Forgets the end of a sequence's path, up to where others branch off, hold or mark it.

        Returns how many pages are forgotten.
        """
        node = self._path(salt, token_ids, len(token_ids))[-1]
        num_wiped = 0
        while node.parent is not None and not (node.children or node.num_holds or node.num_marks):
            parent = node.parent
            self._unlink(node)
            num_wiped += 1
            node = parent
        return num_wiped

    def check_invariants(self) -> None:
        """Asserts that every count and link agrees with the tree itself; for tests, O(pages)."""
        num_held = 0
        for page_id, node in self._node_of_page.items():
            assert node.linked
            assert node.page_id == page_id
            assert node.parent is not None
            assert node.parent.children[node.token_ids] is node
            assert self._allocator.num_sharers(page_id) >= 1
            assert node.sorted_keys == sorted(node.children)
            assert node.num_holds >= sum(child.num_holds > 0 for child in node.children.values())
            num_held += node.num_holds > 0
            if node.num_holds == 0:
                assert self._allocator.num_sharers(page_id) == 1
        assert num_held == self._num_held
        leaves = {id(entry[2]) for entry in self._leaves if _is_valid(entry)}
        assert leaves == {id(n) for n in self.nodes() if not n.children and n.num_holds == 0}

    def _path(self, salt: str, token_ids: Sequence[int], limit: int) -> list[PrefixNode]:
        """The root of `salt` and the nodes of the known full pages of `token_ids[:limit]`."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = PrefixNode((), None, None, 0, 0)
        path = [node]
        for end in range(self.page_size, limit + 1, self.page_size):
            child = node.children.get(tuple(token_ids[end - self.page_size : end]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _link(self, parent: PrefixNode, key: tuple[int, ...], page_id: int) -> PrefixNode:
        assert page_id not in self._node_of_page, f"page {page_id} already holds other tokens"
        self._allocator.share(page_id)
        # Its age comes from its own use and its descendants': a pin in front of it is not its own.
        node = PrefixNode(key, page_id, parent, parent.depth + 1, 0)
        parent.children[key] = node
        insort(parent.sorted_keys, key)
        self._node_of_page[page_id] = node
        return node

    def _unlink(self, node: PrefixNode) -> None:
        parent = node.parent
        assert parent is not None
        assert node.page_id is not None
        assert not node.children
        del parent.children[node.token_ids]
        del parent.sorted_keys[bisect_left(parent.sorted_keys, node.token_ids)]
        del self._node_of_page[node.page_id]
        node.linked = False
        self._allocator.release(node.page_id)
        parent.num_marks += node.num_marks
        parent.last_used = max(parent.last_used, node.last_used)
        parent.rank = max(parent.rank, node.rank)
        self._offer(parent)

    def _touch(self, node: PrefixNode) -> None:
        node.last_used = self.age(node.rank)
        self._offer(node)

    def _offer(self, node: PrefixNode) -> None:
        """Puts a node among the evictable leaves, with its present age, if it is one."""
        entry = (node.last_used, next(self._arrivals), node)
        if not _is_valid(entry):
            return
        heappush(self._leaves, entry)
        if len(self._leaves) > 2 * len(self._node_of_page) + 64:
            valid = {id(entry[2]): entry for entry in self._leaves if _is_valid(entry)}
            self._leaves = list(valid.values())
            heapify(self._leaves)


def _is_valid(entry: tuple[int, int, PrefixNode]) -> bool:
    """Whether an entry of the heap still names an evictable leaf with its present age."""
    last_used, _, node = entry
    return (
        node.linked
        and node.parent is not None
        and not node.children
        and node.num_holds == 0
        and node.last_used == last_used
    )


def _longest_inside(node: PrefixNode, rest: tuple[int, ...]) -> tuple[PrefixNode | None, int]:
    """The child that shares most leading ids with `rest`, and how many they share."""
    keys = node.sorted_keys
    place = bisect_left(keys, rest)
    best: PrefixNode | None = None
    num_best = 0
    # In sorted order, nothing shares more with `rest` than its two neighbours.
    for key in keys[max(place - 1, 0) : place + 1]:
        num_shared = num_common_tokens(key, rest)
        if num_shared > num_best:
            best, num_best = node.children[key], num_shared
    return best, num_best


def num_common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix, by halving: slices compare at C speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
