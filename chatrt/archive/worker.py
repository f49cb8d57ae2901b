"""The one thread that touches files: it removes, reads, scans and writes, in this order.

    # a job          plans under the lock, works on files without it, notes the outcome under it

Knows: the order of jobs, what follows from a failed one. Does not know: how files look, what the
engine wants pages for. Invariant: the thread never ends by an error; a page that was wiped while
its file was being written is removed again before the thread is idle.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from chatrt.archive.faults import Fault
from chatrt.archive.loads import TIER_DISK, TIER_NONE
from chatrt.archive.tiers import NUM_QUEUED
from chatrt.errors import ArchiveError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from chatrt.archive.disk import DiskPages
    from chatrt.archive.faults import Complaints
    from chatrt.archive.folder import FoundPage
    from chatrt.archive.tiers import Tiers

logger = logging.getLogger(__name__)

RETRY_S = 60.0

# What fails a write and is the page's own trouble; anything else is the folder's.
_ONE_PAGE = {Fault.BLOCKED, Fault.QUOTA}


class Worker:
    """Does the file work that the tiers ask for; `changed` is the archive's lock."""

    def __init__(
        self,
        tiers: Tiers,
        changed: threading.Condition,
        complaints: Complaints,
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._changed = changed
        self._complaints = complaints
        self._wake = wake
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._scan: Iterator[list[FoundPage]] | None = None
        self._is_working = False
        self._is_ending = False
        self._write_again_s: float | None = None
        self._reopen_due = False

    # -- called by the engine, under the lock --

    def stir(self) -> None:
        """There may be something to do; starts the thread at the first time."""
        if self._thread is None and not self._is_ending:
            self._thread = threading.Thread(target=self._run, name="chatrt-archive", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def may_write_again(self) -> None:
        """Ends the pause after a failed write, if it is over."""
        if self._write_again_s is not None and self._clock() >= self._write_again_s:
            self._write_again_s = None
            self._tiers.may_write = True

    def is_settled(self) -> bool:
        """Whether nothing is left to scan, remove or write."""
        tiers = self._tiers
        disk = tiers.disk
        return (
            tiers.is_scanned
            and not self._is_working
            and not tiers.queue
            and not tiers.doomed
            and (disk is None or not (disk.has_touched or disk.num_bytes > disk.max_bytes))
        )

    def end(self) -> threading.Thread | None:
        """Lets the thread end after its present job; returns it, to be joined without the lock."""
        self._is_ending = True
        self._changed.notify_all()
        return self._thread

    # -- the thread --

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception as error:  # the edge of the thread: it says so and goes on
                logger.exception("the archive's thread")
                self._complaints.report(Fault.BUG, error)
                with self._changed:
                    # Whatever it was about would fail again, at once and forever.
                    self._pause_writes()
                    self._end_loads()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._is_working = False
            while not self._is_ending:
                job = self._due()
                if job is not None:
                    self._is_working = True
                    return job
                self._changed.notify_all()
                self._changed.wait()
            self._changed.notify_all()
            return None

    def _due(self) -> Callable[[], None] | None:
        tiers, disk = self._tiers, self._tiers.disk
        has_to_read = tiers.next_to_read() is not None
        if tiers.has_news:
            return self._call_wake
        if disk is None:
            return None
        jobs: tuple[tuple[bool, Callable[[DiskPages], None]], ...] = (
            (bool(tiers.doomed), self._remove),
            (has_to_read, self._read),
            (not tiers.is_scanned, self._scan_on),
            (disk.num_bytes > disk.max_bytes, self._evict),
            (bool(tiers.queue) and self._reopen_due, self._reopen),
            (bool(tiers.queue), self._write),
            (disk.has_touched, self._set_times),
        )
        for is_due, job in jobs:
            if is_due:
                return lambda: job(disk)
        return None

    def _call_wake(self) -> None:
        with self._changed:
            self._tiers.has_news = False
        try:
            self._wake()
        except Exception as error:  # the engine's edge: pages must be kept even where it is gone
            self._complaints.report(Fault.BUG, error)

    def _remove(self, disk: DiskPages) -> None:
        with self._changed:
            path = self._tiers.doomed.popleft()
        self._remove_file(disk, path)

    def _remove_file(self, disk: DiskPages, path: Path, fault: Fault | None = None) -> None:
        if not disk.remove(path, fault):
            with self._changed:
                self._tiers.stuck.add(path)

    def _read(self, disk: DiskPages) -> None:
        tiers = self._tiers
        with self._changed:
            load = tiers.next_to_read()
            record = None if load is None else load.wanted()
        if load is None or record is None:
            return
        payload = disk.read(record)
        doomed = None
        with self._changed:
            # Wiped meanwhile: neither this load nor host memory may get it.
            still_there = disk.knows(record.key)
            is_due = tiers.loads.is_open(load) and load.wanted() is record
            if isinstance(payload, Fault):
                # A lack of means on our side says nothing about the file.
                if payload is not Fault.TOO_BUSY:
                    doomed = disk.forget(record.key)
                if is_due:
                    tiers.deliver(load, None, TIER_NONE)
            elif still_there:
                tiers.keep_read(record, payload, now_s=self._clock())
                if is_due:
                    tiers.deliver(load, payload, TIER_DISK)
        if doomed is not None:
            self._remove_file(disk, doomed)

    def _scan_on(self, disk: DiskPages) -> None:
        if self._scan is None:
            self._scan = disk.scan()
        found = next(self._scan, None)
        doomed = []
        with self._changed:
            if found is None:
                self._scan = None
                self._tiers.scanned()
            else:
                doomed = disk.adopt(found)
        for fault, path in doomed:
            self._remove_file(disk, path, fault)

    def _evict(self, disk: DiskPages) -> None:
        with self._changed:
            room = disk.make_room(0)
        for path in room.doomed:
            self._remove_file(disk, path)

    def _write(self, disk: DiskPages) -> None:
        tiers = self._tiers
        with self._changed:
            queued = next(iter(tiers.queue.values()), None)
            if queued is None:
                return
            record = queued.record
            if disk.knows(record.key):
                del tiers.queue[record.key]
                return
            room = disk.make_room(disk.file_bytes, spare=record.parent)
        for path in room.doomed:
            self._remove_file(disk, path)
        if not room.fits and room.doomed:
            return  # more has to go first, between reads
        fault = disk.write(record, queued.payload) if room.fits else disk.refuse(record)
        with self._changed:
            # Still the same one: it was not wiped meanwhile.
            was_wanted = tiers.queue.get(record.key) is queued
            if was_wanted:
                del tiers.queue[record.key]
                # Whoever found no room is told when half of it is there again.
                tiers.has_news |= len(tiers.queue) == NUM_QUEUED // 2
            if fault is None and was_wanted:
                tiers.num_written += 1
                tiers.stuck.discard(disk.path_of(record))
                disk.add(record)
            elif fault is None:
                tiers.doomed.appendleft(disk.path_of(record))
            elif fault not in _ONE_PAGE:
                self._reopen_due = fault is Fault.FOLDER_GONE
                self._pause_writes()

    def _reopen(self, disk: DiskPages) -> None:
        try:
            is_another = disk.reopen()
        except ArchiveError as error:
            self._complaints.report(Fault.UNWRITABLE, error)
            with self._changed:
                self._pause_writes()
            return
        with self._changed:
            self._reopen_due = False
            if is_another:
                disk.clear()
                self._tiers.is_scanned = False

    def _set_times(self, disk: DiskPages) -> None:
        with self._changed:
            touched = disk.take_touched()
        disk.set_times(touched)

    def _pause_writes(self) -> None:
        self._tiers.drop_queue()
        self._tiers.may_write = False
        self._write_again_s = self._clock() + RETRY_S

    def _end_loads(self) -> None:
        for load in self._tiers.loads:
            if not load.ended:
                self._tiers.deliver(load, None, TIER_NONE)
