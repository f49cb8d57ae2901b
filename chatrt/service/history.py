"""Turns that can be continued: recent ones in memory, all stored ones on disk.

Knows: stored turns by id and key. Does not know: token ids' meaning, the engine, the wire.
Invariant: a turn is in memory before its terminal event is sent, whether or not the disk took it;
a turn of another key does not exist.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from chatrt.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from chatrt.store import Store, StoredTurn

TURN_NOT_FOUND = "previous_response_not_found"


class History:
    """Looks turns up, with their ancestors.

    Args:
        store: Where turns are kept, or None to keep them in memory only.
        max_turns: Turns held in memory; the least recently added leave first.
    """

    def __init__(self, store: Store | None, *, max_turns: int = 20_000) -> None:
        self._store = store
        self._max_turns = max_turns
        self._turns: OrderedDict[str, StoredTurn] = OrderedDict()
        self._on_disk: set[str] = set()

    def add(self, turn: StoredTurn, *, on_disk: bool) -> None:
        """Remember a turn; `on_disk` says that the store has it too."""
        self._turns[turn.response_id] = turn
        if on_disk:
            self._on_disk.add(turn.response_id)
        while len(self._turns) > self._max_turns:
            response_id, _ = self._turns.popitem(last=False)
            self._on_disk.discard(response_id)

    async def is_on_disk(self, response_id: str, key_id: str) -> bool:
        """Whether the store has the turn."""
        if response_id in self._turns or self._store is None:
            return response_id in self._on_disk
        return await asyncio.to_thread(self._load, response_id, key_id) is not None

    async def chain(self, response_id: str, key_id: str) -> list[StoredTurn]:
        """The turn and its ancestors, root first.

        Raises:
            NotFound: With code `previous_response_not_found`.
        """
        chain: list[StoredTurn] = []
        parent_id: str | None = response_id
        while parent_id is not None:
            turn = self._turns.get(parent_id)
            if turn is None or turn.key_id != key_id:
                chain += reversed(await self._stored_chain(parent_id, key_id, response_id))
                break
            chain.append(turn)
            parent_id = turn.parent_id
        return chain[::-1]

    async def known_chain(self, response_id: str | None, key_id: str) -> list[StoredTurn]:
        """The turn and its ancestors up to one that was deleted, oldest first."""
        chain: list[StoredTurn] = []
        while response_id is not None:
            turn = await self._find(response_id, key_id)
            if turn is None:
                break
            chain.append(turn)
            response_id = turn.parent_id
        return chain[::-1]

    async def descendants(self, response_id: str, key_id: str) -> list[str]:
        """Ids of all turns that build on this one, stored or not."""
        found: set[str] = set()
        if self._store is not None:
            found.update(await asyncio.to_thread(self._store.descendants, response_id, key_id))
        # What builds on a turn in memory only is in memory only, or stored as a root.
        children: dict[str, list[str]] = {}
        for turn in self._turns.values():
            if turn.parent_id is not None:
                children.setdefault(turn.parent_id, []).append(turn.response_id)
        left, seen = [response_id, *found], {response_id, *found}
        while left:
            more = [one for one in children.get(left.pop(), ()) if one not in seen]
            seen.update(more)
            left += more
        return sorted(seen - {response_id})

    async def turn(self, response_id: str, key_id: str) -> StoredTurn:
        """One turn.

        Raises:
            NotFound: There is none of this id and key.
        """
        turn = await self._find(response_id, key_id)
        if turn is None:
            raise NotFound(f"response {response_id} does not exist")
        return turn

    def forget(self, response_ids: Iterable[str]) -> None:
        """Drop turns from memory."""
        for response_id in response_ids:
            self._turns.pop(response_id, None)
            self._on_disk.discard(response_id)

    def keep_own(self, response_ids: Iterable[str]) -> None:
        """Of turns behind a deleted one, keep no ids of what was before their own messages.

        They can be read still, and cannot be continued.
        """
        for response_id in response_ids:
            turn = self._turns.get(response_id)
            if turn is not None and turn.is_whole:
                own = replace(turn, prompt_ids=(), settled_from=None, settled_ids=())
                self._turns[response_id] = own

    def of_conversation(self, conversation_id: str) -> list[str]:
        """Ids of the turns in memory that belong to a conversation."""
        return [turn.response_id for turn in self.turns_of(conversation_id)]

    def turns_of(self, conversation_id: str) -> list[StoredTurn]:
        """The turns in memory that belong to a conversation, as they came."""
        turns = self._turns.values()
        return [turn for turn in turns if turn.conversation_id == conversation_id]

    async def _find(self, response_id: str, key_id: str) -> StoredTurn | None:
        turn = self._turns.get(response_id)
        if turn is None:
            return await asyncio.to_thread(self._load, response_id, key_id)
        return turn if turn.key_id == key_id else None

    def _load(self, response_id: str, key_id: str) -> StoredTurn | None:
        return None if self._store is None else self._store.load_turn(response_id, key_id)

    async def _stored_chain(self, response_id: str, key_id: str, asked_id: str) -> list[StoredTurn]:
        try:
            if self._store is None:
                raise NotFound(f"response {response_id} does not exist")
            return await asyncio.to_thread(self._store.chain, response_id, key_id)
        except NotFound as error:
            raise NotFound(
                f"previous_response_id names {asked_id}, which cannot be continued: {error}",
                param="previous_response_id",
                code=TURN_NOT_FOUND,
            ) from None
