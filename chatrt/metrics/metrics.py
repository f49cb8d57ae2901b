"""All metrics of one server, in a registry of their own.

Knows: the groups of metrics. Does not know: who counts, who scrapes.
Invariant: counted and rendered on the event loop's thread alone; no id is ever a label.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector

from chatrt.metrics.rendering import render
from chatrt.metrics.state_metrics import StateMetrics
from chatrt.metrics.turn_metrics import TurnMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from chatrt.archive import ArchiveFigures
    from chatrt.metrics.observer import TurnObserver
    from chatrt.metrics.state_metrics import EngineFigures
    from chatrt.wire.live import Sockets


class Metrics:
    """Metrics of a server of `model`; `kv_bytes` is what the pages take, by whose they are.

    `observers` (its own and `others`) are to be told of turns that ended, `on_gap` of the
    nanoseconds between two chunks of a stream. The process's own figures stand beside them where
    the system tells any (Linux).
    """

    def __init__(
        self,
        model: str,
        kv_bytes: Mapping[str, int] | None = None,
        others: Sequence[TurnObserver] = (),
    ) -> None:
        self.registry = CollectorRegistry()
        self._turns = TurnMetrics(model, self.registry)
        self.observers: tuple[TurnObserver, ...] = (self._turns, *others)
        self.on_gap: Callable[[int], None] = self._turns.gaps.observe_ns
        self._state = StateMetrics(self.registry, kv_bytes or {})
        ProcessCollector(registry=self.registry)

    def update(
        self, engine: EngineFigures, sockets: Sockets, archive: ArchiveFigures | None = None
    ) -> None:
        """Show these figures from now on; `archive` None: no page is kept outside the device."""
        self._state.update(engine, sockets, archive)
        device = self._turns.out_of_memory["device"]
        self._state.advance(device, "out of memory", engine.num_out_of_memory)

    async def render(self) -> bytes:
        """Prometheus' text, written in parts between which streams are served."""
        return await render(self.registry)
