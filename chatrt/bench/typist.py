"""Types a message as a person does: word by word, and what stands there is sent while they type.

Knows: a person's pauses, that one half-typed message at a time is on its way.
Does not know: what the message is for, how the server uses what was typed ahead.
Invariant: a half-typed message is sent only when the server is done with the one before, as the
terminal does it, and none is sent behind the last pause: Enter waits for nothing.
Cost: a message of n words takes n pauses.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from chatrt.client import ResponseRequest

if TYPE_CHECKING:
    from chatrt.client import ChatClient, TypedAhead


def half_typed(text: str) -> list[str]:
    """What stands there behind each word of `text`, white space as it is; last the whole text."""
    ends = [word.end() for word in re.finditer(r"\S+", text)]
    return [text[:end] for end in ends[:-1]] + [text]


async def type_message(
    client: ChatClient, parts: list[str], previous_response_id: str, *, type_ms: int
) -> TypedAhead | None:
    """Type what `half_typed` gave, a pause of `type_ms` behind each; what to send it with.

    Raises:
        ServerUnavailable: The connection is gone.
    """
    typed: TypedAhead | None = None
    settled: asyncio.Task[None] | None = None
    clock = asyncio.get_running_loop().time
    began_s = clock()
    try:
        for number, part in enumerate(parts, start=1):
            if settled is None or settled.done():
                request = ResponseRequest(input=part, previous_response_id=previous_response_id)
                typed = await client.type_ahead(request, typed)
                settled = asyncio.create_task(typed.settled())
            # from the beginning on, so that what sleeps are late by does not add up
            await asyncio.sleep(max(0.0, began_s + number * type_ms / 1e3 - clock()))
    finally:
        if settled is not None:
            settled.cancel()
    return typed
