"""Ends the program when its terminal is gone.

Knows: that a terminal hung up. Does not know: what the program shows.
Invariant: a program without a terminal ends, as SIGHUP has it, whether or not the terminal controls
it. One that is no longer controlled (behind `setsid`, in some containers and multiplexers) is told
nothing: its input would be ready for ever, with nothing to read.
Cost: one thread that sleeps until then.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading


def end_with_terminal() -> None:
    """Have the program end with the terminal that it reads from, if that is one."""
    if hasattr(select, "poll") and sys.__stdin__ is not None and sys.__stdin__.isatty():
        watcher = threading.Thread(
            target=_end_with, args=(sys.__stdin__.fileno(),), name="terminal", daemon=True
        )
        watcher.start()


def _end_with(terminal: int) -> None:
    gone = select.poll()
    gone.register(terminal, 0)  # hanging up is told unasked; what comes to read is not ours
    if any(told & (select.POLLHUP | select.POLLERR) for _, told in gone.poll()):
        os.kill(os.getpid(), signal.SIGHUP)
