"""A client that reads a conversation as a terminal does, and shows nothing of it.

Run as `python -m chatrt.testing.reader URL CONVERSATION`, with the key in `KEY_VARIABLE`; says
`reading` once it is told all.

Knows: how a conversation is watched. Does not know: painting, what is read.
Invariant: what painting takes is what a terminal takes more than this.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from chatrt.client import ChatClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chatrt.launch import Endpoint

KEY_VARIABLE = "CHATRT_READER_KEY"


@contextmanager
def reading(endpoint: Endpoint, conversation_id: str) -> Iterator[None]:
    """Somebody reads the conversation, in a process of its own."""
    reader = subprocess.Popen(
        [sys.executable, "-m", "chatrt.testing.reader", endpoint.url, conversation_id],
        stdout=subprocess.PIPE,
        env={**os.environ, KEY_VARIABLE: endpoint.api_key or ""},
    )
    try:
        assert reader.stdout is not None
        if not reader.stdout.readline():
            raise ChildProcessError("the reader did not get to read")
        yield
    finally:
        reader.kill()
        reader.communicate()


async def _read(url: str, conversation_id: str) -> None:
    async with await ChatClient.connect(url, api_key=os.environ[KEY_VARIABLE] or None) as client:
        watch = await client.subscribe(conversation_id)
        os.write(1, b"reading\n")
        async for _ in watch:
            pass


if __name__ == "__main__":
    asyncio.run(_read(*sys.argv[1:3]))
