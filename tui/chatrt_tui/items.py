"""Reads the messages of a conversation as the server lists them.

Knows: their fields, which turn each belongs to. Does not know: widgets, where they come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def item_text(item: Mapping[str, Any]) -> str:
    """What a message says."""
    return "".join(str(part.get("text", "")) for part in item.get("content") or ())


def newest_id(items: Sequence[Mapping[str, Any]]) -> str | None:
    """The response that the last message belongs to, None if there is none."""
    ids = [item["response_id"] for item in items if item.get("response_id")]
    return ids[-1] if ids else None


def questions_of(items: Sequence[Mapping[str, Any]], response_id: str) -> list[str]:
    """What the person said in the turn of `response_id`, empty if it is not among `items`."""
    return [
        item_text(item)
        for item in items
        if item.get("response_id") == response_id and item.get("role") == "user"
    ]


def items_behind(
    items: Sequence[Mapping[str, Any]], response_id: str | None
) -> Sequence[Mapping[str, Any]] | None:
    """The messages behind the turn of `response_id`; None if `items` are another branch.

    All of them where `response_id` is None: nothing came before.
    """
    if response_id is None or not items:
        return items
    ends = [n for n, item in enumerate(items, 1) if item.get("response_id") == response_id]
    return items[ends[-1] :] if ends else None
