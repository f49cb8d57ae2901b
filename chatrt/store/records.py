"""What the store holds: turns, conversations and the items that a transcript is made of.

Knows: the fields and how token ids lie on disk (little-endian int32, packed).
Does not know: SQL, files. Invariant: ids that were packed come back as the same ids.
"""

from __future__ import annotations

import array
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTurn:
    """One turn: what was asked, what was answered, and the ids that both have in the context.

    `prompt_ids` are the delta's: from the end of the parent's sequence to the start of the answer.
    The whole sequence is therefore `prompt_ids + output_ids` of the turn itself, in front of which
    stand the `settled_sequence` of every earlier turn of its chain, in order. Where a template
    changes an answer once another turn follows, `settled_from` is the index into the turn's own
    `prompt_ids + output_ids` behind which its settled sequence goes on with `settled_ids`.
    Where the front of the sequence changed (other instructions, dropped turns), `is_whole` is set
    and `prompt_ids` start at the beginning, whatever the parents hold. `input_json` is the
    request's `input` as JSON: a text, or a list of items; `params_json` is what the response object
    repeats of the request. `created_at` is in seconds since the epoch.
    """

    response_id: str
    parent_id: str | None = None
    conversation_id: str | None = None
    key_id: str
    model: str
    instructions: str | None = None
    input_json: str = "[]"
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    text: str = ""
    status: str = "completed"
    usage_json: str = "{}"
    timing_json: str = "{}"
    params_json: str = "{}"
    created_at: float
    seed: int | None = None
    is_whole: bool = False
    settled_from: int | None = None
    settled_ids: tuple[int, ...] = ()

    @property
    def own_sequence(self) -> tuple[int, ...]:
        """The turn's own ids, as they were read and generated."""
        return self.prompt_ids + self.output_ids

    @property
    def settled_sequence(self) -> tuple[int, ...]:
        """The turn's own ids, as they read once another turn follows."""
        if self.settled_from is None:
            return self.own_sequence
        return self.own_sequence[: self.settled_from] + self.settled_ids


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation as a list shows it; times are in seconds since the epoch."""

    conversation_id: str
    title: str | None
    created_at: float
    updated_at: float
    num_turns: int
    last_response_id: str | None


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One message of a transcript, with the turn that it belongs to.

    `is_answer`: the turn answered with it. Its input may have messages of that role, too.
    """

    item_id: str
    role: str
    text: str
    response_id: str
    complete: bool = True
    is_answer: bool = False

    def as_dict(self) -> dict[str, object]:
        """The item in the API's form."""
        kind = "output_text" if self.role == "assistant" else "input_text"
        return {
            "type": "message",
            "id": self.item_id,
            "role": self.role,
            "status": "completed" if self.complete else "incomplete",
            "content": [{"type": kind, "text": self.text}],
            "response_id": self.response_id,
        }


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    packed = array.array("i", token_ids)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """The ids that `pack_ids` packed."""
    packed = array.array("i")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def input_messages(input_json: str) -> list[tuple[str, str]]:
    """The (role, text) of each message of a request's `input`; other items are passed over."""
    value = msgspec.json.decode(input_json)
    if isinstance(value, str):
        return [("user", value)]
    items = value if isinstance(value, list) else []
    messages = [item for item in items if isinstance(item, dict) and "role" in item]
    return [(str(item["role"]), _content_text(item.get("content"))) for item in messages]


def turn_items(turn: StoredTurn) -> list[StoredItem]:
    """The messages of one turn: its input, then its answer where there is one."""
    stem = "msg_" + turn.response_id.removeprefix("resp_")
    items = [
        StoredItem(f"{stem}_{index}", role, text, turn.response_id)
        for index, (role, text) in enumerate(input_messages(turn.input_json))
    ]
    if turn.text:
        complete = turn.status == "completed"
        answer = StoredItem(stem, "assistant", turn.text, turn.response_id, complete, True)
        items.append(answer)
    return items


def _content_text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
