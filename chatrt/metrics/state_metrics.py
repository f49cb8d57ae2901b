"""Pages, sessions, steps and sockets as they are at a scrape.

Knows: names and labels; which figure goes where. Does not know: how the figures are counted.
Invariant: a counter is brought to a total that is counted elsewhere, and never goes back.
Cost: nothing between scrapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

from chatrt.archive.faults import Fault
from chatrt_kernels.compilations import CompilationFigures

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client import CollectorRegistry

    from chatrt.archive import ArchiveFigures
    from chatrt.reclaim import PoolFigures
    from chatrt.wire.live import Sockets

_PAGE_STATES = ("free", "held", "cached", "shared")


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The engine between two steps: pages, queue, and what it did since its start.

    `num_running` turns run that somebody waits for, `num_waiting` such turns are in the queue.
    `num_steps` did something, in `step_ns` together; `num_out_of_memory` failed for want of the
    device's memory. `compilations` are those after the server was ready.
    """

    pool: PoolFigures
    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    step_ns: int = 0
    num_out_of_memory: int = 0
    compilations: CompilationFigures = field(default_factory=CompilationFigures)


class StateMetrics:
    """Gauges, and counters that are counted elsewhere; `update` at each scrape."""

    def __init__(self, registry: CollectorRegistry, kv_bytes: Mapping[str, int]) -> None:
        self._registry = registry
        self._totals: dict[str, int] = {}
        self._add_pages(kv_bytes)
        sessions = self._gauge(
            "sessions",
            "Sessions by state: active ones run a turn or are prepared for their next one at idle "
            "time, parked ones wait for it.",
            "state",
        )
        self._sessions = {state: sessions.labels(state) for state in ("active", "parked")}
        self._running = self._gauge(
            "turns_running",
            "Turns under way that somebody waits for: neither typing ahead nor idle work.",
        )
        self._waiting = self._gauge(
            "queue_length", "Turns that wait to be admitted, and somebody for them."
        )
        self._connections = self._gauge("ws_connections", "Open WebSocket connections.")
        self._outboxes = self._gauge(
            "ws_outbox_bytes", "Bytes that wait to be sent on all connections, roughly."
        )
        self._steps = self._counter("steps", "Steps of the engine that did something.")
        self._step_seconds = self._counter("step_seconds", "Time in these steps.")
        late = self._counter(
            "late_compilations",
            "Kernels compiled (kernel) and passes captured (graph) after the server was ready: "
            "each held a step up, and there should be none.",
            "of",
        )
        self._late = {of: late.labels(of) for of in ("kernel", "graph")}

    def update(
        self, engine: EngineFigures, sockets: Sockets, archive: ArchiveFigures | None
    ) -> None:
        """Show these figures from now on; `archive` None: no page is kept outside the device."""
        pool = engine.pool
        for state, pages in self._pages.items():
            pages.set(getattr(pool, state))
        for state, sessions in self._sessions.items():
            sessions.set(pool.sessions.get(state, 0))
        self._running.set(engine.num_running)
        self._waiting.set(engine.num_waiting)
        self._connections.set(sockets.num_connections)
        self._outboxes.set(sockets.outbox_bytes)
        self.advance(self._evicted, "evictions", pool.evicted)
        self.advance(self._steps, "steps", engine.num_steps)
        self._step_seconds.inc(self._more("step_ns", engine.step_ns) / 1e9)
        self.advance(self._late["kernel"], "late kernels", engine.compilations.num_kernels)
        self.advance(self._late["graph"], "late graphs", engine.compilations.num_graphs)
        if archive is not None:
            self._archived.labels("host").set(archive.num_host_pages)
            self._archived.labels("disk").set(archive.num_disk_pages)
            for reason, count in archive.failures.items():
                self.advance(self._failures.labels(reason), f"failures {reason}", count)

    def advance(self, counter: Counter, name: str, total: int) -> None:
        """Bring a counter to a total that is counted elsewhere; `name` tells totals apart."""
        counter.inc(self._more(name, total))

    def _more(self, name: str, total: int) -> int:
        """How much more it is than at the last scrape."""
        before, self._totals[name] = self._totals.get(name, 0), total
        return total - before

    def _add_pages(self, kv_bytes: Mapping[str, int]) -> None:
        pages = self._gauge(
            "kv_pages",
            "KV pages by state: free + held = all; cached ones, which the prefix tree knows, and "
            "shared ones, of several running sessions, are among the held.",
            "state",
        )
        self._pages = {state: pages.labels(state) for state in _PAGE_STATES}
        self._archived = self._gauge(
            "kv_archived_pages", "KV pages kept outside the device, by where.", "tier"
        )
        planned = self._gauge(
            "kv_bytes",
            "Bytes of all KV pages, touched or not, of the target and of what drafts for it.",
            "owner",
        )
        for owner, num_bytes in kv_bytes.items():
            planned.labels(owner).set(num_bytes)
        evictions = self._counter(
            "kv_evictions", "KV pages given up on the device, by what for.", "reason"
        )
        self._evicted = evictions.labels("room")
        self._failures = self._counter(
            "kv_archive_failures",
            "KV pages that could not be kept or were not used, by reason.",
            "reason",
        )
        for reason in Fault:  # a rate needs the zero before the first one
            self._failures.labels(reason.value)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"chatrt_{name}", text, labels, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"chatrt_{name}", text, labels, registry=self._registry)
