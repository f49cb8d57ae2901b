"""The one thread that writes: jobs run in order, each in a transaction of its own.

Knows: a connection, a queue, futures. Does not know: what a job writes.
Invariant: a future resolves only after its job's commit; a job that fails leaves nothing behind.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

from chatrt.errors import StoreError
from chatrt.store.database import empty_log, store_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _Job(Generic[T]):
    """A function to run in a transaction, and the future of its result."""

    def __init__(self, run: Callable[[sqlite3.Connection], T], *, wipes: bool) -> None:
        self.run = run
        self.wipes = wipes
        self.future: Future[T] = Future()


class Writer:
    """Runs jobs on a thread of its own; `submit` may be called from any thread."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._wipe_due = False
        self._thread = threading.Thread(target=self._loop, name="chatrt-store", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[sqlite3.Connection], T], *, wipes: bool = False) -> Future[T]:
        """Queues a job; `wipes` says that what it deletes must be gone from the log file too.

        The future raises StoreError when the job cannot be written, or what the job raised.
        """
        job = _Job(run, wipes=wipes)
        with self._lock:
            if self._closed:
                job.future.set_exception(
                    StoreError(f"the conversation store {self._path} is closed")
                )
            else:
                self._jobs.put(job)  # type: ignore[arg-type]  # its future is typed for the caller
        return job.future

    def close(self) -> None:
        """Writes what is queued, then ends the thread and closes the connection."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.future.set_running_or_notify_cancel():
                self._run(job)
        self._connection.close()

    def _run(self, job: _Job[object]) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            result = job.run(self._connection)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            job.future.set_exception(store_error(self._path, "written", error))
        except Exception as error:  # the edge of the thread: the caller sees it, the loop goes on
            self._roll_back()
            job.future.set_exception(error)
        else:
            self._wipe(job)
            job.future.set_result(result)

    def _wipe(self, job: _Job[object]) -> None:
        self._wipe_due = self._wipe_due or job.wipes
        if self._wipe_due:
            try:
                self._wipe_due = not empty_log(self._connection)
            except sqlite3.Error as error:
                # The deletion itself is committed; the log is emptied behind the next write.
                logger.warning("the log of %s was not emptied: %s", self._path, error)

    def _roll_back(self) -> None:
        # SQLite has already rolled back after some errors (a full disk, for one).
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
