"""A question that is sent while it is typed: at Enter the server has nearly all of it computed."""

import asyncio
import os
from pathlib import Path

from chatrt.client import ChatClient, ResponseRequest

URL = os.environ.get("CHATRT_URL", "ws://127.0.0.1:8642/v1")
KEY_FILE = os.environ.get("CHATRT_API_KEY_FILE", "~/.local/state/chatrt/api-key")
KEY = Path(KEY_FILE).expanduser().read_text().strip()
QUESTION = "Which of these is a colour: a chair, a violin, the number seven, or the word blue?"


async def main() -> None:
    """Type word by word, then ask."""
    async with await ChatClient.connect(URL, api_key=KEY) as client:
        typed = None
        words = QUESTION.split()
        for count in range(1, len(words) + 1):
            so_far = ResponseRequest(input=" ".join(words[:count]))
            typed = await client.type_ahead(so_far, typed)
            await asyncio.sleep(0.1)  # a person's pause
        answer = await client.send(ResponseRequest(input=QUESTION), typed=typed)
        result = await answer.collect()
    ready = result.timing["kv"]["typed_ahead_tokens"]
    print(result.text)
    print(f"({ready} tokens were ready at Enter, first word after {result.ttft_ms:.0f} ms)")


asyncio.run(main())
