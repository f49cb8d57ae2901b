"""One scripted answer: what is said, when, and the events that carry it.

Knows: the order and shape of a response's events.
Does not know: sockets, conversations.
Source: PROTOCOL 3.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence


class Dropped(Exception):
    """The script says that the connection breaks here."""


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """How the server answers one `response.create`.

    `pieces` go out as one text delta each, `first_delay_s` before the first and `delay_s` before
    each later one. After `drop_after` deltas the connection is aborted, which cancels the answer
    (`forgets` decides whether it is then unknown, as after a crash) unless it `survives`: then it
    goes on, and can be resumed until the server stops. `error` is sent instead of an answer. Behind
    `holds_at` deltas it waits for `go_on`.
    """

    pieces: Sequence[str] = ("Hello",)
    delay_s: float = 0.0
    first_delay_s: float = 0.0
    drop_after: int | None = None
    forgets: bool = False
    survives: bool = False
    holds_at: int | None = None
    go_on: asyncio.Event | None = None
    error: Mapping[str, Any] | None = None
    failure: Mapping[str, Any] | None = None
    timing: Mapping[str, Any] = field(default_factory=dict)
    usage: Mapping[str, Any] = field(default_factory=dict)


async def play(
    script: ScriptedAnswer,
    response: dict[str, Any],
    send: Callable[[dict[str, Any]], Awaitable[None]],
    cancelled: asyncio.Event,
) -> None:
    """Send the events of `response` as `script` says, keeping `response` up to date.

    Raises:
        Dropped: The connection is to break; `response` is then a cancelled one.
    """
    numbers = itertools.count()
    item_id = f"msg_{response['id']}"
    where = {"item_id": item_id, "output_index": 0, "content_index": 0}

    async def event(kind: str, **fields: object) -> None:
        await send({"type": kind, "sequence_number": next(numbers), **fields})

    await event("response.created", response=response)
    await event("response.in_progress", response=response)
    item = _item(item_id, "", "in_progress")
    await event("response.output_item.added", output_index=0, item=item)
    await event("response.content_part.added", **where, part=item["content"][0])
    sent: list[str] = []
    for piece in script.pieces:
        if script.go_on is not None and script.holds_at == len(sent):
            await script.go_on.wait()
        if await _paused(cancelled, script.delay_s if sent else script.first_delay_s):
            break
        sent.append(piece)
        response["output"] = [_item(item_id, "".join(sent), "in_progress")]
        delta = {"delta": piece, "logprobs": [], "response_id": response["id"]}
        await event("response.output_text.delta", **where, **delta)
        if script.drop_after == len(sent) and not script.survives:
            finish(response, script, num_tokens=len(sent), cancelled=True)
            raise Dropped
    item = _item(item_id, "".join(sent), "completed")
    response["output"] = [item]
    for kind, fields in _done_events(where, item):
        await event(kind, **fields)
    kind = finish(response, script, num_tokens=len(sent), cancelled=cancelled.is_set())
    await event(kind, response=response)


def _done_events(
    where: Mapping[str, Any], item: dict[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    part = item["content"][0]
    return [
        ("response.output_text.done", {**where, "text": part["text"], "logprobs": []}),
        ("response.content_part.done", {**where, "part": part}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
    ]


async def _paused(cancelled: asyncio.Event, delay_s: float) -> bool:
    """Wait `delay_s`; true if the response was cancelled meanwhile."""
    if delay_s <= 0:
        await asyncio.sleep(0)
        return cancelled.is_set()
    try:
        async with asyncio.timeout(delay_s):
            return await cancelled.wait()
    except TimeoutError:
        return False


def response_object(
    response_id: str, message: dict[str, Any], parent_id: str | None
) -> dict[str, Any]:
    """A response object that has just begun."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": message.get("model") or "scripted",
        "status": "in_progress",
        "output": [],
        "error": None,
        "incomplete_details": None,
        "previous_response_id": parent_id,
        "usage": None,
    }


def finish(
    response: dict[str, Any], script: ScriptedAnswer, *, num_tokens: int, cancelled: bool
) -> str:
    """Fill in the end of `response` and return the type of its terminal event."""
    cached = {"cached_tokens": 0, "cache_write_tokens": 0}
    response["usage"] = {
        "input_tokens": 0,
        "input_tokens_details": cached,
        "output_tokens": num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_tokens,
        **script.usage,
    }
    response["chatrt"] = dict(script.timing)
    if script.failure is not None:
        response["status"], response["error"] = "failed", dict(script.failure)
        return "response.failed"
    if cancelled:
        response["status"] = "cancelled"
        response["incomplete_details"] = {"reason": "cancelled"}
        return "response.incomplete"
    response["status"] = "completed"
    return "response.completed"


def _item(item_id: str, text: str, status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [part],
    }
