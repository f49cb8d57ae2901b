"""What the executor takes on a GPU: passes, first tokens of warm turns.

Knows: targets, engines, synchronising with the device. Does not know: how a model was made.
Invariant: a time ends when the device is done; medians are of repetitions behind a first one that
does not count.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatrt.batch import BatchRows
from chatrt.params import SamplingParams
from chatrt.testing.engine import engine_over, run_outcome, turn_request
from chatrt.turn import TokensEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatrt.engine import Engine, Target
    from chatrt.turn import FinishedEvent

_COPY_BYTES = 1 << 30
_ANSWER = SamplingParams(temperature=0.0, max_output_tokens=4, ignore_eos=True)


def synchronize(device: torch.device) -> None:
    """Return when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(run: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Of several runs, each until the device is done; the first two do not count."""
    times = []
    for _ in range(repetitions + 2):
        synchronize(device)
        started_ns = time.perf_counter_ns()
        run()
        synchronize(device)
        times.append((time.perf_counter_ns() - started_ns) / 1e6)
    return statistics.median(times[2:])


def copy_gbs(device: torch.device, num_bytes: int = _COPY_BYTES) -> float:
    """GB/s (10⁹ bytes) that a copy inside the device's memory moves, reads and writes together."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_ms(lambda: target.copy_(source), device, 10) / 1e6


def forward_ms(target: Target, num_rows: int, context: int, repetitions: int = 20) -> float:
    """One pass that verifies so many rows of a sequence with `context` tokens before them."""
    num_pages = -(-(context + num_rows) // target.kv.page_size)
    rows = [BatchRows([7] * num_rows, context, range(num_pages), range(num_rows))]

    def run() -> None:
        target.decoder.forward(target.batches.build(rows), target.kv)

    return median_ms(run, target.decoder.device, repetitions)


def step_bytes(target: Target, context: int) -> int:
    """What a decode step must read: the weights, and the sequence's keys and values."""
    kv = target.kv
    embedding, head = target.decoder.weights.embedding, target.decoder.weights.head
    weights = target.decoder.weights.num_bytes
    if head is not embedding:
        weights -= embedding.num_bytes  # one row of it
    return weights + kv.num_bytes // kv.num_pages * -(-context // kv.page_size)


def logits_of(target: Target, start: int, num_rows: int) -> torch.Tensor:
    """Logits `[rows, vocab]` of one pass over the pages as they are; the rows are written anew."""
    num_pages = -(-(start + num_rows) // target.kv.page_size)
    token_ids = [(31 * (start + i)) % 251 for i in range(num_rows)]
    rows = [BatchRows(token_ids, start, range(num_pages), range(num_rows))]
    values = target.decoder.forward(target.batches.build(rows), target.kv).values
    synchronize(target.decoder.device)
    return values.clone()


def uneven_rows(target: Target, context: int, counts: Sequence[int]) -> list[int]:
    """Those numbers of rows whose logits are not, bit for bit, what single rows give."""
    logits_of(target, 0, context)
    single = torch.cat([logits_of(target, context + i, 1) for i in range(max(counts))])
    wrong = []
    for count in counts:
        together = logits_of(target, context, count)
        if not torch.equal(together, single[:count]):
            wrong.append(count)
    return wrong


@dataclass(frozen=True, slots=True)
class WarmTurn:
    """A follow-up of `new_tokens` tokens behind `history_tokens`, and what its first token took."""

    history_tokens: int
    new_tokens: int
    cached_tokens: int
    ttft_ms: float


def warm_turn(target: Target, history_tokens: int, new_tokens: int = 20) -> WarmTurn:
    """A conversation's second turn on a resident tip, through the whole engine."""
    engine = engine_over(target, max_context=history_tokens + 256)
    ids = [(17 * i) % 251 for i in range(history_tokens)]
    first = run_outcome(engine, turn_request("first", ids, sampling=_ANSWER))
    history = [*ids, *first.token_ids]
    request = turn_request(
        "second", ids[:new_tokens], parent=first.end, history=history, sampling=_ANSWER
    )
    device = target.decoder.device
    synchronize(device)
    started_ns = time.perf_counter_ns()
    engine.submit(request)
    while not any(isinstance(event, TokensEvent) for event in engine.take_events()):
        engine.step()
    ttft_ms = (time.perf_counter_ns() - started_ns) / 1e6
    end = _ended(engine)
    return WarmTurn(history_tokens, new_tokens, end.kv.reused_tokens, ttft_ms)


def _ended(engine: Engine) -> FinishedEvent:
    """Step until a turn has ended; its last event."""
    from chatrt.turn import FinishedEvent

    for _ in range(1000):
        engine.step()
        for event in engine.take_events():
            if isinstance(event, FinishedEvent):
                return event
    raise AssertionError("the turn does not end")
