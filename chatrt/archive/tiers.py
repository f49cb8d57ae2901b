"""What is where: host memory, the queue of pages to write, the disk; and what follows from that.

    save ── host memory ──────────────────┐
        └── queue ── (file thread) ── disk ┴── ready pages of a load

Knows: both tiers, the queue, loads, files that have to go. Does not know: threads and file calls;
every method is called under the archive's lock. Invariant: what is wiped is in no tier, not in the
queue and in no load when `wipe` returns; its file is among `doomed` until it is gone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.archive.loads import TIER_DISK, TIER_HOST, TIER_NONE, Loads

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from chatrt.archive.disk import DiskPages
    from chatrt.archive.host import HostPages
    from chatrt.archive.keys import PageKey, PageRecord
    from chatrt.archive.loads import Load

NUM_QUEUED = 8


@dataclass(frozen=True, slots=True)
class ArchiveFigures:
    """How full the archive is and what it did since its start.

    `num_other_pages` and `other_bytes` are other models' in the same folder. Bytes on disk are
    those of files, headers included. `failures` counts by reason, reasons that never came up left
    out.
    """

    num_host_pages: int
    host_bytes: int
    num_disk_pages: int
    disk_bytes: int
    num_other_pages: int
    other_bytes: int
    num_queued: int
    num_written: int
    num_read_from_host: int
    num_read_from_disk: int
    num_evicted_from_host: int
    num_evicted_from_disk: int
    num_wiped: int
    failures: Mapping[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """A page that waits to be written, or is being written."""

    record: PageRecord
    payload: bytes


class Tiers:
    """The archive's state."""

    def __init__(self, host: HostPages, disk: DiskPages | None) -> None:
        self.host = host
        self.disk = disk
        self.queue: dict[PageKey, Queued] = {}
        self.loads = Loads()
        # Files to remove before anything else, and those that would not go.
        self.doomed: deque[Path] = deque()
        self.stuck: set[Path] = set()
        self.is_scanned = disk is None
        self.may_write = disk is not None
        # Something became ready that the engine was not told of yet.
        self.has_news = False
        self.num_written = 0
        self.num_wiped = 0
        self.num_read = {TIER_HOST: 0, TIER_DISK: 0}
        self._early_wipes: list[tuple[PageKey, ...]] = []
        self._early_elsewhere: list[tuple[str, tuple[int, ...]]] = []

    @property
    def num_room(self) -> int:
        """Pages that `save` would take now."""
        if self.may_write:
            return max(NUM_QUEUED - len(self.queue), 0)
        return NUM_QUEUED if self.host.max_bytes else 0

    def knows(self, key: PageKey) -> bool:
        """Whether a page is in any tier or queued; safe without the lock: three look-ups."""
        if key in self.queue or key in self.host:
            return True
        return self.disk is not None and self.disk.knows(key)

    def save(self, record: PageRecord, payload: bytes, *, now_s: float) -> bool:
        """Takes a page; False where there is no room for it."""
        key = record.key
        known = self.knows(key)
        self.touch((record.parent, key), now_s=now_s)
        if key in self.queue or (self.disk is not None and self.disk.knows(key)):
            return True
        if self.may_write:
            if len(self.queue) >= NUM_QUEUED:
                return known
            self.queue[key] = Queued(record, payload)
        if key not in self.host:
            self.host.add(key, record.parent, payload, now_s=now_s)
        return self.knows(key)

    def touch(self, keys: Iterable[PageKey], *, now_s: float) -> None:
        """These pages are used now."""
        for key in keys:
            self.host.index.touch(key, now_s)
            if self.disk is not None:
                self.disk.touch(key)

    def advance(self, load: Load) -> None:
        """Delivers pages of a load up to the next one that has to come from disk."""
        while (record := load.wanted()) is not None:
            payload = self._in_memory(record.key)
            if payload is not None:
                self.deliver(load, payload, TIER_HOST)
            elif self.disk is not None and self.disk.knows(record.key):
                return
            else:
                self.deliver(load, None, TIER_NONE)

    def deliver(self, load: Load, payload: bytes | bytearray | None, tier: str) -> None:
        """The next page of a load is ready, or cannot be had."""
        if payload is not None:
            self.num_read[tier] += 1
        load.deliver(payload, tier)
        self.has_news = True

    def keep_read(self, record: PageRecord, payload: bytearray, *, now_s: float) -> None:
        """A page was read from disk: host memory takes it, it is likely to be asked for again."""
        if record.key not in self.host:
            self.host.add(record.key, record.parent, payload, now_s=now_s)

    def next_to_read(self) -> Load | None:
        """The oldest load whose next page lies on disk."""
        for load in self.loads:
            self.advance(load)
            if load.wanted() is not None:
                return load
        return None

    def wipe(self, keys: Sequence[PageKey]) -> None:
        """Deletes the end of a path, up to where another archived path branches off."""
        wiped = self._wipe(keys, disk_only=False)
        for load in self.loads:
            self.has_news |= load.cut(wiped)
        if not self.is_scanned:
            self._early_wipes.append(tuple(keys))

    def wipe_elsewhere(self, salt: str, token_ids: Sequence[int]) -> None:
        """Deletes the end of a path from what other models, or versions, left on disk."""
        if self.disk is not None:
            doomed = self.disk.forget_elsewhere(salt, token_ids)
            self.doomed.extend(doomed)
            self.num_wiped += len(doomed)
        if not self.is_scanned:
            self._early_elsewhere.append((salt, tuple(token_ids)))

    def scanned(self) -> None:
        """The disk's index is whole: what was wiped meanwhile goes from there too."""
        self.is_scanned = True
        for keys in self._early_wipes:
            self._wipe(keys, disk_only=True)
        self._early_wipes.clear()
        for salt, token_ids in self._early_elsewhere:
            self.wipe_elsewhere(salt, token_ids)
        self._early_elsewhere.clear()

    def drop_queue(self) -> None:
        """Gives up what waits to be written; host memory keeps its own."""
        self.queue.clear()

    def figures(self, failures: Mapping[str, int]) -> ArchiveFigures:
        """The counts now."""
        disk = self.disk
        others = [] if disk is None else list(disk.others.values())
        return ArchiveFigures(
            num_host_pages=len(self.host.index),
            host_bytes=self.host.index.num_bytes,
            num_disk_pages=0 if disk is None else len(disk.index),
            disk_bytes=0 if disk is None else disk.index.num_bytes,
            num_other_pages=sum(len(other) for other in others),
            other_bytes=sum(other.num_bytes for other in others),
            num_queued=len(self.queue),
            num_written=self.num_written,
            num_read_from_host=self.num_read[TIER_HOST],
            num_read_from_disk=self.num_read[TIER_DISK],
            num_evicted_from_host=self.host.num_evicted,
            num_evicted_from_disk=0 if disk is None else disk.num_evicted,
            num_wiped=self.num_wiped,
            failures=failures,
        )

    def _in_memory(self, key: PageKey) -> bytes | bytearray | None:
        queued = self.queue.get(key)
        return queued.payload if queued is not None else self.host.get(key)

    def _wipe(self, keys: Sequence[PageKey], *, disk_only: bool) -> set[PageKey]:
        wiped: set[PageKey] = set()
        for key in reversed(keys):
            if self._branches(key):
                break
            gone = False
            if not disk_only:
                gone = self.queue.pop(key, None) is not None
                gone |= self.host.remove(key)
            path = None if self.disk is None else self.disk.forget(key)
            if path is not None:
                self.doomed.append(path)
            if gone or path is not None:
                wiped.add(key)
        self.num_wiped += len(wiped)
        return wiped

    def _branches(self, key: PageKey) -> bool:
        """Whether any page is archived behind this one, in whichever tier."""
        return (
            self.host.index.num_children(key) > 0
            or (self.disk is not None and self.disk.num_children(key) > 0)
            or any(queued.record.parent == key for queued in self.queue.values())
        )
