"""What turns count as they end, and streams as they are sent.

Knows: names, labels, buckets, an ended turn's figures. Does not know: sockets, who scrapes.
Invariant: no id is ever a label. What a person is still typing counts among the typed-ahead tokens
alone, so that it distorts neither the cached share nor the ways in which turns end.
Cost: 0.5 µs for a chunk; 30 µs for a turn, once, at its end. Labels are looked up beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram

from chatrt.errors import CapacityError, OutOfPages
from chatrt.metrics.gaps import GapHistogram
from chatrt.turn import FinishReason, TurnKind

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from chatrt.metrics.observer import EndedTurn
    from chatrt.turn import FinishedEvent, SpeculationFigures, Stamps

PREFIXES = ("cold", "warm", "forked", "restored")
LATENCY_BUCKETS_S = tuple(0.0005 * 2**i for i in range(17))  # 0.5 ms … 33 s
# Closer where a gap budget lies.
GAP_BUCKETS_S = tuple(
    ms / 1e3
    for ms in (
        *(0.5, 1, 2, 3, 4, 5, 7.5, 10, 15, 20, 25, 30, 40, 50, 75),
        *(100, 150, 200, 300, 500, 1000, 2000, 5000),
    )
)


class TurnMetrics:
    """Implements `TurnObserver`; `gaps` counts the time between two chunks of a stream."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._model = model
        self.gaps = GapHistogram(
            "chatrt_chunk_gap_seconds",
            "Between two deltas of a response handed to the same transport; chunks, not tokens.",
            GAP_BUCKETS_S,
            model,
        )
        registry.register(self.gaps)
        ttft = Histogram(
            "chatrt_time_to_first_token_seconds",
            "Request frame read off the socket to first delta handed to the transport.",
            ("model", "prefix"),
            buckets=LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._ttft = {prefix: ttft.labels(model, prefix) for prefix in PREFIXES}
        self._tpot = self._times(
            "time_per_output_token",
            "Time between tokens behind the first, averaged over a response.",
            GAP_BUCKETS_S,
        )
        self._add_stages()
        self._add_tokens()
        self._add_ends()
        self._add_drafts()

    def ended(self, turn: EndedTurn) -> None:
        """Count a turn (`TurnObserver`)."""
        event, request = turn.event, turn.request
        if turn.cancel_asked_ns is not None and event.reason is FinishReason.CANCELLED:
            self._cancel.observe(max(event.time_ns - turn.cancel_asked_ns, 0) / 1e9)
        if request.kind is TurnKind.TYPED_AHEAD:
            self._tokens["typed_ahead"].inc(event.kv.computed_tokens)
            return
        self._responses[event.reason].inc()
        if event.reason is FinishReason.FAILED:
            self._failed(event, request.stamps)
            return
        if event.kv.restored_from is not None:
            self._restored.labels(event.kv.restored_from).inc(event.kv.restored_tokens)
        self._tokens["prompt"].inc(len(request.token_ids))
        self._tokens["prompt_cached"].inc(event.kv.reused_tokens)
        self._tokens["generation"].inc(event.num_generated)
        self._duration.observe((turn.ended_ns - request.stamps.received_ns) / 1e9)
        self._time_stages(event, request.stamps)
        self._count_drafts(event.speculation)

    def first_sent(self, turn: EndedTurn, time_ns: int) -> None:
        """Time the first token (`TurnObserver`)."""
        seconds = (time_ns - turn.request.stamps.received_ns) / 1e9
        self._ttft[turn.event.kv.prefix].observe(seconds)

    def _failed(self, event: FinishedEvent, stamps: Stamps) -> None:
        if isinstance(event.error, OutOfPages) and stamps.admitted_ns:
            self.out_of_memory["pages"].inc()
        elif isinstance(event.error, CapacityError):
            self._refused.labels(event.error.code).inc()

    def _time_stages(self, event: FinishedEvent, stamps: Stamps) -> None:
        if not stamps.admitted_ns:
            return  # it was cancelled in the queue
        self._queue.observe((stamps.admitted_ns - stamps.tokenized_ns) / 1e9)
        computed_ns = stamps.sampled_ns or stamps.prefilled_ns
        if computed_ns:
            self._prefill.observe((computed_ns - stamps.admitted_ns) / 1e9)
        if event.num_generated:
            seconds = (event.last_token_ns - event.first_token_ns) / 1e9
            self._decode.observe(seconds)
            if event.num_generated > 1:
                self._tpot.observe(seconds / (event.num_generated - 1))

    def _count_drafts(self, figures: SpeculationFigures) -> None:
        self._passes.inc(figures.steps)
        self._emitted.inc(figures.emitted)
        self._drafting.inc(figures.draft_ms / 1e3)
        if not figures.drafted:
            return
        # A turn names who drafted most first: the same drafters in any order are one label.
        drafter = "+".join(sorted(figures.drafter.split("+")))
        self._drafts["drafted"].labels(drafter).inc(figures.drafted)
        self._drafts["accepted"].labels(drafter).inc(figures.accepted)
        for kind, counts in (
            ("drafted", figures.drafted_per_position),
            ("accepted", figures.accepted_per_position),
        ):
            for position, count in enumerate(counts):
                self._drafts_at[kind].labels(str(position)).inc(count)

    def _add_stages(self) -> None:
        self._duration = self._times(
            "request_duration",
            "Request frame read off the socket to the terminal event, storing included.",
        )
        self._queue = self._times("request_queue", "From tokenised to admitted.")
        self._prefill = self._times(
            "request_prefill",
            "From admitted to the first token chosen, or to the prompt's end where none is; "
            "restoring included.",
        )
        self._decode = self._times(
            "request_decode", "From the first token to the last.", LATENCY_BUCKETS_S
        )
        self._cancel = self._times(
            "cancel", "From a cancel being asked for to the answer's end, its pages given back."
        )

    def _add_tokens(self) -> None:
        self._tokens = {
            kind: self._counter(f"{kind}_tokens", text)
            for kind, text in (
                ("prompt", "Tokens of all prompts."),
                ("prompt_cached", "Prompt tokens that were not computed again."),
                ("generation", "Tokens generated."),
                ("typed_ahead", "Prompt tokens computed while they were being typed."),
            )
        }
        self._restored = self._counter(
            "kv_restored_tokens", "Tokens whose KV pages came back, by where from.", "tier"
        )
        for tier in ("host", "disk"):
            self._restored.labels(tier)

    def _add_ends(self) -> None:
        responses = self._counter(
            "responses", "Turns by how they ended; typing ahead is no turn.", "status"
        )
        self._responses = {reason: responses.labels(reason.value) for reason in FinishReason}
        self._refused = self._counter(
            "admission_refused",
            "Turns that the engine refused for want of room, by the error's code.",
            "reason",
        )
        for code in ("kv_exhausted", "rate_limit_exceeded"):
            self._refused.labels(code)
        lack = self._counter(
            "out_of_memory",
            "Turns that were under way and ended for want of a KV page (pages), steps that failed "
            "for want of memory on the device (device).",
            "of",
        )
        self.out_of_memory = {of: lack.labels(of) for of in ("pages", "device")}

    def _add_drafts(self) -> None:
        self._drafts = {
            kind: self._counter(f"spec_{kind}_tokens", text, "drafter")
            for kind, text in (
                ("drafted", "Tokens drafted for the target to verify."),
                ("accepted", "Drafted tokens that were the target's own."),
            )
        }
        self._drafts_at = {
            kind: self._counter(f"spec_{kind}_per_position", text, "position")
            for kind, text in (
                ("drafted", "Drafts by their place in the chain, from 0."),
                ("accepted", "Accepted drafts by their place in the chain, from 0."),
            )
        }
        self._drafting = self._counter(
            "spec_draft_seconds", "Time in proposals, of each turn that was in a step."
        )
        self._passes = self._counter("spec_passes", "Passes of the target that gave tokens.")
        self._emitted = self._counter(
            "spec_emitted_tokens",
            "Tokens that these passes gave, the bonus token of each pass included.",
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"chatrt_{name}", text, labels, registry=self._registry)

    def _times(
        self, name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S
    ) -> Histogram:
        histogram = Histogram(
            f"chatrt_{name}_seconds", text, ("model",), buckets=buckets, registry=self._registry
        )
        return histogram.labels(self._model)
