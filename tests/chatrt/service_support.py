"""A real service over a real tiny engine, and a client that waits for whole answers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatrt.host import EngineHost
from chatrt.metrics import Metrics
from chatrt.params import SamplingParams
from chatrt.server.service import CallContext
from chatrt.service import ChatService, ServiceSettings
from chatrt.store import Store
from chatrt.testing.engine import tiny_engine
from chatrt.wire.messages import ChatrtOptions, InputMessage, ResponseCreate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from chatrt.engine import Engine
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.wire.log import ResponseLog
    from chatrt_kernels.compilations import Compilations
    from chatrt_kernels.ops import Ops

MODEL = "tiny"
NUM_PAGES = 64
KEY = "key"


@dataclass(frozen=True, slots=True)
class Chat:
    """A service under test, with the engine and the store behind it."""

    service: ChatService
    host: EngineHost
    engine: Engine
    store: Store | None

    async def create(self, text: str | tuple[InputMessage, ...], **fields: Any) -> ResponseLog:
        """Begin a turn; `key` and `lane` say who asks, the other fields are the message's."""
        key, lane = fields.pop("key", KEY), fields.pop("lane", "lane")
        options = ChatrtOptions(**fields.pop("chatrt", {}))
        messages = (InputMessage("user", text),) if isinstance(text, str) else text
        message = ResponseCreate(input=messages, chatrt=options, **fields)
        return await self.service.create(message, context(key, lane))

    async def ask(self, text: str | tuple[InputMessage, ...], **fields: Any) -> dict[str, Any]:
        """A whole turn: the response of its terminal event."""
        return await ended(await self.create(text, **fields))

    async def num_free(self) -> int:
        """Free pages, with the bookkeeping checked; what was posted before is done by then."""

        def count(engine: Engine) -> int:
            engine.sessions.check_invariants()
            return engine.sessions.num_free

        return await self.host.call(count)


def context(key: str = KEY, lane: str = "lane", connection: str = "connection") -> CallContext:
    """Who calls."""
    return CallContext(key_id=key, connection_id=connection, lane_key=lane, received_ns=1)


async def ended(log: ResponseLog) -> dict[str, Any]:
    """The response in the terminal event, once it is there."""
    changed = asyncio.Event()
    subscription = log.subscribe(changed.set)
    while not log.finished:
        changed.clear()
        await changed.wait()
    subscription.close()
    event = log.terminal_event()
    assert event is not None
    response: dict[str, Any] = event["response"]
    return response


async def has_text(log: ResponseLog) -> None:
    """Return when the log holds a delta."""
    changed = asyncio.Event()
    subscription = log.subscribe(changed.set)
    while not log.finished:
        event = subscription.take()
        if event is None:
            changed.clear()
            await changed.wait()
        elif event["type"] == "response.output_text.delta":
            break
    subscription.close()


def text_of(response: dict[str, Any]) -> str:
    """The answer's text."""
    return "".join(part["text"] for item in response["output"] for part in item["content"])


@asynccontextmanager
async def serving(
    tokenizer: Tokenizer,
    database: Path | None = None,
    *,
    store: Store | None = None,
    max_context: int = 512,
    ops: Ops | None = None,
    compilations: Compilations | None = None,
    **settings: Any,
) -> AsyncIterator[Chat]:
    """A service with a store in `database`, or the given one, or none.

    `ops` execute its model, by default the reference; `compilations` are theirs.
    """
    engine = tiny_engine(tokenizer, num_pages=NUM_PAGES, max_context=max_context, ops=ops)
    host = EngineHost(engine, compilations)
    host.start()
    store = Store.open(database) if database is not None else store
    values: dict[str, Any] = {
        "model": MODEL,
        "max_context": max_context,
        "sampling": SamplingParams(temperature=0.0, max_output_tokens=8),
        **settings,
    }
    metrics = Metrics(MODEL)
    service = ChatService(host, tokenizer, store, metrics, ServiceSettings(**values))
    try:
        yield Chat(service, host, engine, store)
    finally:
        await host.stop()
        await service.close()
