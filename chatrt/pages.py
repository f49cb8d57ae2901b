"""Reference-counted ids of KV pages: one page id means the same token slots in every KV tensor.

Knows: page ids and how many hold each. Does not know: tokens, tensors, who the holders are.
Invariant: free + held = total; a page is free exactly when nobody holds it.
Cost: O(1) for each page.
"""

from __future__ import annotations

from chatrt.errors import OutOfPages


class PageAllocator:
    """Hands out `num_pages` page ids; a page is free again when its last sharer releases it."""

    __slots__ = ("_free_ids", "_num_sharers", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # A stack: the page released last is handed out first, while it is still in a cache.
        self._free_ids = list(range(num_pages - 1, -1, -1))
        self._num_sharers = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free_ids)

    @property
    def num_held(self) -> int:
        """Pages that somebody holds, each counted once."""
        return self.num_pages - len(self._free_ids)

    def num_sharers(self, page_id: int) -> int:
        """How many hold this page; 0 for a free page."""
        return self._num_sharers[page_id]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages, each held once.

        Raises:
            OutOfPages: Fewer than `count` are free; none is taken then.
        """
        if count > len(self._free_ids):
            raise OutOfPages(count, len(self._free_ids), 0, self.num_pages)
        page_ids = [self._free_ids.pop() for _ in range(count)]
        for page_id in page_ids:
            self._num_sharers[page_id] = 1
        return page_ids

    def share(self, page_id: int) -> None:
        """One more holds a page that is already held."""
        assert self._num_sharers[page_id] > 0, f"page {page_id} is free and cannot be shared"
        self._num_sharers[page_id] += 1

    def release(self, page_id: int) -> None:
        """One holder fewer; the page is free when that was the last."""
        assert self._num_sharers[page_id] > 0, f"page {page_id} is free and cannot be released"
        self._num_sharers[page_id] -= 1
        if self._num_sharers[page_id] == 0:
            self._free_ids.append(page_id)
