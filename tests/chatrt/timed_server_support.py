"""A tiny real server whose engine reads the machine's clock, where others count their own calls.

What a server says of its times makes sense only so: the stamps before the engine are real ones.
"""

from __future__ import annotations

import itertools
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from chatrt.cost_model import LinearCostModel
from chatrt.engine import Engine, EngineLimits
from chatrt.host import EngineHost
from chatrt.launch import Endpoint
from chatrt.metrics import Metrics
from chatrt.pages import PageAllocator
from chatrt.params import SamplingParams
from chatrt.prefix import PrefixTree
from chatrt.scheduler import Scheduler, SchedulerLimits
from chatrt.service import ChatService, ServiceSettings
from chatrt.session_manager import SessionManager
from chatrt.testing.engine import tiny_target
from chatrt.testing.serving import serving
from chatrt.testing.tokenizer import tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from chatrt.text.tokenizer import Tokenizer


@asynccontextmanager
async def timed_server(
    folder: Path, *, max_context: int, **settings: Any
) -> AsyncIterator[Endpoint]:
    """The real service over a tiny random model, behind the real server with these settings."""
    tokenizer = tiny_tokenizer(folder)
    host = EngineHost(_engine(tokenizer, max_context))
    host.start()
    service = ChatService(
        host,
        tokenizer,
        None,
        Metrics("tiny"),
        ServiceSettings("tiny", max_context, SamplingParams(temperature=0.0)),
    )
    try:
        async with serving(service, **settings) as server:
            yield Endpoint(f"ws://127.0.0.1:{server.port}", None)
    finally:
        await service.close()
        await host.stop()


def _engine(tokenizer: Tokenizer, max_context: int) -> Engine:
    target = tiny_target(tokenizer, num_pages=256, max_context=max_context)
    allocator, page_size = PageAllocator(target.kv.num_pages), target.kv.page_size
    sessions = SessionManager(allocator, PrefixTree(allocator, page_size), page_size=page_size)
    seeds = itertools.count(1000)
    return Engine(
        target,
        sessions=sessions,
        scheduler=Scheduler(
            sessions,
            SchedulerLimits(max_num_batched_tokens=target.batches.max_rows),
            LinearCostModel(fixed_ms=1.0, decode_row_ms=0.1, prefill_row_ms=0.1),
        ),
        drafter=None,
        limits=EngineLimits(max_context=max_context),
        clock=time.perf_counter_ns,
        draw_seed=lambda: next(seeds),
    )
