"""What a step costs on this machine, measured: chunks and drafts are sized by it.

Knows: the target's forward, a clock. Does not know: sessions, turns.
Invariant: nothing that is measured stays: pages that are written here belong to nobody yet.
Cost: forty forwards for the scheduler's model, which also warm the shapes up (0.4 s with SmolLM2
on two cores); for passes by their rows a budget in seconds.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from chatrt.batch import BatchRows
from chatrt.cost_model import ForwardCosts, looked_back_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatrt.engine.forward import Target

_NUM_REPEATS = 5
_NUM_LONG_REPEATS = 3  # of chunks that take long, and whose time varies less
_LONG_ROWS = 32
_CHUNK_ROWS = (1, 2, 4, 8, 16, 32, 64)
_NUM_SEQUENCES = (1, 2, 4)  # among the chunks' rows, to compare with them
_DEEP_ROWS = 16
_CONTEXT_TOKENS = 1024
_VERIFY_ROWS = (1, 2, 3, 4, 5, 6, 8, 16)


def measure_costs(
    target: Target, *, page_size: int, max_context: int, clock: Callable[[], int]
) -> ForwardCosts:
    """The quickest of a few forwards: chunks by their rows, sequences, deep context.

    Call it before any session exists: it writes to the pages `[0, …)` of the cache. `clock` gives
    nanoseconds.
    """
    num_tokens = min(target.kv.num_pages * page_size, max_context)
    most = max(1, min(target.batches.max_rows, num_tokens))
    counts = [count for count in _CHUNK_ROWS if count <= most]
    deep = min(_DEEP_ROWS, counts[-1])
    context = max(0, min(_CONTEXT_TOKENS, num_tokens - deep))
    most_sequences = min(target.batches.max_sequences, counts[-1])
    several = max(count for count in _NUM_SEQUENCES if count <= most_sequences)
    pages = range(-(-max(context + deep, counts[-1]) // page_size))

    def chunk(start: int, count: int) -> BatchRows:
        return BatchRows([0] * count, start, pages, range(count - 1, count))

    _forward_ms(target, [chunk(0, 1)], clock)
    # Pages that were never written cost nothing to read: the system has one for all of them. Behind
    # a first forward, for which the executor has said how it wants them to lie in memory.
    target.kv.data[:, :, pages.start : pages.stop].zero_()
    others = [[chunk(0, 1)] * several, [chunk(context, 1)], [chunk(context, deep)]]
    passes = [[chunk(0, count)] for count in counts] + others
    *fresh_ms, several_ms, one_ms, deep_ms = _least_ms(target, passes, clock)
    fresh = dict(zip(counts, fresh_ms, strict=True))
    one_slope, deep_slope = _slope(fresh[1], one_ms, context), _slope(fresh[deep], deep_ms, context)
    attended_ms = _slope(one_slope, deep_slope, deep - 1)
    rows_ms = {count: ms - attended_ms * looked_back_at(count, 0) for count, ms in fresh.items()}
    return ForwardCosts(
        rows=tuple(counts),
        rows_ms=tuple(accumulate(rows_ms.values(), max)),
        logits_ms=_slope(rows_ms[several], several_ms, several - 1),
        context_ms=max(0.0, one_slope - attended_ms),
        attended_ms=attended_ms,
    )


def measure_rows(
    target: Target,
    *,
    page_size: int,
    max_context: int,
    clock: Callable[[], int],
    budget_s: float = 0.25,
) -> tuple[tuple[int, float], ...]:
    """(rows, ms) of passes that verify one sequence, logits at every row; ms never fall.

    Numbers of rows take turns, so that what disturbs the machine for a while disturbs all of them:
    five times, or as often as `budget_s` allows; once at least, twice where once is within it.
    `clock` gives nanoseconds. Like `measure_costs` it is for the time before any session exists.
    """
    most = max(1, min(target.batches.max_rows, target.kv.num_pages * page_size, max_context))
    counts = [count for count in _VERIFY_ROWS if count <= most]
    pages = range(-(-counts[-1] // page_size))
    passes = [[BatchRows([0] * count, 0, pages, range(count))] for count in counts]
    least_ms = [float("inf")] * len(counts)
    start_ns = clock()
    for num_rounds in range(1, _NUM_REPEATS + 1):
        for index, rows in enumerate(passes):
            # As in service, where each pass finds the caches as the one before it left them. No
            # sample itself: the least of many beside the least of a few would make rows look dear.
            _forward_ms(target, passes[0], clock)
            least_ms[index] = min(least_ms[index], _forward_ms(target, rows, clock))
        spent_s = (clock() - start_ns) / 1e9
        if spent_s * (num_rounds + 1) / num_rounds > budget_s * (2 if num_rounds == 1 else 1):
            break
    # What adds to a time is not the pass's own: fewer rows take at most what more rows took.
    for index in range(len(counts) - 2, -1, -1):
        least_ms[index] = min(least_ms[index], least_ms[index + 1])
    return tuple(zip(counts, least_ms, strict=True))


def _slope(low_ms: float, high_ms: float, difference: int) -> float:
    return max(0.0, high_ms - low_ms) / difference if difference else 0.0


def _least_ms(
    target: Target, passes: Sequence[Sequence[BatchRows]], clock: Callable[[], int]
) -> list[float]:
    """Other processes only ever add to a time: the least of several is the forward's own.

    Passes take turns, so that what disturbs the machine for a while disturbs all of them.
    """
    least_ms = [float("inf")] * len(passes)
    for num_round in range(_NUM_REPEATS):
        for index, rows in enumerate(passes):
            is_long = sum(len(one.token_ids) for one in rows) >= _LONG_ROWS
            if num_round < (_NUM_LONG_REPEATS if is_long else _NUM_REPEATS):
                least_ms[index] = min(least_ms[index], _forward_ms(target, rows, clock))
    return least_ms


def _forward_ms(target: Target, rows: Sequence[BatchRows], clock: Callable[[], int]) -> float:
    start_ns = clock()
    batch = target.batches.build(rows)
    # Passes of more rows than sequences have a drafter's work to do besides; see `Drafter.observe`.
    followed = torch.zeros_like(batch.meta.token_ids) if batch.num_rows > len(rows) else None
    logits = target.decoder.forward(batch, target.kv, feature_rows=followed)
    if logits.values.device.type == "cuda":
        torch.cuda.synchronize(logits.values.device)
    return (clock() - start_ns) / 1e6
