"""Answers that ended a moment ago, with all their events, so that a client can resume them.

Knows: finished logs, when each ended, how much they hold.
Does not know: running answers, the store.
Invariant: what is older than the window is never found; the logs held are at most `max_logs`, and
their memory at most `max_bytes`, the oldest leaving first.
Cost: one dict entry for a log. Nothing runs in the background: an expired log leaves at the next
call, so an idle service may hold up to `max_bytes` for longer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from chatrt.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from chatrt.wire.log import ResponseLog

WINDOW_S = 60.0
RESPONSE_NOT_FOUND = "response_not_found"


class RecentLogs:
    """Keeps logs of finished responses.

    Args:
        window_s: How long a log is kept after its end; at least the grace of lost connections.
        max_bytes: Memory of all logs together, about.
        max_logs: Logs at once.
        clock: Seconds.
    """

    def __init__(
        self,
        *,
        window_s: float = WINDOW_S,
        max_bytes: int = 32 * 2**20,
        max_logs: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._window_s = window_s
        self._max_bytes = max_bytes
        self._max_logs = max_logs
        self._clock = clock
        self._held: OrderedDict[str, tuple[ResponseLog, float]] = OrderedDict()  # with its end
        self._num_bytes = 0

    def __len__(self) -> int:
        """Logs held."""
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        """Memory of all logs held, about."""
        return self._num_bytes

    def keep(self, log: ResponseLog) -> None:
        """A response ended now: hold its log, and let older ones go where it needs their room."""
        assert log.finished, "a running response is held by who runs it"
        self._held[log.response_id] = log, self._clock()
        self._num_bytes += log.held_bytes
        self._expire()
        while len(self._held) > self._max_logs or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._held)))

    def find(self, response_id: str, key_id: str) -> ResponseLog:
        """The log of a response that ended within the window.

        Raises:
            NotFound: There is none of this id and key (code `response_not_found`).
        """
        self._expire()
        log, _ = self._held.get(response_id, (None, None))
        if log is None or log.key_id != key_id:
            raise NotFound(
                f"response {response_id} cannot be resumed: it does not exist, or its events are "
                f"no longer held (up to {self._window_s:g} s after its end)",
                param="response_id",
                code=RESPONSE_NOT_FOUND,
            )
        return log

    def response(self, response_id: str, key_id: str) -> dict[str, Any] | None:
        """The response object of the terminal event; None if there is no such log."""
        try:
            event = self.find(response_id, key_id).terminal_event()
        except NotFound:
            return None
        assert event is not None
        body: dict[str, Any] = event["response"]
        return body

    def forget(self, response_ids: Iterable[str]) -> None:
        """Let the logs of deleted responses go."""
        for response_id in response_ids:
            if response_id in self._held:
                self._drop(response_id)

    def forget_conversation(self, conversation_id: str) -> None:
        """Let the logs of a deleted conversation go, those of turns that failed included."""
        self.forget(
            [
                response_id
                for response_id, (log, _) in self._held.items()
                if log.conversation_id == conversation_id
            ]
        )

    def _expire(self) -> None:
        oldest_s = self._clock() - self._window_s
        while self._held:
            response_id, (_, ended_s) = next(iter(self._held.items()))
            if ended_s >= oldest_s:
                break
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        log, _ = self._held.pop(response_id)
        self._num_bytes -= log.held_bytes
