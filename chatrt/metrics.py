"""Prometheus metrics of one server, in a registry of their own.

Knows: names, labels, buckets. Does not know: sockets, the engine's insides.
Invariant: no session or response id is ever a label. Cost: a few microseconds for each turn,
nothing for each token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from chatrt.turn import FinishReason

if TYPE_CHECKING:
    from collections.abc import Mapping

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

        planned = Gauge(
            "chatrt_kv_bytes",
            "Bytes of all KV pages, touched or not, of the target and of what drafts for it.",
            ("owner",),
            registry=self._registry,
        )
        for owner, num_bytes in (kv_bytes or {}).items():
            planned.labels(owner).set(num_bytes)

    def observe_turn(
        self, stamps: Stamps, event: FinishedEvent, first_sent_ns: int | None, num_input: int
    ) -> None:
        """Count a finished turn; `num_input` are the tokens of its prompt."""
        self._responses.labels(event.reason.value).inc()
        if event.reason is FinishReason.FAILED:
            return
        self._tokens["prompt"].inc(num_input)
        self._tokens["prompt_cached"].inc(event.kv.reused_tokens)
        self._tokens["generation"].inc(event.num_generated)
        if first_sent_ns is not None:
            prefix = "warm" if event.kv.reused_tokens else "cold"
            seconds = (first_sent_ns - stamps.received_ns) / 1e9
            self._ttft.labels(self._model, prefix).observe(seconds)
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

    def render(self, pool: PoolFigures) -> bytes:
        """All metrics in Prometheus' text format, with the page pool as it is now."""
        for state in ("free", "held", "cached", "shared"):
            self._pages.labels(state).set(getattr(pool, state))
        return generate_latest(self._registry)
