"""The client's thread as a source of Textual messages.

Knows: `ClientThread`, handing a batch from its thread to a widget.
Does not know: what the batch is for.
Invariant: the client's thread only posts; no widget is touched from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

from chatrt.client import ClientThread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.message_pump import MessagePump

    from chatrt.client.batches import ThreadEvent


class ServerBatch(Message):
    """What the client's thread has gathered since the last batch, in order."""

    def __init__(self, events: Sequence[ThreadEvent]) -> None:
        super().__init__()
        self.events = events


def client_for(target: MessagePump, url: str, api_key: str | None) -> ClientThread:
    """A client, not yet started, whose batches arrive at `target` as `ServerBatch`."""

    def post(events: Sequence[ThreadEvent]) -> None:
        target.post_message(ServerBatch(events))

    return ClientThread(url, api_key=api_key, post=post)
