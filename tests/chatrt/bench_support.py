"""What the tests of measurements share: a tiny real server, and a scripted answer with figures."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from chatrt.host import EngineHost
from chatrt.launch import Endpoint
from chatrt.metrics import Metrics
from chatrt.params import SamplingParams
from chatrt.service import ChatService, ServiceSettings
from chatrt.testing.engine import tiny_engine
from chatrt.testing.scripted_server import ScriptedAnswer
from chatrt.testing.serving import serving
from chatrt.testing.tokenizer import tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ANSWER = ScriptedAnswer(
    ("a", "b", "c"),
    timing={
        "ttft_ms": 5.0,
        "stages": {"queue_ms": 1.0, "prefill_ms": 4.0},
        "tpot_ms": 2.0,
        "kv": {"typed_ahead_tokens": 6},
        "speculation": {"steps": 2, "verify_ms": 5.0},
    },
    usage={
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 15},
        "output_tokens": 3,
    },
)


@asynccontextmanager
async def tiny_server(folder: Path, *, max_context: int) -> AsyncIterator[Endpoint]:
    """The real service over a tiny random model, behind the real server."""
    tokenizer = tiny_tokenizer(folder)
    host = EngineHost(tiny_engine(tokenizer, num_pages=256, max_context=max_context))
    host.start()
    settings = ServiceSettings(
        model="tiny", max_context=max_context, sampling=SamplingParams(temperature=0.0)
    )
    service = ChatService(host, tokenizer, None, Metrics("tiny"), settings)
    try:
        async with serving(service) as server:
            yield Endpoint(f"ws://127.0.0.1:{server.port}", None)
    finally:
        await service.close()
        await host.stop()
