"""The client of a chatrt server (or of any server of the Responses API over WebSockets).

Knows: the API that the terminal, the command line and the bench are written against.
Does not know: torch, models, how an answer is shown.
"""

from __future__ import annotations

from chatrt.client.answer import Answer
from chatrt.client.connection import ChatClient
from chatrt.client.http import HttpRoutes
from chatrt.client.messages import ClientEvent, ResponseRequest, TurnResult
from chatrt.client.thread import ClientThread
from chatrt.client.typed_ahead import TypedAhead
from chatrt.client.watch import Watch, WatchedEvent

__all__ = [
    "Answer",
    "ChatClient",
    "ClientEvent",
    "ClientThread",
    "HttpRoutes",
    "ResponseRequest",
    "TurnResult",
    "TypedAhead",
    "Watch",
    "WatchedEvent",
]
