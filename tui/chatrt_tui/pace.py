"""How often a growing answer is painted while the server that writes it shares the machine.

Knows: what the thread that paints took since it was asked last. Does not know: widgets, text.
Invariant: painting takes about `SHARE` of a core, however long a frame takes here; text is at most
`LONGEST_PAUSE_S` late, and a first text never waits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Two cores that decode are slower by more than this: a pass waits for the slower one (ADR 24).
SHARE = 0.09
SHORTEST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.2
_WEIGHT = 0.3  # of the newest frame


class PaintPace:
    """Sets pauses between texts; `cpu_s` tells the seconds that the painting thread has worked."""

    def __init__(self, cpu_s: Callable[[], float] = time.thread_time) -> None:
        self._cpu_s = cpu_s
        self._asked_s: float | None = None
        self._frame_s = 0.0

    def pause_s(self) -> float:
        """Called with each text that arrives: how long to gather the next one."""
        now_s = self._cpu_s()
        if self._asked_s is not None:
            self._frame_s += _WEIGHT * (now_s - self._asked_s - self._frame_s)
        self._asked_s = now_s
        return min(max(self._frame_s / SHARE, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
