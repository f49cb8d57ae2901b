"""A turn of the scripted server: its response, its events, what the HTTP routes tell of it.

Knows: the shapes of a conversation's items and turns. Does not know: sockets, scripts.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ScriptedTurn:
    """One turn; `survives` a lost connection, and `grew` is set with each event."""

    response: dict[str, Any]
    conversation_id: str | None
    parent_id: str | None
    user_text: str
    events: list[dict[str, Any]] = field(default_factory=list)
    survives: bool = False
    grew: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, event: dict[str, Any]) -> None:
        """Keep an event, for those who resume."""
        # Copied: the response object in it goes on to change.
        self.events.append(copy.deepcopy(event))
        self.grew.set()
        self.grew = asyncio.Event()

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(item["content"][0]["text"] for item in self.response["output"])

    def items(self) -> list[dict[str, Any]]:
        """The question and the answer, as the API's items."""
        return [
            self._item("user", "input_text", self.user_text),
            self._item("assistant", "output_text", self.text),
        ]

    def body(self) -> dict[str, Any]:
        """The turn as a conversation lists it."""
        asked, answered = self.items()
        return {
            "id": self.response["id"],
            "previous_response_id": self.parent_id,
            "created_at": self.response["created_at"],
            "status": self.response["status"],
            "input": [asked],
            "output": [answered],
        }

    def _item(self, role: str, kind: str, text: str) -> dict[str, Any]:
        return {
            "type": "message",
            "id": f"msg_{self.response['id']}_{role}",
            "role": role,
            "content": [{"type": kind, "text": text}],
            "response_id": self.response["id"],
        }
