"""Prometheus metrics of one server, in a registry of their own.

Knows: names, labels, buckets. Does not know: sockets, the engine's insides.
Invariant: no session or response id is ever a label. Cost: a few microseconds for each turn,
nothing for each token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from chatrt.errors import CapacityError
from chatrt.turn import FinishReason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from chatrt.archive import ArchiveFigures
    from chatrt.reclaim import PoolFigures
    from chatrt.turn import FinishedEvent, SpeculationFigures, Stamps

_LATENCY_BUCKETS = tuple(0.0005 * 2**i for i in range(17))  # 0.5 ms … 33 s


class Metrics:
    """Counts turns of `model`; `kv_bytes` is what the pages take, by whose keys and values."""

    def __init__(self, model: str, kv_bytes: Mapping[str, int] | None = None) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._ttft = Histogram(
            "chatrt_time_to_first_token_seconds",
            "Request frame read off the socket to first delta handed to the transport.",
            ("model", "prefix"),
            buckets=_LATENCY_BUCKETS,
            registry=self._registry,
        )
        self._tpot = Histogram(
            "chatrt_time_per_output_token_seconds",
            "Time between tokens behind the first, averaged over a response.",
            ("model",),
            buckets=_LATENCY_BUCKETS,
            registry=self._registry,
        )
        self._tokens = {
            kind: Counter(f"chatrt_{kind}_tokens", text, registry=self._registry)
            for kind, text in (
                ("prompt", "Tokens of all prompts."),
                ("prompt_cached", "Prompt tokens that were not computed again."),
                ("generation", "Tokens generated."),
            )
        }
        self._responses = Counter(
            "chatrt_responses", "Turns by how they ended.", ("status",), registry=self._registry
        )
        self._drafts = {
            kind: Counter(f"chatrt_spec_{kind}_tokens", text, ("drafter",), registry=self._registry)
            for kind, text in (
                ("drafted", "Tokens drafted for the target to verify."),
                ("accepted", "Drafted tokens that were the target's own."),
            )
        }
        self._accepted_at = Counter(
            "chatrt_spec_accepted_per_position",
            "Accepted drafts by their place in the chain, from 0.",
            ("position",),
            registry=self._registry,
        )
        self._drafting = Counter(
            "chatrt_spec_draft_seconds",
            "Time in proposals, of each turn that was in a step.",
            registry=self._registry,
        )
        self._pages = Gauge(
            "chatrt_kv_pages", "KV pages by state.", ("state",), registry=self._registry
        )
        self._count_pages()
        planned = Gauge(
            "chatrt_kv_bytes",
            "Bytes of all KV pages, touched or not, of the target and of what drafts for it.",
            ("owner",),
            registry=self._registry,
        )
        for owner, num_bytes in (kv_bytes or {}).items():
            planned.labels(owner).set(num_bytes)

    def _count_pages(self) -> None:
        """What happens to sessions and pages beside what turns count."""
        self._totals: dict[str, int] = {}
        self._sessions = Gauge(
            "chatrt_sessions", "Sessions by state.", ("state",), registry=self._registry
        )
        self._archived = Gauge(
            "chatrt_kv_archived_pages",
            "KV pages kept outside the device, by where.",
            ("tier",),
            registry=self._registry,
        )
        self._evictions = Counter(
            "chatrt_kv_evictions",
            "KV pages given up on the device, by what for.",
            ("reason",),
            registry=self._registry,
        )
        self._restored = Counter(
            "chatrt_kv_restored_tokens",
            "Tokens whose KV pages came back, by where from.",
            ("tier",),
            registry=self._registry,
        )
        self._failures = Counter(
            "chatrt_kv_archive_failures",
            "KV pages that could not be kept or were not used, by reason.",
            ("reason",),
            registry=self._registry,
        )
        self._refused = Counter(
            "chatrt_admission_refused",
            "Turns refused for want of room, by the error's code.",
            ("reason",),
            registry=self._registry,
        )

    def observe_turn(
        self, stamps: Stamps, event: FinishedEvent, first_sent_ns: int | None, num_input: int
    ) -> None:
        """Count a finished turn; `num_input` are the tokens of its prompt."""
        self._responses.labels(event.reason.value).inc()
        if event.reason is FinishReason.FAILED:
            if isinstance(event.error, CapacityError):
                self._refused.labels(event.error.code).inc()
            return
        if event.kv.restored_from is not None:
            self._restored.labels(event.kv.restored_from).inc(event.kv.restored_tokens)
        self._tokens["prompt"].inc(num_input)
        self._tokens["prompt_cached"].inc(event.kv.reused_tokens)
        self._tokens["generation"].inc(event.num_generated)
        if first_sent_ns is not None:
            seconds = (first_sent_ns - stamps.received_ns) / 1e9
            self._ttft.labels(self._model, event.kv.prefix).observe(seconds)
        if event.num_generated > 1:
            seconds = (event.last_token_ns - event.first_token_ns) / 1e9
            self._tpot.labels(self._model).observe(seconds / (event.num_generated - 1))

        self._observe_drafts(event.speculation)

    def _observe_drafts(self, figures: SpeculationFigures) -> None:
        if not figures.drafted:
            return
        self._drafts["drafted"].labels(figures.drafter).inc(figures.drafted)
        self._drafts["accepted"].labels(figures.drafter).inc(figures.accepted)
        self._drafting.inc(figures.draft_ms / 1e3)
        for position, accepted in enumerate(figures.accepted_per_position):
            self._accepted_at.labels(str(position)).inc(accepted)

    def render(self, pool: PoolFigures, archive: ArchiveFigures | None = None) -> bytes:
        """All metrics in Prometheus' text format, with pages and sessions as they are now."""
        for state in ("free", "held", "cached", "shared"):
            self._pages.labels(state).set(getattr(pool, state))
        for state in ("active", "parked"):
            self._sessions.labels(state).set(pool.sessions.get(state, 0))
        self._advance(self._evictions.labels("room"), "evicted", pool.evicted)
        if archive is not None:
            self._archived.labels("host").set(archive.num_host_pages)
            self._archived.labels("disk").set(archive.num_disk_pages)
            for reason, count in archive.failures.items():
                self._advance(self._failures.labels(reason), reason, count)
        return generate_latest(self._registry)

    def _advance(self, counter: Counter, name: str, total: int) -> None:
        """Bring a counter to a total that is counted elsewhere."""
        counter.inc(total - self._totals.get(name, 0))
        self._totals[name] = total
