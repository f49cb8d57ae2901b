"""Two turns with chatrt's own client; the second one knows the first."""

import asyncio
import os
from pathlib import Path

from chatrt.client import ChatClient

URL = os.environ.get("CHATRT_URL", "ws://127.0.0.1:8642/v1")
KEY_FILE = os.environ.get("CHATRT_API_KEY_FILE", "~/.local/state/chatrt/api-key")
KEY = Path(KEY_FILE).expanduser().read_text().strip()


async def main() -> None:
    """Ask, print the words as they come, ask again."""
    async with await ChatClient.connect(URL, api_key=KEY) as client:
        previous = None
        for question in ("What is the capital of France?", "And what is the capital of Italy?"):
            answer = await client.chat(
                question, previous_response_id=previous, sampling={"temperature": 0}
            )
            async for event in answer:
                print(event.delta, end="", flush=True)
            print()
            previous = answer.response_id


asyncio.run(main())
