"""The client's thread as a source of Textual messages.

Knows: `ClientThread`, handing a batch from its thread to a widget.
Does not know: what the batch is for.
Invariant: the client's thread only posts; no widget is touched from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from textual.message import Message
from textual.message_pump import MessagePump

from chatrt.client import ClientThread

if TYPE_CHECKING:
    import ssl as ssl_module
    from collections.abc import Sequence

    from chatrt.client.batches import ThreadEvent

Connect: TypeAlias = Callable[[MessagePump], ClientThread]
"""Makes the client of a widget, not yet started."""


class ServerBatch(Message):
    """What the client's thread has gathered since the last batch, in order."""

    def __init__(self, events: Sequence[ThreadEvent]) -> None:
        super().__init__()
        self.events = events


def connecting_to(
    url: str, api_key: str | None, ssl: ssl_module.SSLContext | None = None
) -> Connect:
    """What makes a client of the server at `url`, whose batches arrive as `ServerBatch`."""

    def connect(target: MessagePump) -> ClientThread:
        def post(events: Sequence[ThreadEvent]) -> None:
            target.post_message(ServerBatch(events))

        return ClientThread(url, api_key=api_key, post=post, ssl=ssl)

    return connect
