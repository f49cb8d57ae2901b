"""Archives for tests: small pages with payloads that say whose they are, and waiting for loads."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chatrt.archive import Archive, DiskPages, Loaded, PageKey, PageRecord, child_key, root_key
from tests.support import time_scale

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PAGE_SIZE = 4
PAGE_BYTES = 1000
# magic, version, model, key, parent, page size, payload bytes, token ids, checksum
HEADER_BYTES = 8 + 4 + 3 * 16 + 4 + 8 + 4 * PAGE_SIZE + 4
FILE_BYTES = HEADER_BYTES + PAGE_BYTES
MODEL = "tiny"
PLENTY = 1 << 30
PATIENCE_S = 20.0 * time_scale()


def path_of(*names: int, salt: str = "", model: str = MODEL) -> list[PageRecord]:
    """The records of a sequence, one page for each name."""
    records = []
    parent = root_key(model, salt)
    for name in names:
        token_ids = (name,) * PAGE_SIZE
        key = child_key(parent, token_ids)
        records.append(PageRecord(key, parent, token_ids))
        parent = key
    return records


def payload_of(record: PageRecord, version: int = 0) -> bytes:
    """A page's payload, which no other page has."""
    return (record.key + version.to_bytes(4, "little")) * (PAGE_BYTES // 20)


def keys_of(records: Sequence[PageRecord]) -> list[PageKey]:
    return [record.key for record in records]


@dataclass
class Clock:
    """A clock that goes when told to; it begins now, as files have times too."""

    now_s: float = field(default_factory=time.time)

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Kept:
    """An archive, and the event that its `wake` sets."""

    folder: Path | None
    host_bytes: int = 0
    max_bytes: int = PLENTY
    model: str = MODEL
    clock: Clock = field(default_factory=Clock)
    scanned: bool = True

    def __post_init__(self) -> None:
        self.woken = threading.Event()
        self.following: Kept | None = None
        self.disk: DiskPages | None = None
        if self.folder is not None:
            self.disk = DiskPages(self.folder, max_bytes=self.max_bytes, clock=self.clock)
        self.archive = Archive(
            page_bytes=PAGE_BYTES,
            page_size=PAGE_SIZE,
            fingerprint=self.model,
            host_bytes=self.host_bytes,
            disk=self.disk,
            wake=self.woken.set,
            clock=self.clock,
        )
        if self.scanned:
            assert self.archive.wait_ready(PATIENCE_S)

    def save(self, records: Sequence[PageRecord], version: int = 0) -> None:
        """Saves pages front to end and waits until they are where they stay."""
        for record in records:
            assert self.archive.save(record, payload_of(record, version))
            assert self.archive.flush(PATIENCE_S)

    def take(self, ticket: int, count: int) -> list[Loaded]:
        """Waits for `count` pages of a ticket, or its end."""
        taken: list[Loaded] = []
        while True:
            taken += [page for page in self.archive.take_loaded() if page.ticket == ticket]
            if len(taken) >= count or (taken and taken[-1].payload is None):
                return taken
            assert self.woken.wait(PATIENCE_S), f"{len(taken)} of {count} pages came"
            self.woken.clear()

    def load(self, records: Sequence[PageRecord]) -> list[Loaded]:
        """Loads pages and takes all of them, in order, up to the first that cannot be had."""
        taken = self.take(self.archive.load(records), len(records))
        assert [page.index for page in taken] == list(range(len(taken)))
        return taken

    def has(self, records: Sequence[PageRecord], version: int = 0) -> bool:
        """Whether all of these pages load, with the payloads that were saved."""
        payloads = [page.payload for page in self.load(records)]
        return payloads == [payload_of(record, version) for record in records]

    def wait_until_ahead(self, count: int) -> None:
        """Waits until the only load has `count` pages ready and the thread has no more to do."""
        archive = self.archive

        def is_ahead() -> bool:
            (load,) = archive._tiers.loads
            return len(load.ready) == count and not archive._worker._is_working

        with archive._changed:
            assert archive._changed.wait_for(is_ahead, PATIENCE_S)

    def failures(self) -> dict[str, int]:
        return dict(self.archive.figures().failures)

    def close(self) -> None:
        """Closes the archive, and the one that followed it."""
        assert self.archive.close(PATIENCE_S)
        if self.following is not None:
            self.following.close()

    def reopened(self, **changes: object) -> Kept:
        """The same folder after a restart."""
        self.close()
        facts = {
            "folder": self.folder,
            "host_bytes": self.host_bytes,
            "max_bytes": self.max_bytes,
            "model": self.model,
            "clock": self.clock,
        }
        self.following = Kept(**{**facts, **changes})  # type: ignore[arg-type]
        return self.following


class Gate:
    """Runs a real call only when let, and says when it is about to."""

    def __init__(self, call: Callable[..., object], *, after: bool = False) -> None:
        self._call = call
        self._after = after
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, *args: object) -> object:
        result = self._call(*args) if self._after else None
        self.reached.set()
        assert self.open.wait(PATIENCE_S)
        return result if self._after else self._call(*args)


def page_files(folder: Path) -> dict[str, Path]:
    """The page files below a folder by the hex of their key."""
    return {path.name.split(".")[0]: path for path in folder.rglob("*.kv")}


def file_of(folder: Path, record: PageRecord) -> Path:
    return page_files(folder)[record.key.hex()]
