"""What metrics add to one step of several streams, with the model stubbed.

Knows: logs and their readers, observers of turns, the engine's notes of its steps.
Does not know: models, sockets.
Invariant: the same steps run with metrics and without, in turns, so that what else the machine does
meets both.
Source: at most 20 µs for each step of 8 streams, a turn of each ending every 32 steps.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.engine.snapshot import StepLog
from chatrt.metrics import EndedTurn, Metrics
from chatrt.params import SamplingParams
from chatrt.turn import (
    FinishedEvent,
    FinishReason,
    KVFigures,
    SpeculationFigures,
    Stamps,
    TurnKind,
    TurnRequest,
)
from chatrt.wire.log import DELTA, ResponseLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt.wire.log import Subscription

NUM_STREAMS = 8
TOKENS_PER_TURN = 32  # short answers: a turn's own cost is spread over few steps
BAR_US = 20.0
_PROMPT_TOKENS = 500


@dataclass(frozen=True, slots=True)
class MetricsCost:
    """Microseconds that metrics add to a step, medians; `total_us` is the sum of the parts.

    `chunks_us` for the chunks of its streams, `turns_us` its share of the turns' ends, `notes_us`
    for the engine's note of the step, on the engine's own thread.
    """

    chunks_us: float
    turns_us: float
    notes_us: float
    num_streams: int = NUM_STREAMS
    tokens_per_turn: int = TOKENS_PER_TURN
    at_most_us: float = BAR_US

    @property
    def total_us(self) -> float:
        """All of a step's metrics."""
        return self.chunks_us + self.turns_us + self.notes_us

    @property
    def within(self) -> bool:
        """Whether that is no more than it may be."""
        return self.total_us <= self.at_most_us


class _Streams:
    """Answers whose chunks are appended, read and marked as sent, as a connection does it."""

    def __init__(self, on_gap: Callable[[int], None] | None) -> None:
        self._readers: list[Subscription] = []
        for index in range(NUM_STREAMS):
            log = ResponseLog(f"resp_{index}", "key", on_gap=on_gap)
            self._readers.append(log.subscribe(_nothing))

    def step(self, clock_ns: Callable[[], int]) -> int:
        """One chunk of each stream; how long that took, in nanoseconds."""
        started_ns = clock_ns()
        for reader in self._readers:
            reader.log.append({"type": DELTA, "item_id": "msg", "delta": " word", "logprobs": []})
            reader.take()
            reader.mark_sent(started_ns)
        return clock_ns() - started_ns


def measure_metrics(
    num_steps: int, *, clock_ns: Callable[[], int] = time.perf_counter_ns
) -> MetricsCost:
    """Runs `num_steps` steps of 8 streams with metrics and as many without."""
    metrics, steps = Metrics("stub"), StepLog()
    counted, plain = _Streams(metrics.on_gap), _Streams(None)
    turn = _turn()
    chunks_ns, turns_ns, notes_ns = [], [], []
    for _ in range(num_steps):
        plain_ns = plain.step(clock_ns)
        chunks_ns.append(counted.step(clock_ns) - plain_ns)
        started_ns = clock_ns()
        for observer in metrics.observers:
            observer.ended(turn)
            observer.first_sent(turn, turn.ended_ns)
        ended_ns = clock_ns()
        steps.add(started_ns, ended_ns)
        turns_ns.append(ended_ns - started_ns)
        notes_ns.append(clock_ns() - ended_ns)
    return MetricsCost(
        chunks_us=max(statistics.median(chunks_ns), 0.0) / 1e3,
        turns_us=statistics.median(turns_ns) * NUM_STREAMS / TOKENS_PER_TURN / 1e3,
        notes_us=statistics.median(notes_ns) / 1e3,
    )


def _turn() -> EndedTurn:
    """A turn of which everything is counted that can be."""
    request = TurnRequest(
        response_id="resp_0",
        kind=TurnKind.ANSWER,
        token_ids=[0] * _PROMPT_TOKENS,
        num_history=0,
        sampling=SamplingParams(),
        stamps=Stamps(1_000, 2_000, 3_000, 4_000, 5_000, 6_000, 7_000),
    )
    event = FinishedEvent(
        response_id="resp_0",
        reason=FinishReason.CANCELLED,
        output_ids=(),
        num_generated=TOKENS_PER_TURN,
        text="",
        seed=0,
        kv=KVFigures(prefix="restored", restored_tokens=16, restored_from="disk"),
        speculation=SpeculationFigures(
            drafter="head+ngram",
            steps=12,
            drafted=40,
            accepted=20,
            emitted=32,
            accepted_per_position=(10, 6, 3, 1),
            depths=(2, 0, 0, 0, 10),
            draft_ms=8.0,
        ),
        first_token_ns=7_000,
        last_token_ns=90_000_000,
        time_ns=90_000_000,
    )
    return EndedTurn(request, event, ended_ns=91_000_000, cancel_asked_ns=89_000_000)


def _nothing() -> None:
    """What a reader does that is asked for its next event anyway."""
