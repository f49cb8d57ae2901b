"""What was compiled and captured, and how much of it after all should have been.

    # until `ready`    counted                      nobody waits yet
    # after it         counted as late, and logged  somebody's step waited for it

Knows: how many kernels and graphs, the names of kernels. Does not know: Triton, graphs, servers.
Invariant: counts never go back. Cost: nothing for a launch of what is there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompilationFigures:
    """Kernels that were compiled, or fetched compiled from a cache on disk; graphs captured."""

    num_kernels: int = 0
    num_graphs: int = 0


class Compilations:
    """Counts what an executor compiles; `all` since it was made, `late` after `ready`."""

    def __init__(self) -> None:
        self.all = CompilationFigures()
        self.late = CompilationFigures()
        self._is_ready = False

    def ready(self) -> None:
        """Everything is warm: whatever is compiled from now on is late."""
        self._is_ready = True

    def compiled(self, name: str) -> None:
        """A kernel of this name was compiled."""
        self.all = replace(self.all, num_kernels=self.all.num_kernels + 1)
        if self._is_ready:
            self.late = replace(self.late, num_kernels=self.late.num_kernels + 1)
            _log.warning("kernel %s was compiled after the server was ready: a step waited", name)

    def captured(self) -> None:
        """A pass was captured as a graph."""
        self.all = replace(self.all, num_graphs=self.all.num_graphs + 1)
        if self._is_ready:
            self.late = replace(self.late, num_graphs=self.late.num_graphs + 1)
            _log.warning("a graph was captured after the server was ready: a step waited")
