"""Ids that go over the wire: stable, and unguessable (128 random bits).

Knows: prefixes. Does not know: what an id names.
Invariant: the id of an answer's only message follows from the response's id.
"""

from __future__ import annotations

import secrets

RESPONSE_PREFIX = "resp_"
CONVERSATION_PREFIX = "conv_"
MESSAGE_PREFIX = "msg_"


def new_response_id() -> str:
    """A fresh `resp_…` id."""
    return RESPONSE_PREFIX + secrets.token_hex(16)


def new_conversation_id() -> str:
    """A fresh `conv_…` id."""
    return CONVERSATION_PREFIX + secrets.token_hex(16)


def message_id(response_id: str) -> str:
    """The id of the message that a response puts out."""
    return MESSAGE_PREFIX + response_id.removeprefix(RESPONSE_PREFIX)
