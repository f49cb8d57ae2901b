"""The archive as the engine sees it: save, look up, load, wipe, and never a wait.

Knows: the lock, when the file thread has to be told. Does not know: where a page lies (`tiers`),
files (`worker`, `disk`), tensors. Invariant: no method but `wait_ready`, `flush` and `close` waits
for a file; the lock is held for bookkeeping only. Methods are for one thread at a time, beside the
archive's own.
Cost: `knows` under 1 µs; `save` and `load` O(log pages) for each page, payloads are not copied.
Beside `host_bytes`, memory holds up to 8 queued pages and 16 ready ones for each load.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from chatrt.archive.faults import Complaints
from chatrt.archive.host import HostPages
from chatrt.archive.keys import fingerprint_key, path_keys, root_of
from chatrt.archive.loads import TIER_NONE
from chatrt.archive.page_file import PageLayout
from chatrt.archive.tiers import Tiers
from chatrt.archive.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from chatrt.archive.disk import DiskPages
    from chatrt.archive.keys import PageKey, PageRecord
    from chatrt.archive.loads import Load, Loaded
    from chatrt.archive.tiers import ArchiveFigures


class Archive:
    """Pages of one model in host memory and on disk."""

    def __init__(
        self,
        *,
        page_bytes: int,
        page_size: int,
        fingerprint: str,
        host_bytes: int,
        disk: DiskPages | None,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to scan the disk, if there is one, in the background.

        `page_bytes` is the size of every payload, `page_size` the tokens of a page, `fingerprint`
        all that must be equal for a page to be used again: the model's weights, the draft's, the
        cache's dtype and layout. `wake` is called by the archive's thread, without its lock, when
        `take_loaded` has something, or `save` has room again. The archive owns `disk` from here on.
        """
        layout = PageLayout(fingerprint_key(fingerprint), page_size, page_bytes)
        complaints = Complaints(clock)
        if disk is not None:
            disk.bind(layout, complaints)
        self._layout = layout
        self._complaints = complaints
        self._clock = clock
        self._changed = threading.Condition(threading.Lock())
        self._tiers = Tiers(HostPages(host_bytes), disk)
        self._worker = Worker(self._tiers, self._changed, complaints, wake, clock)
        self._is_closed = False
        if disk is not None:
            with self._changed:
                self._worker.stir()

    @property
    def num_room(self) -> int:
        """Pages that `save` would take now."""
        with self._changed:
            if self._is_closed:
                return 0
            self._worker.may_write_again()
            return self._tiers.num_room

    def save(self, record: PageRecord, payload: bytes) -> bool:
        """Takes a page; False: no room now. A known page is not taken again, but is used now.

        A page that is taken may still be lost: to the quota, to a full disk, to a kill.
        """
        assert len(payload) == self._layout.page_bytes, "a payload is one page"
        assert len(record.token_ids) == self._layout.page_size, "a record is one full page"
        with self._changed:
            if self._is_closed:
                return False
            self._worker.may_write_again()
            is_taken = self._tiers.save(record, payload, now_s=self._clock())
            if self._tiers.queue:
                self._worker.stir()
            return is_taken

    def knows(self, key: PageKey) -> bool:
        """Whether a page can be loaded as far as is known: files are verified when they are read.

        While the disk is being scanned, only what was found by then.
        """
        # Without the lock: look-ups in dictionaries that are changed in place.
        return self._tiers.knows(key)

    def load(self, records: Sequence[PageRecord]) -> int:
        """Begins to load these pages, in this order; returns the ticket that they come under."""
        with self._changed:
            load = self._tiers.loads.open(records)
            if self._is_closed:
                self._refuse(load)
                return load.ticket
            self._tiers.touch((record.key for record in records), now_s=self._clock())
            self._tiers.advance(load)
            self._worker.stir()
            return load.ticket

    def take_loaded(self, most: int = sys.maxsize) -> list[Loaded]:
        """Pages that are ready, at most so many, in order within each ticket; empty if none is.

        Those that are left wait for the next call, which nobody is woken for.
        """
        with self._changed:
            taken = self._tiers.loads.take(most)
            self._tiers.has_news = False
            if taken and not self._is_closed:
                for load in self._tiers.loads:
                    self._tiers.advance(load)
                self._worker.stir()
            return taken

    def abandon(self, ticket: int) -> None:
        """Nothing of this ticket arrives any more."""
        with self._changed:
            self._tiers.loads.abandon(ticket)

    def wipe(self, keys: Sequence[PageKey]) -> None:
        """Deletes the end of a path that is only its own, everywhere; files by the next `flush`.

        `keys` is the path from front to end. Deletion goes from its end to where another archived
        path branches off. Loads of what is deleted end there.
        """
        with self._changed:
            if not self._is_closed:
                self._tiers.wipe(keys)
                self._worker.stir()

    def wipe_sequence(self, salt: str, token_ids: Sequence[int]) -> None:
        """As `wipe`, by the ids of a sequence: for whoever has no engine to ask any more."""
        root = root_of(self._layout.fingerprint, salt)
        self.wipe(path_keys(root, token_ids, self._layout.page_size))
        self.wipe_elsewhere(salt, token_ids)

    def wipe_elsewhere(self, salt: str, token_ids: Sequence[int]) -> None:
        """As `wipe`, of the pages that other models or versions left in the same folder.

        Those whose pages have as many tokens as here: the others are not known by name.
        """
        with self._changed:
            if not self._is_closed:
                self._tiers.wipe_elsewhere(salt, token_ids)
                self._worker.stir()

    def touch(self, keys: Iterable[PageKey]) -> None:
        """These pages are used now; unknown ones are passed over."""
        with self._changed:
            if not self._is_closed:
                self._tiers.touch(keys, now_s=self._clock())
                self._worker.stir()

    def figures(self) -> ArchiveFigures:
        """How full the archive is and what it did."""
        with self._changed:
            return self._tiers.figures(self._complaints.counts())

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits until the disk is scanned; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._tiers.is_scanned, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was saved is written or given up, and all that was wiped deleted.

        Returns False when time is up, or where a file could not be deleted.
        """
        tiers = self._tiers
        with self._changed:
            if tiers.disk is None:
                return True
            tiers.doomed.extend(tiers.stuck)
            tiers.stuck.clear()
            self._worker.stir()
            is_settled = self._changed.wait_for(self._worker.is_settled, timeout_s)
            return is_settled and not tiers.stuck

    def close(self, timeout_s: float) -> bool:
        """Flushes, ends the thread and gives the folder free; nothing is taken afterwards.

        Returns False when time was up before that; the thread dies with the process then.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._is_closed = True
            for load in self._tiers.loads:
                self._refuse(load)
        is_flushed = self.flush(timeout_s)
        with self._changed:
            thread = self._worker.end()
        if thread is not None:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
            if thread.is_alive():
                return False
        if self._tiers.disk is not None:
            self._tiers.disk.close()
        return is_flushed

    def _refuse(self, load: Load) -> None:
        if not load.ended:
            self._tiers.deliver(load, None, TIER_NONE)
