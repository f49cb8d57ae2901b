"""What can be wrong with a page file or its folder, counted, and said in one line of the log.

Knows: kinds of fault, how often each came up. Does not know: files, who asks.
Invariant: a kind has one line when it first comes up, then at most one a minute, with a count.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

REPEAT_S = 60.0


class Fault(StrEnum):
    """Why a page could not be read, written or deleted."""

    DAMAGED = "damaged"
    WRONG_SIZE = "wrong_size"
    FOREIGN = "foreign"
    MIXED_UP = "mixed_up"
    UNREADABLE = "unreadable"
    MISSING = "missing"
    TOO_BUSY = "too_busy"
    DISK_FULL = "disk_full"
    UNWRITABLE = "unwritable"
    FOLDER_GONE = "folder_gone"
    BLOCKED = "blocked"
    QUOTA = "quota"
    UNREMOVABLE = "unremovable"
    BUG = "bug"


_SENTENCES = {
    Fault.DAMAGED: "a KV page on disk is damaged, it was removed and is computed again",
    Fault.WRONG_SIZE: "a KV page on disk has the wrong size, it was removed and is computed again",
    Fault.FOREIGN: "a KV page on disk is of another model or format, it was removed",
    Fault.MIXED_UP: "a KV page on disk holds other tokens than its name says, it was removed",
    Fault.UNREADABLE: "a KV page on disk cannot be read and is computed again",
    Fault.MISSING: "a KV page is gone from the disk and is computed again",
    Fault.TOO_BUSY: "the system has no means left to open a KV page, it is computed again",
    Fault.DISK_FULL: "the disk is full: no KV pages are written for a minute, reads go on",
    Fault.UNWRITABLE: "the KV folder cannot be written: no pages are for a minute, reads go on",
    Fault.FOLDER_GONE: "the KV folder was removed: no pages are written for a minute",
    Fault.BLOCKED: "a KV page cannot be written: something else has its name",
    Fault.QUOTA: "a sequence is longer than the room for KV pages on disk, its end is not kept",
    Fault.UNREMOVABLE: "a KV page on disk cannot be deleted, it is tried again",
    Fault.BUG: "the thread that keeps KV pages met an error of its own and goes on",
}


class BadPage(Exception):
    """A page file that must not be used; never leaves the archive."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


@dataclass(slots=True)
class _Kind:
    count: int = 0
    num_untold: int = 0
    told_s: float | None = None


class Complaints:
    """Counts faults and logs each kind rarely; `report` is called by one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # All kinds from the start: another thread may read while a count changes.
        self._kinds = {fault: _Kind() for fault in Fault}

    def report(self, fault: Fault, detail: object) -> None:
        """Counts one; `detail` (a path, an error) ends the line, if there is one now."""
        kind = self._kinds[fault]
        kind.count += 1
        now_s = self._clock()
        if kind.told_s is None:
            logger.warning("%s: %s", _SENTENCES[fault], detail)
        elif now_s - kind.told_s >= REPEAT_S:
            num_more = kind.num_untold + 1
            logger.warning("%s: %d more, the last %s", _SENTENCES[fault], num_more, detail)
        else:
            kind.num_untold += 1
            return
        kind.num_untold = 0
        kind.told_s = now_s

    def counts(self) -> dict[str, int]:
        """How often each kind came up, without those that never did."""
        return {str(fault): kind.count for fault, kind in self._kinds.items() if kind.count}
