"""Reads turns of a conversation as the server lists them.

Knows: the fields of their messages. Does not know: widgets, trees, where they come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def item_text(item: Mapping[str, Any]) -> str:
    """What a message says."""
    return "".join(str(part.get("text", "")) for part in item.get("content") or ())


def texts_of(turn: Mapping[str, Any], role: str, *, of: str = "input") -> str:
    """What was said in a turn by `role`, in its `input` or its `output`; several with a gap."""
    said = [item_text(item) for item in turn.get(of) or () if item.get("role") == role]
    return "\n\n".join(said)
