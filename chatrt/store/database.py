"""The SQLite file: opening, its schema, and what its errors mean in a sentence.

Knows: SQL that makes tables, pragmas, SQLite's error codes. Does not know: turns, threads.
Invariant: a file is never deleted and never changed by an older program; a corrupt one is renamed.
Source: sqlite.org/pragma.html, sqlite.org/wal.html.
"""

from __future__ import annotations

import logging
import sqlite3
from typing import TYPE_CHECKING

from chatrt.errors import StoreError
from chatrt.paths import ensure_folder
from chatrt.store.records import input_messages

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 5.0

# The pair (id, key_id) is what a turn refers to, so a turn cannot be filed under another key's
# conversation, nor under one that was deleted while the turn ran.
_TABLES = """
CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    key_id TEXT NOT NULL,
    title TEXT,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    UNIQUE (id, key_id)
);
CREATE TABLE turns (
    response_id TEXT PRIMARY KEY,
    parent_id TEXT,
    conversation_id TEXT,
    key_id TEXT NOT NULL,
    model TEXT NOT NULL,
    instructions TEXT,
    input_json TEXT NOT NULL,
    prompt_ids BLOB NOT NULL,
    output_ids BLOB NOT NULL,
    text TEXT NOT NULL,
    status TEXT NOT NULL,
    usage_json TEXT NOT NULL,
    timing_json TEXT NOT NULL,
    params_json TEXT NOT NULL,
    created_at REAL NOT NULL,
    seed INTEGER,
    is_whole INTEGER NOT NULL,
    FOREIGN KEY (conversation_id, key_id) REFERENCES conversations (id, key_id) ON DELETE CASCADE
);
CREATE INDEX turns_by_conversation ON turns (conversation_id, created_at);
CREATE INDEX conversations_by_key ON conversations (key_id, updated_at);
"""
_SETTLED = """
ALTER TABLE turns ADD COLUMN settled_from INTEGER;
ALTER TABLE turns ADD COLUMN settled_ids BLOB NOT NULL DEFAULT x'';
"""
# Step n makes schema n + 1 out of schema n, which for a new file is 0.
_STEPS = (_TABLES, _SETTLED)
SCHEMA_VERSION = len(_STEPS)
# A file of version 1 that cannot be upgraded, as this version would read it.
_VIEW_OF_1 = """
CREATE TEMP VIEW turns AS SELECT rowid, response_id, parent_id, conversation_id, key_id, model,
    instructions, input_json, prompt_ids, output_ids, text, status, usage_json, timing_json,
    params_json, created_at, seed, is_whole, NULL AS settled_from, x'' AS settled_ids
FROM main.turns
"""

_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_READ_ONLY = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
_REASONS = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_READONLY: "the file or its folder is read-only",
    sqlite3.SQLITE_CANTOPEN: "the file or its folder cannot be opened or is read-only",
    sqlite3.SQLITE_PERM: "access is denied",
    sqlite3.SQLITE_CORRUPT: "the file is corrupt",
    sqlite3.SQLITE_NOTADB: "the file is not a database",
    sqlite3.SQLITE_BUSY: f"another process held it for more than {BUSY_TIMEOUT_S:g} s",
}


def store_error(path: Path, verb: str, error: sqlite3.Error | OSError) -> StoreError:
    """The sentence for an error of SQLite or of the file system; `verb` is read, written, …"""
    own_words = error.strerror if isinstance(error, OSError) else None
    reason = _REASONS.get(_primary_code(error), own_words or str(error))
    return StoreError(f"the conversation store {path} cannot be {verb}: {reason}")


def open_writer(path: Path) -> sqlite3.Connection:
    """A connection that may write, to a file with the current schema; a corrupt file is set aside.

    Reads the whole file once to check it (about 1 s per GB). An older chatrt's file is upgraded in
    place.

    Raises:
        StoreError: It cannot be opened for writing, or a newer chatrt wrote it.
    """
    try:
        ensure_folder(path.parent)
        # Made before SQLite does, for its user only; the log beside it takes the same mode.
        if not path.exists():
            path.touch(mode=0o600)
        try:
            return _open_checked(path)
        except sqlite3.DatabaseError as error:
            if _primary_code(error) not in _CORRUPT:
                raise
            _set_aside(path)
            return _open_checked(path)
    except (sqlite3.Error, OSError) as error:
        raise store_error(path, "opened", error) from error


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that only reads an existing file, also where its folder is read-only.

    Raises:
        StoreError: It cannot be read, or a newer chatrt wrote it.
    """
    try:
        try:
            return _connect_read_only(path, "mode=ro")
        except sqlite3.OperationalError as error:
            if _primary_code(error) not in _READ_ONLY or not path.is_file():
                raise
            # SQLite cannot make the shared-memory file of a WAL database in a read-only folder;
            # `immutable` does without one.
            return _connect_read_only(path, "immutable=1")
    except (sqlite3.Error, OSError) as error:
        raise store_error(path, "read", error) from error


def empty_log(connection: sqlite3.Connection) -> bool:
    """Moves the write-ahead log into the file and truncates it: deleted text lies in it too.

    Returns whether it is done; a reader in the middle of a read prevents it.
    """
    (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


def _open_checked(path: Path) -> sqlite3.Connection:
    connection = _connect(path.absolute().as_uri())
    try:
        _check_version(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        # A killed process loses nothing that was committed; a power cut may lose the last turns.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if answer != "ok":
            error = sqlite3.DatabaseError(answer)
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
        if _version(connection) < SCHEMA_VERSION:
            _upgrade(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _upgrade(connection: sqlite3.Connection) -> None:
    """Make the tables, or bring older ones up to date; all of it or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Read again inside: another process may have been faster.
        for step in _STEPS[_version(connection) :]:
            for statement in step.split(";"):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _connect_read_only(path: Path, mode: str) -> sqlite3.Connection:
    connection = _connect(f"{path.absolute().as_uri()}?{mode}")
    try:
        _check_version(connection, path)
        if _version(connection) == 1:
            connection.execute(_VIEW_OF_1)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(uri: str) -> sqlite3.Connection:
    # Each connection is used by one thread at a time, which its owner sees to.
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    connection.create_function("contains", 2, _contains, deterministic=True)
    connection.create_function("input_text", 1, _input_text, deterministic=True)
    return connection


def _contains(text: str | None, folded: str) -> bool:
    return text is not None and folded in text.casefold()


def _input_text(input_json: str) -> str:
    return "\n".join(text for _, text in input_messages(input_json))


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    version = _version(connection)
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"the conversation store {path} has schema {version}, written by a newer chatrt; "
            f"this one reads up to schema {SCHEMA_VERSION}"
        )


def _primary_code(error: Exception) -> int:
    code = getattr(error, "sqlite_errorcode", None)
    return sqlite3.SQLITE_ERROR if code is None else code & 0xFF


def _set_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    for suffix in ("-wal", "-shm"):
        beside = path.with_name(path.name + suffix)
        if beside.exists():
            beside.rename(aside.with_name(aside.name + suffix))
    path.rename(aside)
    logger.error("the conversation store %s was corrupt; it was kept as %s", path, aside.name)
