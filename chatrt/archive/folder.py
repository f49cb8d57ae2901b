"""The folder of page files: names that say everything an index needs, and whole files only.

    <folder>/lock
    <folder>/<model, 32 hex>/<first 2 hex of the key>/<key, 32 hex>.<parent, 32 hex>.kv

Knows: names, how files are written, read and removed. Does not know: what is kept and what goes.
Invariant: a file under its final name was written to its end (written aside, then renamed). Files
are their user's only (0600, folders 0700). Nothing is synced: a power cut loses pages or tears
them, and the checksum finds the torn ones; a killed process loses nothing that was renamed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.archive.faults import BadPage, Fault
from chatrt.archive.folder_lock import FolderLock
from chatrt.archive.page_file import check, make_header
from chatrt.errors import ArchiveError, FolderInUse
from chatrt.paths import FOLDER_MODE, ensure_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from chatrt.archive.keys import PageKey, PageRecord
    from chatrt.archive.page_file import PageLayout

LOCK_NAME = "lock"
SUFFIX = ".kv"
UNFINISHED = ".part"

_GROUP = re.compile(r"[0-9a-f]{32}")
_PART_OF_GROUP = re.compile(r"[0-9a-f]{2}")
_PAGE = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.kv(\.part)?")

# Flags that some systems lack. Not following links and not waiting for the other end of a pipe:
# whatever has a page's name is either a plain file or not read at all.
_COMMON = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _COMMON
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _COMMON


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page file as its name and the folder tell; `group` is the model's folder."""

    group: str
    key: PageKey
    parent: PageKey
    num_bytes: int
    used_s: float


class PageFolder:
    """Page files of all models in one folder, which is locked from construction to `close`."""

    def __init__(self, path: Path) -> None:
        """Makes the folder where it is missing, and locks it.

        Raises:
            FolderInUse: Another process has it.
            ArchiveError: It cannot be made or locked.
        """
        self.path = path
        try:
            ensure_folder(path)
            self._lock = FolderLock(path / LOCK_NAME)
        except OSError as error:
            if isinstance(error, BlockingIOError) or _is_locked_on_windows(error):
                raise FolderInUse(f"the KV folder {path} is used by another server") from error
            reason = error.strerror or str(error)
            raise ArchiveError(f"the KV folder {path} cannot be used: {reason}") from error

    def close(self) -> None:
        """Gives the folder free."""
        self._lock.release()

    def is_in_place(self) -> bool:
        """Whether the folder still is the one that was locked."""
        return self._lock.is_in_place()

    def page_path(self, group: str, key: PageKey, parent: PageKey) -> Path:
        """Where a page's file belongs."""
        name = key.hex()
        return self.path / group / name[:2] / f"{name}.{parent.hex()}{SUFFIX}"

    def scan(self, report: Callable[[Fault, object], None]) -> Iterator[list[FoundPage]]:
        """Every page file, from names alone, a few hundredths of the folder at a time.

        Files that a killed process did not finish are removed on the way; whatever has other names
        is left alone. Sub-folders that cannot be read are reported and passed over.
        """
        for group in _subfolders(self.path, _GROUP, report):
            for part in _subfolders(group, _PART_OF_GROUP, report):
                try:
                    yield _pages_in(group.name, part)
                except OSError as error:
                    report(Fault.UNREADABLE, error)

    def write(self, layout: PageLayout, record: PageRecord, payload: bytes) -> None:
        """Writes a page's file whole, or leaves nothing.

        Raises:
            OSError: It cannot be written; IsADirectoryError where a folder has its name.
        """
        path = self.page_path(layout.fingerprint.hex(), record.key, record.parent)
        unfinished = path.with_name(path.name + UNFINISHED)
        header = make_header(layout, record, payload)
        try:
            with open(_open_for_writing(unfinished), "wb", buffering=0) as file:
                for piece in (header, payload):
                    rest = memoryview(piece)
                    while rest:
                        rest = rest[file.write(rest) :]
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def read(self, layout: PageLayout, record: PageRecord) -> bytearray:
        """The payload of a page, verified to be undamaged and this record's.

        Raises:
            BadPage: The file is not what it should be.
            OSError: It cannot be read.
        """
        path = self.page_path(layout.fingerprint.hex(), record.key, record.parent)
        with open(os.open(path, _READ), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BadPage(Fault.UNREADABLE, "it is no plain file")
            if status.st_size != layout.file_bytes:
                sizes = f"{status.st_size} bytes, {layout.file_bytes} expected"
                raise BadPage(Fault.WRONG_SIZE, sizes)
            header, payload = bytearray(layout.header_bytes), bytearray(layout.page_bytes)
            for piece in (header, payload):
                rest = memoryview(piece)
                while rest:
                    num_read = file.readinto(rest)
                    if not num_read:
                        raise BadPage(Fault.WRONG_SIZE, "it ended while it was read")
                    rest = rest[num_read:]
        check(layout, record, bytes(header), payload)
        return payload


def _is_locked_on_windows(error: OSError) -> bool:
    return os.name == "nt" and isinstance(error, PermissionError)


def _open_for_writing(path: Path) -> int:
    """Opens a file in a model's folder, which is made where it is missing."""
    try:
        return os.open(path, _WRITE, 0o600)
    except FileNotFoundError:
        for folder in (path.parent.parent, path.parent):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=FOLDER_MODE)
        return os.open(path, _WRITE, 0o600)


def _subfolders(
    folder: Path, pattern: re.Pattern[str], report: Callable[[Fault, object], None]
) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError as error:
        report(Fault.UNREADABLE, error)
        return []
    return [folder / name for name in sorted(names) if pattern.fullmatch(name)]


def _pages_in(group: str, folder: Path) -> list[FoundPage]:
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = _PAGE.fullmatch(entry.name)
            if name is None or not entry.is_file(follow_symlinks=False):
                continue
            key, parent, unfinished = name.groups()
            # Gone meanwhile, or not ours to remove: either way it is not a page.
            with contextlib.suppress(OSError):
                if unfinished:
                    os.unlink(entry.path)
                elif key[:2] == folder.name:
                    status = entry.stat(follow_symlinks=False)
                    key_bytes, parent_bytes = bytes.fromhex(key), bytes.fromhex(parent)
                    size, used_s = status.st_size, status.st_mtime
                    found.append(FoundPage(group, key_bytes, parent_bytes, size, used_s))
    return found
