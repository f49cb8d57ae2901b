"""One answer continued in two ways at once, on two lanes of one connection of OpenAI's SDK."""

import asyncio
import os
from pathlib import Path

from openai import AsyncOpenAI
from openai.lib.responses_websocket import AsyncResponsesWebSocketSession, ResponsesWebSocketLimits

URL = os.environ.get("CHATRT_URL", "ws://127.0.0.1:8642/v1")
KEY_FILE = os.environ.get("CHATRT_API_KEY_FILE", "~/.local/state/chatrt/api-key")
KEY = Path(KEY_FILE).expanduser().read_text().strip()
LIMITS = ResponsesWebSocketLimits(
    max_lanes=8,
    max_events_per_lane=4096,
    max_events=8192,
    max_bytes_per_lane=2**24,
    max_bytes=2**25,
)


async def ask(lane, question, **more):
    """The whole answer to one question on a lane."""
    greedy = {"temperature": 0, "max_output_tokens": 80}
    await lane.send({"type": "response.create", "input": question, **greedy, **more})
    return await lane.get_final_response()


async def main() -> None:
    """Ask once; continue the answer on both lanes."""
    async with (
        AsyncOpenAI(api_key=KEY, base_url=URL.replace("ws", "http", 1)) as client,
        client.responses.connect() as connection,
        AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        left, right = session.lane("left"), session.lane("right")
        story = await ask(left, "Begin a story about a lighthouse.")
        ends = await asyncio.gather(
            ask(left, "Give it a happy end.", previous_response_id=story.id),
            ask(right, "Give it a sad end.", previous_response_id=story.id),
        )
    for name, response in zip(("story", "happy", "sad"), (story, *ends), strict=True):
        print(f"{name}: {response.output_text}\n")


asyncio.run(main())
