"""Pages on disk: which there are, which go when the room is used up, and when they were used.

    under the archive's lock          in the file thread, without it
    knows, num_children, touch,       scan, write, read, remove, set_times, reopen
    adopt, make_room, add, forget

Knows: the folder's index, its quota, other models' pages in it. Does not know: threads, queues,
who asks. Invariant: the index says what the folder holds, but for files that others changed, which
reading finds out. Over the quota goes the least recently used leaf, whichever model it is of.
Cost: bookkeeping O(log pages); a page's time of use is written at most once a minute.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.archive.faults import BadPage, Complaints, Fault
from chatrt.archive.folder import FoundPage, PageFolder
from chatrt.archive.index import IndexEntry, PageIndex
from chatrt.archive.keys import path_keys, root_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from chatrt.archive.keys import PageKey, PageRecord
    from chatrt.archive.page_file import PageLayout

TOUCH_EVERY_S = 60.0
# More than this at once would keep a read waiting.
NUM_EVICTED_AT_ONCE = 64

# A lack of means on our side says nothing about the file.
_OUR_LACK = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class Room:
    """What has to be deleted for a page, and whether it fits then."""

    doomed: list[Path]
    fits: bool


class DiskPages:
    """The disk tier's pages of one model, and the bytes of all others in the same folder."""

    def __init__(
        self, folder: Path, *, max_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Makes and locks the folder; `max_bytes` is for all files in it, `clock` is wall time.

        Raises:
            FolderInUse: Another process has the folder.
            ArchiveError: It cannot be made or locked.
        """
        self.max_bytes = max_bytes
        self.num_evicted = 0
        self.index = PageIndex()
        self.others: dict[str, PageIndex] = {}
        self._folder = PageFolder(folder)
        self._clock = clock
        self._touched: set[PageKey] = set()
        # What the file system says about the time of use; missing: unknown, so write it.
        self._time_on_disk_s: dict[PageKey, float] = {}

    def bind(self, layout: PageLayout, complaints: Complaints) -> None:
        """Says which model's pages these are, before anything else is called."""
        self._layout = layout
        self._complaints = complaints

    @property
    def num_bytes(self) -> int:
        """Bytes of all page files in the folder."""
        return self.index.num_bytes + sum(other.num_bytes for other in self.others.values())

    @property
    def file_bytes(self) -> int:
        """Bytes that one more page takes."""
        return self._layout.file_bytes

    @property
    def has_touched(self) -> bool:
        """Whether there are times of use to write."""
        return bool(self._touched)

    # -- bookkeeping, under the archive's lock --

    def knows(self, key: PageKey) -> bool:
        """Whether the page is on disk as far as the scan got; safe without the lock."""
        return key in self.index

    def num_children(self, key: PageKey) -> int:
        """Pages on disk directly behind this one."""
        return self.index.num_children(key)

    def touch(self, key: PageKey) -> None:
        """The page is used now."""
        now_s = self._clock()
        if key in self.index:
            self.index.touch(key, now_s)
            if now_s - self._time_on_disk_s.get(key, 0.0) >= TOUCH_EVERY_S:
                self._touched.add(key)

    def adopt(self, found: Sequence[FoundPage]) -> list[tuple[Fault, Path]]:
        """Takes up what a scan found; returns the files that can be no page, and why."""
        doomed = []
        now_s = self._clock()
        for page in found:
            own = page.group == self._layout.fingerprint.hex()
            index = self.index if own else self.others.setdefault(page.group, PageIndex())
            twice = page.key in index
            if twice or (own and page.num_bytes != self._layout.file_bytes):
                path = self._folder.page_path(page.group, page.key, page.parent)
                doomed.append((Fault.MIXED_UP if twice else Fault.WRONG_SIZE, path))
                continue
            used_s = min(page.used_s, now_s)
            index.add(IndexEntry(page.key, page.parent, page.num_bytes, used_s))
            if own:
                self._time_on_disk_s[page.key] = used_s
        return doomed

    def make_room(self, num_bytes: int, *, spare: PageKey | None = None) -> Room:
        """Forgets pages until `num_bytes` more fit, a limited number at once.

        `spare`, the page that the new one lies behind, stays; where it was refused itself, nothing
        goes.
        """
        doomed: list[Path] = []
        while self.num_bytes + num_bytes > self.max_bytes and len(doomed) < NUM_EVICTED_AT_ONCE:
            if spare is not None and self.index.was_refused(spare):
                break
            leaves = [
                (entry.last_used_s, group)
                for group, index in self._groups()
                if (entry := index.oldest_leaf(spare=spare)) is not None
            ]
            if not leaves:
                break
            group = min(leaves)[1]
            doomed.append(self._evict(group, spare))
        return Room(doomed, fits=self.num_bytes + num_bytes <= self.max_bytes)

    def add(self, record: PageRecord) -> None:
        """A page's file is written."""
        now_s = self._clock()
        size = self._layout.file_bytes
        self.index.add(IndexEntry(record.key, record.parent, size, now_s))
        self._time_on_disk_s[record.key] = now_s

    def forget(self, key: PageKey) -> Path | None:
        """Holds a page no longer; returns the file to remove, None if there was none."""
        entry = self.index.remove(key)
        self._touched.discard(key)
        self._time_on_disk_s.pop(key, None)
        if entry is None:
            return None
        return self._folder.page_path(self._layout.fingerprint.hex(), key, entry.parent)

    def forget_elsewhere(self, salt: str, token_ids: Sequence[int]) -> list[Path]:
        """Holds the end of a sequence's path no longer that other models, or versions, left here.

        Returns the files to remove.
        """
        doomed: list[Path] = []
        for group, index in self.others.items():
            root = root_of(bytes.fromhex(group), salt)
            for key in reversed(path_keys(root, token_ids, self._layout.page_size)):
                if index.num_children(key):
                    break
                entry = index.remove(key)
                if entry is not None:
                    doomed.append(self._folder.page_path(group, key, entry.parent))
        return doomed

    def path_of(self, record: PageRecord) -> Path:
        """Where the file of a page of this model belongs."""
        group = self._layout.fingerprint.hex()
        return self._folder.page_path(group, record.key, record.parent)

    def clear(self) -> None:
        """Nothing is on disk any more: the folder is another one."""
        self.index.clear()
        self.others.clear()
        self._touched.clear()
        self._time_on_disk_s.clear()

    def take_touched(self) -> list[tuple[Path, float]]:
        """Some of the files whose time of use is to be written, with that time (seconds)."""
        taken: list[tuple[Path, float]] = []
        group = self._layout.fingerprint.hex()
        while self._touched and len(taken) < NUM_EVICTED_AT_ONCE:
            key = self._touched.pop()
            entry = self.index.get(key)
            if entry is not None:
                self._time_on_disk_s[key] = entry.last_used_s
                path = self._folder.page_path(group, key, entry.parent)
                taken.append((path, entry.last_used_s))
        return taken

    # -- files, in the file thread --

    def scan(self) -> Iterator[list[FoundPage]]:
        """What the folder holds, for `adopt`, a part at a time."""
        return self._folder.scan(self._complaints.report)

    def refuse(self, record: PageRecord) -> Fault:
        """A page is not written: only its own sequence could make room for it."""
        self.index.refuse(record.key)
        return self._fault(Fault.QUOTA, f"{self.max_bytes} bytes, {record.key.hex()}")

    def write(self, record: PageRecord, payload: bytes) -> Fault | None:
        """Writes a page's file; None if it is done, else why it is not."""
        if not self._folder.is_in_place():
            return self._fault(Fault.FOLDER_GONE, self._folder.path)
        try:
            self._folder.write(self._layout, record, payload)
        except IsADirectoryError as error:
            return self._fault(Fault.BLOCKED, error)
        except OSError as error:
            full = error.errno in _NO_ROOM
            return self._fault(Fault.DISK_FULL if full else Fault.UNWRITABLE, error)
        return None

    def read(self, record: PageRecord) -> bytearray | Fault:
        """A page's payload, verified; or why it cannot be had, which is reported."""
        try:
            return self._folder.read(self._layout, record)
        except BadPage as error:
            return self._fault(error.fault, f"{record.key.hex()}, {error}")
        except FileNotFoundError as error:
            return self._fault(Fault.MISSING, error)
        except OSError as error:
            lacking = error.errno in _OUR_LACK
            return self._fault(Fault.TOO_BUSY if lacking else Fault.UNREADABLE, error)

    def remove(self, path: Path, fault: Fault | None = None) -> bool:
        """Removes a file, and reports `fault` if that is why; whether none of that name is left.

        A folder in its place may stay.
        """
        if fault is not None:
            self._complaints.report(fault, path)
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            # Systems differ in how they refuse to unlink a folder.
            if os.path.isdir(path) and not os.path.islink(path):
                return True
            self._complaints.report(Fault.UNREMOVABLE, error)
            return False
        return True

    def set_times(self, touched: Sequence[tuple[Path, float]]) -> None:
        """Writes times of use; where that fails a page is merely older after a restart."""
        for path, used_s in touched:
            try:
                os.utime(path, (used_s, used_s))
            except OSError:
                return

    def reopen(self) -> bool:
        """Makes sure of the folder after it was gone; whether it is another one now.

        Raises:
            ArchiveError: It cannot be had.
        """
        if self._folder.is_in_place():
            return False
        fresh = PageFolder(self._folder.path)
        self._folder.close()
        self._folder = fresh
        return True

    def close(self) -> None:
        """Gives the folder free."""
        self._folder.close()

    def _groups(self) -> Iterator[tuple[str, PageIndex]]:
        yield self._layout.fingerprint.hex(), self.index
        yield from self.others.items()

    def _evict(self, group: str, spare: PageKey | None) -> Path:
        own = group == self._layout.fingerprint.hex()
        index = self.index if own else self.others[group]
        entry = index.oldest_leaf(spare=spare)
        assert entry is not None
        self.num_evicted += 1
        if own:
            path = self.forget(entry.key)
            assert path is not None
            return path
        index.remove(entry.key)
        return self._folder.page_path(group, entry.key, entry.parent)

    def _fault(self, fault: Fault, detail: object) -> Fault:
        self._complaints.report(fault, detail)
        return fault
