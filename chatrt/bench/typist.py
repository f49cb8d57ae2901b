"""Types a message as a person does: word by word, and what stands there is sent while they type.

Knows: a person's pauses, that one half-typed message at a time is on its way.
Does not know: what the message is for, how the server uses what was typed ahead.
Invariant: a half-typed message is sent only when the server is done with the one before, as the
terminal does it, and none is sent behind the last pause: Enter waits for nothing.
Cost: a message of n words takes n pauses.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from chatrt.client import ResponseRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.client import ChatClient, TypedAhead


async def type_message(
    client: ChatClient, words: Sequence[str], previous_response_id: str, *, type_ms: int
) -> TypedAhead | None:
    """Type all `words`, with a pause of `type_ms` behind each; what to send the message with.

    Raises:
        ServerUnavailable: The connection is gone.
    """
    typed: TypedAhead | None = None
    settled: asyncio.Task[None] | None = None
    try:
        for num_words in range(1, len(words) + 1):
            if settled is None or settled.done():
                request = ResponseRequest(
                    input=" ".join(words[:num_words]), previous_response_id=previous_response_id
                )
                typed = await client.type_ahead(request, typed)
                settled = asyncio.create_task(typed.settled())
            await asyncio.sleep(type_ms / 1e3)
    finally:
        if settled is not None:
            settled.cancel()
    return typed
