"""A small real engine for tests: tiny random model, real pages, real forward.

Knows: how the parts are put together. Does not know: what a test wants to see.
Invariant: pages are poisoned with NaN, so a row that is read before it is written shows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from chatrt.batch import BatchBuilder
from chatrt.cost_model import LinearCostModel
from chatrt.engine import Engine, EngineLimits, Target
from chatrt.kvcache import KVCache
from chatrt.models.decoder import Decoder
from chatrt.pages import PageAllocator
from chatrt.params import SamplingParams
from chatrt.prefix import PrefixTree
from chatrt.scheduler import Scheduler, SchedulerLimits
from chatrt.session_manager import SessionManager
from chatrt.testing.models import tiny_config, tiny_model
from chatrt.turn import FinishedEvent, StartedEvent, TokensEvent, TurnKind, TurnRequest
from chatrt_kernels.ops import KVLayout
from chatrt_kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from chatrt.drafter import Drafter
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import EngineEvent, TokenLogprob
    from chatrt_kernels.ops import Ops

PAGE_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, max_output_tokens=12)


def tiny_engine(
    tokenizer: Tokenizer,
    *,
    num_pages: int = 64,
    max_context: int = 256,
    max_num_batched_tokens: int = 64,
    drafter: Drafter | None = None,
    model_seed: int = 0,
    ops: Ops | None = None,
    **limits: int,
) -> Engine:
    """An engine over a two-layer random model that knows the tokenizer's ids.

    `ops` executes it, by default the reference. `limits` are other fields of `EngineLimits`, such
    as `num_drafts`.
    """
    target = tiny_target(
        tokenizer,
        num_pages=num_pages,
        max_context=max_context,
        max_rows=max_num_batched_tokens,
        seed=model_seed,
        ops=ops,
    )
    return engine_over(target, max_context=max_context, drafter=drafter, **limits)


def engine_over(
    target: Target, *, max_context: int, drafter: Drafter | None = None, **limits: int
) -> Engine:
    """An engine that runs a target in steps of as many rows as its batches hold.

    Its clock counts its own calls, and seeds that it draws count from 1000: two engines over equal
    targets do the same. `limits` as in `tiny_engine`.
    """
    allocator, page_size = PageAllocator(target.kv.num_pages), target.kv.page_size
    sessions = SessionManager(allocator, PrefixTree(allocator, page_size), page_size=page_size)
    scheduler = Scheduler(
        sessions,
        SchedulerLimits(max_num_batched_tokens=target.batches.max_rows),
        LinearCostModel(fixed_ms=1.0, decode_row_ms=0.1, prefill_row_ms=0.1),
    )
    ticks = itertools.count(1)
    seeds = itertools.count(1000)
    return Engine(
        target,
        sessions=sessions,
        scheduler=scheduler,
        drafter=drafter,
        limits=EngineLimits(max_context=max_context, **limits),
        clock=lambda: next(ticks),
        draw_seed=lambda: next(seeds),
    )


def tiny_target(
    tokenizer: Tokenizer,
    *,
    num_pages: int = 64,
    max_context: int = 256,
    max_rows: int = 64,
    seed: int = 0,
    ops: Ops | None = None,
    feature_layers: tuple[int, ...] = (),
) -> Target:
    """A two-layer random model that knows the tokenizer's ids; rows not written yet are NaN.

    `ops` executes it, by default the reference; pages lie as it wants them, in half precision
    where that is head by head. `feature_layers` are those whose hidden states a drafter wants.
    """
    config = tiny_config(vocab_size=tokenizer.vocab_size, max_context=max_context)
    ops = ops or ReferenceOps()
    device = torch.device("cpu")
    weights = tiny_model(ops, config, seed=seed).weights
    # With the embedding as its head a random model repeats its last token, whatever the history.
    generator = torch.Generator().manual_seed(seed + 1)
    head = torch.randn(config.vocab_size, config.hidden_size, generator=generator) / 2
    head[128:256] = 0  # bytes that are no characters by themselves; nearly always text comes out
    kv = KVCache.allocate(
        num_layers=config.num_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float16 if ops.kv_layout is KVLayout.HEADS else torch.float32,
        device=device,
        layout=ops.kv_layout,
    )
    kv.data.fill_(float("nan"))
    decoder = Decoder(
        config,
        replace(weights, head=ops.prepare(head)),
        ops,
        max_rows=max_rows,
        max_positions=max_context,
        device=device,
        dtype=torch.float32,
        feature_layers=feature_layers,
    )
    batches = BatchBuilder(max_rows, 64, -(-max_context // PAGE_SIZE), PAGE_SIZE, device)
    return Target(decoder, kv, batches, tokenizer)


def turn_request(
    response_id: str,
    token_ids: Sequence[int],
    *,
    parent: FinishedEvent | None = None,
    history: Sequence[int] = (),
    kind: TurnKind = TurnKind.ANSWER,
    sampling: SamplingParams = GREEDY,
    salt: str = "",
    typed_ahead_key: str | None = None,
) -> TurnRequest:
    """A turn of `token_ids` behind `history`, the ids of the tip of `parent`; greedy by default."""
    return TurnRequest(
        response_id=response_id,
        kind=kind,
        token_ids=[*history, *token_ids],
        num_history=len(history),
        sampling=sampling,
        parent_id=parent.response_id if parent else None,
        salt=salt,
        typed_ahead_key=typed_ahead_key,
    )


@dataclass(slots=True)
class Outcome:
    """All that the events told of one turn."""

    seed: int | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: FinishedEvent | None = None

    def add(self, event: EngineEvent) -> None:
        """Take one more event and assert that it may follow the ones before."""
        assert self.finished is None, f"an event behind the last one: {event}"
        if isinstance(event, StartedEvent):
            assert self.seed is None, "a turn starts once"
            self.seed = event.seed
        elif isinstance(event, TokensEvent):
            assert self.seed is not None, "tokens before the start"
            self.text += event.text
            self.token_ids += event.token_ids
            self.logprobs += event.logprobs
        else:
            assert event.text == self.text
            assert event.num_generated == len(self.token_ids)
            self.finished = event

    @property
    def end(self) -> FinishedEvent:
        """The last event, which must have come."""
        assert self.finished is not None, "the turn has not ended"
        return self.finished


def outcomes(
    events: Iterable[EngineEvent], into: dict[str, Outcome] | None = None
) -> dict[str, Outcome]:
    """What events told of each turn, by response id; asserts their order. Adds to `into`."""
    found = {} if into is None else into
    for event in events:
        found.setdefault(event.response_id, Outcome()).add(event)
    return found


def run_until_idle(engine: Engine, *, max_steps: int = 2000) -> list[EngineEvent]:
    """Step until nothing is left to do; all events in order."""
    events = engine.take_events()
    for _ in range(max_steps):
        worked = engine.step()
        events += engine.take_events()
        if not worked:
            return events
    raise AssertionError(f"the engine still works after {max_steps} steps")


def run_outcome(engine: Engine, request: TurnRequest) -> Outcome:
    """Submit one turn, run until idle, and return all that its events told."""
    engine.submit(request)
    return outcomes(run_until_idle(engine))[request.response_id]


def run_turn(engine: Engine, request: TurnRequest) -> FinishedEvent:
    """Submit one turn, run until idle, and return its last event."""
    return run_outcome(engine, request).end


def step_until_tokens(
    engine: Engine, num_tokens: int, *, max_steps: int = 2000
) -> list[EngineEvent]:
    """Step until at least so many tokens were emitted; all events in order."""
    events: list[EngineEvent] = []
    for _ in range(max_steps):
        engine.step()
        events += engine.take_events()
        if sum(len(e.token_ids) for e in events if isinstance(e, TokensEvent)) >= num_tokens:
            return events
    raise AssertionError(f"fewer than {num_tokens} tokens after {max_steps} steps")
