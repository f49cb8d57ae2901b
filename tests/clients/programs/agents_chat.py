"""openai-agents over its WebSocket transport, told by lines of JSON what to do (see program.py).

Argument: base URL. The key is in OPENAI_API_KEY, where the package looks for it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from agents import Agent, ModelSettings, responses_websocket_session, set_tracing_disabled
from agents.exceptions import AgentsException
from agents.models.openai_responses import ResponsesWebSocketError

if TYPE_CHECKING:
    from agents import ResponsesWebSocketSession

MODEL = "smollm2-135m-instruct"


async def turn(session: ResponsesWebSocketSession, asked: dict[str, Any]) -> dict[str, Any]:
    """One run of an agent without tools: its answer, or why there is none."""
    more = {"chatrt": asked["options"]} if "options" in asked else None
    settings = ModelSettings(temperature=0, max_tokens=asked["max_tokens"], extra_body=more)
    agent = Agent(name="clerk", model=asked.get("model", MODEL), model_settings=settings)
    run = session.run_streamed(agent, asked["say"], previous_response_id=asked.get("previous"))
    said: dict[str, Any] = {"text": ""}
    try:
        async for event in run.stream_events():
            if event.type == "raw_response_event":
                note(event.data, said)
                if said["text"] and asked.get("stop"):
                    run.cancel(mode="immediate")
    except ResponsesWebSocketError as error:
        said |= {"code": error.code, "error": error.error_message}
    except AgentsException as error:
        said["error"] = f"{type(error).__name__}: {error}"
    return said


def note(event: Any, said: dict[str, Any]) -> None:
    """What an event of the response tells."""
    if event.type == "response.created":
        said["id"] = event.response.id
    elif event.type == "response.output_text.delta":
        said["text"] += event.delta
    elif event.type in ("response.completed", "response.incomplete"):
        usage = event.response.usage
        said |= {
            "status": event.response.status,
            "input_tokens": usage.input_tokens,
            "cached_tokens": usage.input_tokens_details.cached_tokens,
            "total_tokens": usage.total_tokens,
        }


async def main() -> None:
    """Answer the lines of standard input until it ends."""
    set_tracing_disabled(True)
    async with responses_websocket_session(base_url=sys.argv[1]) as session:
        # In a thread: meanwhile the package's socket must be able to close and to answer pings.
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await turn(session, json.loads(line))))


asyncio.run(main())
