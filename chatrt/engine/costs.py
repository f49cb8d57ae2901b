"""What a step costs on this machine, measured: the scheduler sizes prefill chunks by it.

Knows: the target's forward, a clock. Does not know: sessions, turns.
Invariant: nothing that is measured stays: pages that are written here belong to nobody yet.
Cost: twenty forwards, which also warm the shapes up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chatrt.batch import BatchRows
from chatrt.scheduler import LinearCostModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatrt.engine.forward import Target

_NUM_REPEATS = 5
_CHUNK_ROWS = 64
_NUM_SEQUENCES = 4
_CONTEXT_TOKENS = 1024


def measure_costs(
    target: Target, *, page_size: int, max_context: int, clock: Callable[[], int]
) -> LinearCostModel:
    """An affine model of a step from the quickest of a few forwards; `clock` gives nanoseconds.

    Call it before any session exists: it writes to the pages `[0, …)` of the cache.
    """
    num_tokens = min(target.kv.num_pages * page_size, max_context)
    context = max(0, min(_CONTEXT_TOKENS, num_tokens - 1))
    chunk = max(1, min(_CHUNK_ROWS, target.batches.max_rows, num_tokens))
    pages = range(-(-max(context + 1, chunk) // page_size))

    def rows(start: int, count: int) -> BatchRows:
        return BatchRows([0] * count, start, pages, range(count - 1, count))

    one_ms = _least_ms(target, [rows(0, 1)], clock)
    several = min(_NUM_SEQUENCES, target.batches.max_rows, target.batches.max_sequences)
    several_ms = _least_ms(target, [rows(0, 1)] * several, clock)
    chunk_ms = _least_ms(target, [rows(0, chunk)], clock)
    # Pages that were never written cost nothing to read: the system has one for all of them. Behind
    # a first forward, for which the executor has said how it wants them to lie in memory.
    target.kv.data[:, :, pages.start : pages.stop].zero_()
    context_ms = _least_ms(target, [rows(context, 1)], clock)
    row_ms = _slope(one_ms, several_ms, several - 1)
    return LinearCostModel(
        fixed_ms=max(0.0, one_ms - row_ms),
        decode_row_ms=row_ms,
        prefill_row_ms=_slope(one_ms, chunk_ms, chunk - 1),
        context_ms=_slope(one_ms, context_ms, context),
    )


def _slope(low_ms: float, high_ms: float, difference: int) -> float:
    return max(0.0, high_ms - low_ms) / difference if difference else 0.0


def _least_ms(target: Target, rows: Sequence[BatchRows], clock: Callable[[], int]) -> float:
    """Other processes only ever add to a time: the least of several is the forward's own."""
    times_ms: list[float] = []
    for _ in range(_NUM_REPEATS):
        start_ns = clock()
        logits = target.decoder.forward(target.batches.build(rows), target.kv)
        if logits.values.device.type == "cuda":
            torch.cuda.synchronize(logits.values.device)
        times_ms.append((clock() - start_ns) / 1e6)
    return min(times_ms)
