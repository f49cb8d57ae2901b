"""The conversation store: turns, their exact token ids, and conversations, in one SQLite file.

Knows: which names are public. Does not know: how a turn is made.
"""

from __future__ import annotations

from chatrt.store.records import StoredConversation, StoredItem, StoredTurn
from chatrt.store.store import Store

__all__ = ["Store", "StoredConversation", "StoredItem", "StoredTurn"]
