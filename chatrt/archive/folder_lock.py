"""One process for one folder: a lock that ends with the process, however that ends.

Knows: flock, and its counterpart on Windows. Does not know: what is in the folder.
Source: flock(2); Microsoft's `_locking`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class FolderLock:
    """Held from construction to `release`."""

    def __init__(self, path: Path) -> None:
        """Takes the lock at once or not at all.

        Raises:
            BlockingIOError, PermissionError: Another holds it (PermissionError: on Windows).
            OSError: The file cannot be made, or its file system has no locks.
        """
        self._path = path
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(self._descriptor)
        except OSError:
            self.release()
            raise

    def is_in_place(self) -> bool:
        """Whether the file that is locked still is the one at its path."""
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        """Lets the next process have the folder; the file stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
