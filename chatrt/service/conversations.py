"""Conversations of a key: their list, titles, transcripts, and who watches them.

Knows: the store's conversations, the history, watchers. Does not know: turns' ids, the engine.
Invariant: without a store conversations live in memory and vanish with the process.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from chatrt.errors import NotFound, StoreError
from chatrt.service.responses import turn_body
from chatrt.store import StoredConversation
from chatrt.store.records import turn_items
from chatrt.wire.ids import new_conversation_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatrt.server.service import OnLog
    from chatrt.service.history import History
    from chatrt.store import Store, StoredTurn
    from chatrt.wire.log import ResponseLog

_log = logging.getLogger(__name__)


class Conversations:
    """Opens, lists, renames and deletes conversations.

    Where the store cannot take a new conversation (a full disk, a read-only folder), it is kept in
    memory, and one line in the log says so.
    """

    def __init__(self, store: Store | None, history: History, *, now: Callable[[], float]) -> None:
        self._store = store
        self._history = history
        self._now = now
        self._unstored: dict[str, tuple[str, StoredConversation]] = {}  # id → (key id, it)
        self._newest: dict[str, str] = {}
        self._watchers: dict[str, list[tuple[str, OnLog]]] = {}

    async def create(self, title: str | None, key_id: str) -> dict[str, Any]:
        """A new, empty conversation."""
        conversation_id, created_at = new_conversation_id(), self._now()
        conversation = StoredConversation(conversation_id, title, created_at, created_at, 0, None)
        try:
            if self._store is None:
                raise StoreError("conversations are not stored")
            await asyncio.wrap_future(
                self._store.create_conversation(
                    conversation_id, key_id, created_at=created_at, title=title
                )
            )
        except StoreError as error:
            _log.warning("a conversation is kept in memory only: %s", error)
            self._unstored[conversation_id] = (key_id, conversation)
        return _body(conversation)

    async def rename(self, conversation_id: str, title: str, key_id: str) -> dict[str, Any]:
        """The conversation under its new title.

        Raises:
            NotFound: There is none of this id and key.
        """
        await self.require(conversation_id, key_id)
        if conversation_id in self._unstored:
            _, old = self._unstored[conversation_id]
            self._unstored[conversation_id] = (key_id, replace(old, title=title))
        elif self._store is not None:
            done = self._store.update_conversation(conversation_id, key_id, title=title)
            await asyncio.wrap_future(done)
        bodies = await self.listed(None, key_id)
        found = next((body for body in bodies if body["id"] == conversation_id), None)
        if found is None:  # deleted in between
            raise NotFound(f"conversation {conversation_id} does not exist", param="id")
        return found

    async def delete(self, conversation_id: str, key_id: str) -> list[str]:
        """Forget a conversation; returns the ids of its turns, stored or not."""
        await self.require(conversation_id, key_id)
        response_ids = set(self._history.of_conversation(conversation_id))
        if self._unstored.pop(conversation_id, None) is None and self._store is not None:
            done = self._store.delete_conversation(conversation_id, key_id)
            stored_ids: tuple[str, ...] = await asyncio.wrap_future(done)
            response_ids.update(stored_ids)
        self._history.forget(response_ids)
        self._newest.pop(conversation_id, None)
        self._watchers.pop(conversation_id, None)
        return sorted(response_ids)

    async def turn_ids(self, conversation_id: str, key_id: str) -> list[str]:
        """Ids of all its turns, stored or not."""
        turn_ids = set(self._history.of_conversation(conversation_id))
        if self._store is not None and conversation_id not in self._unstored:
            turn_ids.update(await asyncio.to_thread(self._store.turn_ids, conversation_id, key_id))
        return sorted(turn_ids)

    async def listed(self, query: str | None, key_id: str) -> list[dict[str, Any]]:
        """The key's conversations, newest first; with `query` those that contain it."""
        text = query or ""
        found: list[StoredConversation] = []
        if self._store is not None:
            found = await asyncio.to_thread(self._store.list_conversations, key_id, text)
        for key, one in list(self._unstored.values()):
            if key == key_id and await self._contains(one, key_id, text.strip().casefold()):
                found.append(self._counted(one))
        return [_body(one) for one in sorted(found, key=lambda one: -one.updated_at)]

    async def items(self, conversation_id: str, key_id: str) -> list[dict[str, Any]]:
        """The messages along the newest branch, oldest first, from behind a deleted turn on."""
        newest = await self.newest(conversation_id, key_id)
        turns = await self._history.known_chain(newest, key_id)
        return [item.as_dict() for turn in turns for item in turn_items(turn)]

    async def turns(self, conversation_id: str, key_id: str) -> list[dict[str, Any]]:
        """All turns of all branches, the oldest first.

        Raises:
            NotFound: There is no such conversation.
        """
        await self.require(conversation_id, key_id)
        stored: list[StoredTurn] = []
        if self._store is not None and conversation_id not in self._unstored:
            stored = await asyncio.to_thread(self._store.turns, conversation_id, key_id)
        # What is in memory came behind what only the store has: the oldest leave memory first.
        recent = self._history.turns_of(conversation_id)
        held = {turn.response_id for turn in recent}
        older = [turn for turn in stored if turn.response_id not in held]
        # On a thread: thousands of turns would hold up every other connection.
        return await asyncio.to_thread(lambda: [turn_body(turn) for turn in (*older, *recent)])

    async def newest(self, conversation_id: str, key_id: str) -> str | None:
        """The id of the conversation's last turn, None while it is empty.

        Raises:
            NotFound: There is no such conversation.
        """
        await self.require(conversation_id, key_id)
        if conversation_id in self._newest or conversation_id in self._unstored:
            return self._newest.get(conversation_id)
        assert self._store is not None
        return await asyncio.to_thread(self._store.newest_response_id, conversation_id, key_id)

    async def require(self, conversation_id: str, key_id: str) -> None:
        """Raise NotFound unless the conversation exists and is the key's."""
        if conversation_id in self._unstored:
            known = self._unstored[conversation_id][0] == key_id
        else:
            known = self._store is not None and await asyncio.to_thread(
                self._store.has_conversation, conversation_id, key_id
            )
        if not known:
            raise NotFound(f"conversation {conversation_id} does not exist", param="conversation")

    def ended(self, turn: StoredTurn) -> None:
        """A turn ended: it is its conversation's newest."""
        if turn.conversation_id is not None:
            self._set_newest(turn.conversation_id, turn.response_id, turn.created_at)

    async def deleted(self, turn: StoredTurn) -> None:
        """A turn was deleted: its conversation goes on behind the one before it."""
        conversation_id = turn.conversation_id
        if conversation_id is None or self._newest.get(conversation_id) != turn.response_id:
            return
        before = await self._history.known_chain(turn.parent_id, turn.key_id)
        newest = before[-1].response_id if before else None
        self._set_newest(conversation_id, newest, turn.created_at)

    def _set_newest(self, conversation_id: str, newest: str | None, time_s: float) -> None:
        if newest is None:
            self._newest.pop(conversation_id, None)
        else:
            self._newest[conversation_id] = newest
        if conversation_id in self._unstored:
            key_id, old = self._unstored[conversation_id]
            changed = replace(old, updated_at=time_s, last_response_id=newest)
            self._unstored[conversation_id] = (key_id, changed)

    # Watchers ------------------------------------------------------------------------------------

    async def subscribe(
        self,
        conversation_id: str,
        key_id: str,
        connection_id: str,
        on_log: OnLog,
        running: Callable[[], Sequence[ResponseLog]],
    ) -> Callable[[], None]:
        """Report running responses now and later ones as they begin; returns what ends that.

        `running` is asked in the moment from which on later ones are announced: none falls between.
        """
        await self.require(conversation_id, key_id)
        watcher = (connection_id, on_log)
        watchers = self._watchers.setdefault(conversation_id, [])
        watchers.append(watcher)
        for log in running():
            on_log(log)

        def end() -> None:
            if watcher in watchers:
                watchers.remove(watcher)

        return end

    def announce(self, log: ResponseLog, connection_id: str) -> None:
        """Tell the conversation's watchers of a new response, except its own connection."""
        if log.conversation_id is not None:
            for watcher_id, on_log in tuple(self._watchers.get(log.conversation_id, ())):
                if watcher_id != connection_id:
                    on_log(log)

    async def _contains(self, one: StoredConversation, key_id: str, text: str) -> bool:
        """Whether the title or a message of a conversation in memory has `text`, in any case."""
        if text in (one.title or "").casefold():
            return True
        response_ids = self._history.of_conversation(one.conversation_id)
        turns = [await self._history.turn(response_id, key_id) for response_id in response_ids]
        return any(text in item.text.casefold() for turn in turns for item in turn_items(turn))

    def _counted(self, conversation: StoredConversation) -> StoredConversation:
        turns = self._history.of_conversation(conversation.conversation_id)
        return replace(conversation, num_turns=len(turns))


def _body(conversation: StoredConversation) -> dict[str, Any]:
    return {
        "id": conversation.conversation_id,
        "object": "conversation",
        "title": conversation.title,
        "created_at": conversation.created_at,
        "updated_at": conversation.updated_at,
        "num_turns": conversation.num_turns,
        "last_response_id": conversation.last_response_id,
    }
