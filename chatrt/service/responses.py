"""Response objects of turns that are over, made from what the store kept.

Knows: stored turns. Does not know: the engine, logs, sockets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from chatrt.service.prompts import PREFILLED
from chatrt.wire.events import ResponseFields, message_item, response_body

if TYPE_CHECKING:
    from chatrt.store import StoredTurn

_REASONS = {"incomplete": "max_output_tokens", "cancelled": "cancelled"}


def stored_response(turn: StoredTurn) -> dict[str, Any]:
    """The response object as it was in the turn's terminal event, its figures included."""
    fields = msgspec.json.decode(turn.params_json, type=ResponseFields)
    status = "completed" if turn.status == PREFILLED else turn.status
    output = []
    if turn.status != PREFILLED:
        done: Literal["completed", "incomplete"]
        done = "completed" if turn.status == "completed" else "incomplete"
        output = [message_item(turn.response_id, turn.text, status=done)]
    body = response_body(
        turn.response_id,
        replace(fields, conversation_id=turn.conversation_id),
        status=status,
        output=output,
        reason=_REASONS.get(turn.status),
    )
    return {
        **body,
        "usage": msgspec.json.decode(turn.usage_json),
        "chatrt": msgspec.json.decode(turn.timing_json),
    }
