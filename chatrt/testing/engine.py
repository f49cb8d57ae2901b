"""A small real engine for tests: tiny random model, real pages, real forward.

Knows: how the parts are put together. Does not know: what a test wants to see.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from chatrt.batch import BatchBuilder
from chatrt.engine import Engine, EngineLimits, Target
from chatrt.kvcache import KVCache
from chatrt.models.decoder import Decoder
from chatrt.pages import PageAllocator
from chatrt.params import SamplingParams
from chatrt.prefix import PrefixTree
from chatrt.scheduler import LinearCostModel, Scheduler, SchedulerLimits
from chatrt.session import SessionManager
from chatrt.testing.models import tiny_config, tiny_model
from chatrt.turn import FinishedEvent, TurnKind, TurnRequest
from chatrt_kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.drafter import Drafter
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import EngineEvent

PAGE_SIZE = 16


def tiny_engine(
    tokenizer: Tokenizer,
    *,
    num_pages: int = 64,
    max_context: int = 256,
    max_num_batched_tokens: int = 64,
    drafter: Drafter | None = None,
    num_drafts: int = 0,
    model_seed: int = 0,
    max_parked: int = 1024,
) -> Engine:
    """An engine over a two-layer random model that knows the tokenizer's ids."""
    config = tiny_config(vocab_size=tokenizer.vocab_size, max_context=max_context)
    ops = ReferenceOps()
    device = torch.device("cpu")
    model = tiny_model(ops, config, seed=model_seed)
    kv = KVCache.allocate(
        num_layers=config.num_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=device,
    )
    kv.data.fill_(float("nan"))  # a row that is read before it is written shows
    decoder = Decoder(
        config,
        model.weights,
        ops,
        max_rows=max_num_batched_tokens + 64,
        max_positions=max_context,
        device=device,
        dtype=torch.float32,
    )
    batches = BatchBuilder(max_num_batched_tokens + 64, 64, num_pages, PAGE_SIZE, device)
    allocator = PageAllocator(num_pages)
    sessions = SessionManager(allocator, PrefixTree(allocator, PAGE_SIZE), page_size=PAGE_SIZE)
    scheduler = Scheduler(
        sessions,
        SchedulerLimits(max_num_batched_tokens=max_num_batched_tokens),
        LinearCostModel(fixed_ms=1.0, decode_row_ms=0.1, prefill_row_ms=0.1),
    )
    ticks = itertools.count(1)
    seeds = itertools.count(1000)
    return Engine(
        Target(decoder, kv, batches, tokenizer),
        sessions=sessions,
        scheduler=scheduler,
        drafter=drafter,
        limits=EngineLimits(
            max_context=max_context, num_drafts=num_drafts, max_parked=max_parked
        ),
        clock=lambda: next(ticks),
        draw_seed=lambda: next(seeds),
    )


def turn_request(
    response_id: str,
    token_ids: Sequence[int],
    *,
    parent: FinishedEvent | None = None,
    history: Sequence[int] = (),
    kind: TurnKind = TurnKind.ANSWER,
    sampling: SamplingParams | None = None,
    salt: str = "",
    typed_ahead_key: str | None = None,
    max_output_tokens: int = 12,
) -> TurnRequest:
    """A turn that appends `token_ids` to `history`, the ids of `parent`'s tip; greedy by default."""
    return TurnRequest(
        response_id=response_id,
        kind=kind,
        token_ids=[*history, *token_ids],
        num_history=len(history),
        sampling=sampling
        or SamplingParams(temperature=0.0, max_output_tokens=max_output_tokens),
        parent_id=parent.response_id if parent else None,
        salt=salt,
        typed_ahead_key=typed_ahead_key,
    )


def run_until_idle(engine: Engine, *, max_steps: int = 2000) -> list[EngineEvent]:
    """Step until nothing is left to do; all events in order."""
    events: list[EngineEvent] = []
    for _ in range(max_steps):
        worked = engine.step()
        events += engine.take_events()
        if not worked:
            return events
    raise AssertionError(f"the engine still works after {max_steps} steps")


def run_turn(engine: Engine, request: TurnRequest) -> FinishedEvent:
    """Submit one turn, run until idle, and return its last event."""
    engine.submit(request)
    finished = [e for e in run_until_idle(engine) if isinstance(e, FinishedEvent)]
    return next(e for e in finished if e.response_id == request.response_id)
