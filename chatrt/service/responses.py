"""What the API says of turns that are over, made from what the store kept.

Knows: stored turns. Does not know: the engine, logs, sockets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from chatrt.service.prompts import PREFILLED
from chatrt.store.records import turn_items
from chatrt.wire.events import ResponseFields, message_item, response_body

if TYPE_CHECKING:
    from chatrt.store import StoredTurn

_REASONS = {"incomplete": "max_output_tokens", "cancelled": "cancelled"}


def stored_response(turn: StoredTurn) -> dict[str, Any]:
    """The response object as it was in the turn's terminal event, its figures included."""
    fields = msgspec.json.decode(turn.params_json, type=ResponseFields)
    status = _status(turn)
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


def turn_body(turn: StoredTurn) -> dict[str, Any]:
    """A turn as a conversation lists it: what was said, and which turn it follows."""
    items = turn_items(turn)
    return {
        "id": turn.response_id,
        "object": "chatrt.turn",
        "previous_response_id": turn.parent_id,
        "created_at": turn.created_at,
        "status": _status(turn),
        "input": [item.as_dict() for item in items if not item.is_answer],
        "output": [item.as_dict() for item in items if item.is_answer],
    }


def _status(turn: StoredTurn) -> str:
    return "completed" if turn.status == PREFILLED else turn.status
