"""What tests of the openai SDK's lane sessions share: room for events, a greedy question."""

from __future__ import annotations

from typing import Any

from openai.lib.responses_websocket import ResponsesWebSocketLimits

LIMITS = ResponsesWebSocketLimits(
    max_lanes=8,
    max_events_per_lane=2048,
    max_events=4096,
    max_bytes_per_lane=2**24,
    max_bytes=2**25,
)


def create(asked: str, *, max_output_tokens: int = 24, **more: Any) -> Any:
    """A greedy `response.create`; any, for the SDK's types know no field of ours."""
    sampling = {"temperature": 0, "max_output_tokens": max_output_tokens}
    return {"type": "response.create", "input": asked, **sampling, **more}
