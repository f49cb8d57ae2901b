"""Pages in host memory: payloads within a number of bytes, the least recently used leaf goes first.

Knows: keys and payloads. Does not know: files, threads (the archive's lock is held).
Invariant: the payloads together never exceed `max_bytes`; 0 keeps none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt.archive.index import IndexEntry, PageIndex

if TYPE_CHECKING:
    from chatrt.archive.keys import PageKey


class HostPages:
    """Payloads by key."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.index = PageIndex()
        self.num_evicted = 0
        self._payloads: dict[PageKey, bytes | bytearray] = {}

    def __contains__(self, key: PageKey) -> bool:
        return key in self.index

    def get(self, key: PageKey) -> bytes | bytearray | None:
        """The payload, None if it is not here."""
        return self._payloads.get(key)

    def add(
        self, key: PageKey, parent: PageKey, payload: bytes | bytearray, *, now_s: float
    ) -> bool:
        """Keeps a page that is not here yet; False where only its own sequence could make room."""
        num_bytes = len(payload)
        self.index.touch(parent, now_s)
        while self.index.num_bytes + num_bytes > self.max_bytes:
            oldest = self.index.oldest_leaf(spare=parent)
            if oldest is None or self.index.was_refused(parent):
                self.index.refuse(key)
                return False
            self.remove(oldest.key)
            self.num_evicted += 1
        self._payloads[key] = payload
        self.index.add(IndexEntry(key, parent, num_bytes, now_s))
        return True

    def remove(self, key: PageKey) -> bool:
        """Drops a page; whether it was here."""
        self._payloads.pop(key, None)
        return self.index.remove(key) is not None
