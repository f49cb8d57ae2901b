"""The store's operations: save, load and delete turns and conversations, each for one key.

Knows: the SQL of each operation. Does not know: sockets, models, what the ids mean.
Invariant: no operation shows or changes what belongs to another key; a write's future resolves
after its commit. Cost: a save is one small transaction (well below 1 ms without a slow disk).
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from concurrent.futures import Future
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from chatrt.errors import NotFound, StoreError
from chatrt.store.database import open_reader, open_writer, store_error
from chatrt.store.records import (
    StoredConversation,
    StoredItem,
    StoredTurn,
    pack_ids,
    turn_items,
    unpack_ids,
)
from chatrt.store.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

logger = logging.getLogger(__name__)

T = TypeVar("T")

_COLUMNS = tuple(one.name for one in fields(StoredTurn))
_ID_COLUMNS = ("prompt_ids", "output_ids", "settled_ids")
_NAMES = ", ".join(_COLUMNS)
_INSERT_TURN = f"INSERT INTO turns ({_NAMES}) VALUES ({', '.join(':' + one for one in _COLUMNS)})"
_TURN = f"SELECT {_NAMES} FROM turns WHERE response_id = ? AND key_id = ?"
_CHAIN = f"""
WITH RECURSIVE chain (id, parent, depth) AS (
    SELECT response_id, parent_id, 0 FROM turns WHERE response_id = :id AND key_id = :key
    UNION ALL
    SELECT turns.response_id, turns.parent_id, depth + 1
    FROM turns JOIN chain ON turns.response_id = chain.parent WHERE turns.key_id = :key
)
SELECT {", ".join("turns." + one for one in _COLUMNS)}
FROM chain JOIN turns ON turns.response_id = chain.id ORDER BY depth DESC
"""
# By rowid, the order in which turns were saved: a clock may be set back between two turns.
_LAST_TURN = """
SELECT response_id FROM turns WHERE conversation_id = c.id ORDER BY rowid DESC LIMIT 1
"""
_CONVERSATIONS = f"""
SELECT c.id, c.title, c.created_at, c.updated_at,
    (SELECT count(*) FROM turns WHERE conversation_id = c.id), ({_LAST_TURN})
FROM conversations AS c
WHERE c.key_id = :key AND (
    :query = '' OR contains(c.title, :query) OR EXISTS (
        SELECT 1 FROM turns WHERE conversation_id = c.id
        AND (contains(text, :query) OR contains(input_text(input_json), :query))
    )
)
ORDER BY c.updated_at DESC, c.rowid DESC
"""
_TURN_IDS = (
    "SELECT response_id FROM turns WHERE conversation_id = ? AND key_id = ? ORDER BY created_at"
)
_TURNS = f"SELECT {_NAMES} FROM turns WHERE conversation_id = ? AND key_id = ? ORDER BY rowid"
_BELOW = """
WITH RECURSIVE below (id) AS (
    SELECT :id UNION
    SELECT response_id FROM turns JOIN below ON turns.parent_id = below.id WHERE key_id = :key
)
"""
_DESCENDANTS = f"{_BELOW} SELECT id FROM below WHERE id <> :id"
# What began anew behind a turn has that turn's ids among its own.
_KEEP_OWN = f"""
{_BELOW}
UPDATE turns SET prompt_ids = x'', settled_from = NULL, settled_ids = x''
WHERE is_whole AND response_id IN (SELECT id FROM below)
"""
_CONVERSATION = """
SELECT 1 FROM conversations WHERE id = ? AND key_id = ?
"""


class Store:
    """Conversations and turns in one SQLite file.

    Reads happen on the calling thread, writes on the store's own; every method may be called from
    any thread. Where the file cannot be written (a read-only folder), reads go on and each write
    raises. All operations name the key that asks, and see nothing of other keys.
    """

    def __init__(self, path: Path, writer: Writer | StoreError, reader: sqlite3.Connection) -> None:
        self.path = path
        self._writer = writer
        self._reader = reader
        self._reader_lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> Store:
        """Opens the file, making it and its folder if need be; a corrupt one is renamed aside.

        Raises:
            StoreError: It can be neither written nor read, or a newer chatrt wrote it.
        """
        writer: Writer | StoreError
        try:
            writer = Writer(open_writer(path), path)
        except StoreError as error:
            if not path.is_file():
                raise
            reader = open_reader(path)
            logger.warning("%s; old conversations can be read, new ones are not kept", error)
            return cls(path, error, reader)
        return cls(path, writer, open_reader(path))

    def close(self) -> None:
        """Writes what is queued and closes the file; a second call does nothing."""
        # The writer last: only a connection that may write can tidy the log away.
        with self._reader_lock:
            self._reader.close()
        if isinstance(self._writer, Writer):
            self._writer.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Turns

    def save_turn(self, turn: StoredTurn) -> Future[None]:
        """Keeps a turn and marks its conversation as updated.

        A chain must be stored whole to be continued: where the parent is not stored, the caller
        passes the whole sequence as `prompt_ids` and no `parent_id`. The future raises NotFound
        when the conversation is gone or another key's, StoreError when it cannot be written.
        """
        row = {name: getattr(turn, name) for name in _COLUMNS}
        row |= {name: pack_ids(getattr(turn, name)) for name in _ID_COLUMNS}

        def run(connection: sqlite3.Connection) -> None:
            if turn.conversation_id is not None:
                _require_conversation(connection, turn.conversation_id, turn.key_id)
                connection.execute(
                    "UPDATE conversations SET updated_at = max(updated_at, ?) WHERE id = ?",
                    (turn.created_at, turn.conversation_id),
                )
            connection.execute(_INSERT_TURN, row)

        return self._write(run)

    def load_turn(self, response_id: str, key_id: str) -> StoredTurn | None:
        """The turn, or None if there is none of this id and key."""
        rows = self._read(_TURN, (response_id, key_id))
        return _turn(rows[0]) if rows else None

    def chain(self, response_id: str, key_id: str) -> list[StoredTurn]:
        """The turn and all its ancestors, root first.

        Raises:
            NotFound: The turn is not stored, or one that it builds on was deleted.
        """
        turns = self._known_chain(response_id, key_id)
        if not turns:
            raise NotFound(f"response {response_id} does not exist")
        if (missing := turns[0].parent_id) is not None:
            raise NotFound(f"response {response_id} builds on {missing}, which was deleted")
        return turns

    def descendants(self, response_id: str, key_id: str) -> list[str]:
        """Ids of all turns that build on this one. Cost: reads the key's turns; for deletions."""
        return [row[0] for row in self._read(_DESCENDANTS, {"id": response_id, "key": key_id})]

    def delete_turn(self, response_id: str, key_id: str) -> Future[None]:
        """Deletes a turn and wipes its text from disk; what builds on it can then not go on.

        That keeps its own messages, and no ids of the deleted turn. The future raises NotFound if
        there is no such turn.
        """

        def run(connection: sqlite3.Connection) -> None:
            connection.execute(_KEEP_OWN, {"id": response_id, "key": key_id})
            done = connection.execute(
                "DELETE FROM turns WHERE response_id = ? AND key_id = ?", (response_id, key_id)
            )
            if not done.rowcount:
                raise NotFound(f"response {response_id} does not exist")

        return self._write(run, wipes=True)

    # Conversations

    def create_conversation(
        self, conversation_id: str, key_id: str, *, created_at: float, title: str | None = None
    ) -> Future[None]:
        """Makes an empty conversation; `created_at` is in seconds since the epoch."""

        def run(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO conversations (id, key_id, title, created_at, updated_at)"
                " VALUES (?, ?, ?, ?, ?)",
                (conversation_id, key_id, title, created_at, created_at),
            )

        return self._write(run)

    def update_conversation(
        self, conversation_id: str, key_id: str, *, title: str | None
    ) -> Future[None]:
        """Renames a conversation; the future raises NotFound if there is none."""

        def run(connection: sqlite3.Connection) -> None:
            _require_conversation(connection, conversation_id, key_id)
            connection.execute(
                "UPDATE conversations SET title = ? WHERE id = ?", (title, conversation_id)
            )

        return self._write(run)

    def delete_conversation(self, conversation_id: str, key_id: str) -> Future[tuple[str, ...]]:
        """Deletes a conversation with its turns and wipes their text from disk.

        The future has the deleted turns' response ids (their KV is the caller's to drop), or raises
        NotFound if there is no such conversation.
        """

        def run(connection: sqlite3.Connection) -> tuple[str, ...]:
            _require_conversation(connection, conversation_id, key_id)
            rows = connection.execute(
                "SELECT response_id FROM turns WHERE conversation_id = ? ORDER BY created_at",
                (conversation_id,),
            ).fetchall()
            connection.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))
            return tuple(response_id for (response_id,) in rows)

        return self._write(run, wipes=True)

    def has_conversation(self, conversation_id: str, key_id: str) -> bool:
        """Whether the conversation exists and is this key's."""
        return bool(self._read(_CONVERSATION, (conversation_id, key_id)))

    def list_conversations(self, key_id: str, query: str = "") -> list[StoredConversation]:
        """The key's conversations, newest first.

        A `query` keeps those with it in the title or in a message, in any case.
        """
        rows = self._read(_CONVERSATIONS, {"key": key_id, "query": query.strip().casefold()})
        return [StoredConversation(*row) for row in rows]

    def turn_ids(self, conversation_id: str, key_id: str) -> list[str]:
        """Response ids of a conversation's turns, oldest first; none of another key's."""
        return [row[0] for row in self._read(_TURN_IDS, (conversation_id, key_id))]

    def turns(self, conversation_id: str, key_id: str) -> list[StoredTurn]:
        """All turns of a conversation, in the order in which they were saved."""
        return [_turn(row) for row in self._read(_TURNS, (conversation_id, key_id))]

    def newest_response_id(self, conversation_id: str, key_id: str) -> str | None:
        """The conversation's last turn, or None while it is empty.

        Raises:
            NotFound: There is no such conversation.
        """
        sql = f"SELECT ({_LAST_TURN}) FROM conversations AS c WHERE c.id = ? AND c.key_id = ?"
        rows = self._read(sql, (conversation_id, key_id))
        if not rows:
            raise NotFound(f"conversation {conversation_id} does not exist")
        last: str | None = rows[0][0]
        return last

    def items(self, conversation_id: str, key_id: str) -> list[StoredItem]:
        """The transcript along the newest branch, oldest message first.

        It starts behind the last turn of the branch that was deleted, if any.

        Raises:
            NotFound: There is no such conversation.
        """
        last = self.newest_response_id(conversation_id, key_id)
        turns = self._known_chain(last, key_id) if last is not None else []
        return [item for turn in turns for item in turn_items(turn)]

    def _known_chain(self, response_id: str, key_id: str) -> list[StoredTurn]:
        return [_turn(row) for row in self._read(_CHAIN, {"id": response_id, "key": key_id})]

    def _write(self, run: Callable[[sqlite3.Connection], T], *, wipes: bool = False) -> Future[T]:
        if isinstance(self._writer, StoreError):
            refused: Future[T] = Future()
            refused.set_exception(StoreError(self._writer.message))
            return refused
        return self._writer.submit(run, wipes=wipes)

    def _read(self, sql: str, values: tuple[str, ...] | dict[str, str]) -> list[Any]:
        try:
            with self._reader_lock:
                return self._reader.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise store_error(self.path, "read", error) from error


def _turn(row: tuple[Any, ...]) -> StoredTurn:
    values = dict(zip(_COLUMNS, row, strict=True))
    values |= {name: unpack_ids(values[name]) for name in _ID_COLUMNS}
    values["is_whole"] = bool(values["is_whole"])
    return StoredTurn(**values)


def _require_conversation(
    connection: sqlite3.Connection, conversation_id: str, key_id: str
) -> None:
    if connection.execute(_CONVERSATION, (conversation_id, key_id)).fetchone() is None:
        raise NotFound(f"conversation {conversation_id} does not exist")
