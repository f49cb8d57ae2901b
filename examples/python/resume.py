"""An answer whose connection is lost goes on, and is read on at the place where it was left."""

import asyncio
import os
from pathlib import Path

from chatrt.client import ChatClient

URL = os.environ.get("CHATRT_URL", "ws://127.0.0.1:8642/v1")
KEY_FILE = os.environ.get("CHATRT_API_KEY_FILE", "~/.local/state/chatrt/api-key")
KEY = Path(KEY_FILE).expanduser().read_text().strip()


async def main() -> None:
    """Read a little, hang up, connect again, read the rest."""
    async with await ChatClient.connect(URL, api_key=KEY) as client:
        greedy = {"temperature": 0, "max_output_tokens": 120}
        answer = await client.chat("Tell me about the sea.", sampling=greedy)
        async for event in answer:
            print(event.delta, end="", flush=True)
            if event.delta:
                break
    print(" [hung up] ", end="")
    async with await ChatClient.connect(URL, api_key=KEY) as client:
        rest = await client.resume(answer.response_id, after=event.data["sequence_number"])
        async for event in rest:
            print(event.delta, end="", flush=True)
    print()


asyncio.run(main())
