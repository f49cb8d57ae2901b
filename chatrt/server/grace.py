"""Answers whose reader is gone: they run on for a while, then they are abandoned.

Knows: logs without a reader, one timer for each. Does not know: connections, lanes, how an answer
is cancelled.
Invariant: at most one timer for a response, started by its last loss; a response that somebody
reads, or that has ended, is never abandoned.
Cost: a timer for each answer lost within the grace; a log that ended is not kept alive by it.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chatrt.server.service import Service
    from chatrt.wire.log import ResponseLog


class Graces:
    """The grace of all answers of one server; `grace_s` 0 abandons at once."""

    def __init__(self, service: Service, grace_s: float) -> None:
        self._service = service
        self._grace_s = grace_s
        self._timers: dict[str, tuple[asyncio.TimerHandle, weakref.ref[ResponseLog]]] = {}

    def __len__(self) -> int:
        """Answers whose grace runs."""
        return len(self._timers)

    def begin(self, log: ResponseLog) -> None:
        """A reader left: give the answer a whole grace from now on, if nobody else reads it."""
        self._stop_timer(log.response_id)
        if self._grace_s <= 0:
            self.drop(log)
        elif _is_orphan(log):
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._grace_s, self._over, log.response_id)
            self._timers[log.response_id] = timer, weakref.ref(log)

    def drop(self, log: ResponseLog) -> None:
        """Abandon an answer without a grace, unless it has ended or somebody else reads it."""
        if _is_orphan(log):
            self._service.abandon(log.response_id)

    def end(self) -> None:
        """The server ends: nobody can come back, so every grace is over, later ones too."""
        self._grace_s = 0.0
        for response_id in list(self._timers):
            self._over(response_id)

    def _over(self, response_id: str) -> None:
        log = self._stop_timer(response_id)
        if log is not None:
            self.drop(log)

    def _stop_timer(self, response_id: str) -> ResponseLog | None:
        """Forget the response's timer; its log, if there was one and the log is still held."""
        timer, log = self._timers.pop(response_id, (None, None))
        if timer is not None:
            timer.cancel()
        return None if log is None else log()


def _is_orphan(log: ResponseLog) -> bool:
    return not log.finished and log.num_subscribers == 0
