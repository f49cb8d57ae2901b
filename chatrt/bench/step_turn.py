"""What a step of the engine takes beside its forward: planning, sampling, events.

Knows: the engine's calls, the one method of the decoder that computes.
Does not know: how a forward is executed, what the figures are compared with.
Invariant: the decoder's forward is its own again afterwards, and the turn is forgotten.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from chatrt.params import SamplingParams
from chatrt.turn import FinishedEvent, TokensEvent, TurnKind, TurnRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from chatrt.batch import Batch
    from chatrt.engine import Engine, Target
    from chatrt.kvcache import KVCache
    from chatrt.models.decoder import Decoder, Logits

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, seed=0),
    "sampled": SamplingParams(temperature=0.7, top_p=0.9, seed=0),
}
PROMPT = "The boats leave the harbour before dawn, and the first thing that the crew does is"
_RESPONSE_ID = "bench-step"
_NUM_WARM_UP_STEPS = 3


def turn_overhead_ms(
    engine: Engine,
    target: Target,
    sampling: SamplingParams,
    *,
    num_steps: int,
    max_context: int,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> list[float]:
    """Milliseconds of each decode step of a turn that runs alone, less its forward.

    Events are taken within each step. Left out are prefill, the first three steps behind it and the
    last one, which ends the turn; fewer than `num_steps` come back where the context ends earlier.
    Drafts are off.

    Raises:
        ChatrtError: The turn failed.
    """
    token_ids = target.tokenizer.encode(PROMPT)[: max(1, max_context // 2)]
    num_tokens = min(1 + _NUM_WARM_UP_STEPS + num_steps + 1, max_context - len(token_ids))
    request = TurnRequest(
        response_id=_RESPONSE_ID,
        kind=TurnKind.ANSWER,
        token_ids=token_ids,
        num_history=0,
        sampling=replace(sampling, max_output_tokens=max(1, num_tokens), ignore_eos=True),
        salt=_RESPONSE_ID,
        speculation_tokens=0,
    )
    engine.submit(request)
    overheads_ms = []
    with _forward_times(target.decoder, clock) as forwards_ns:
        worked = True
        while worked:
            forwards_ns.clear()
            started_ns = clock()
            worked = engine.step()
            events = engine.take_events()
            overhead_ns = clock() - started_ns - sum(forwards_ns)
            for event in events:
                if isinstance(event, TokensEvent):
                    overheads_ms.append(overhead_ns / 1e6)
                elif isinstance(event, FinishedEvent) and event.error is not None:
                    raise event.error
    engine.forget([_RESPONSE_ID])
    return overheads_ms[1 + _NUM_WARM_UP_STEPS : -1]


@contextmanager
def _forward_times(decoder: Decoder, clock: Callable[[], int]) -> Iterator[list[int]]:
    """Gives a list to which each forward of this decoder adds its nanoseconds."""
    forward, times_ns = decoder.forward, []

    def timed(batch: Batch, kv: KVCache, *, feature_rows: torch.Tensor | None = None) -> Logits:
        started_ns = clock()
        logits = forward(batch, kv, feature_rows=feature_rows)
        if logits.values.device.type == "cuda":
            torch.cuda.synchronize(logits.values.device)
        times_ns.append(clock() - started_ns)
        return logits

    decoder.forward = timed  # type: ignore[method-assign]  # on this object, for a while
    try:
        yield times_ns
    finally:
        decoder.forward = forward  # type: ignore[method-assign]
