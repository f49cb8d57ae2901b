"""A store of an older chatrt is upgraded in place, and only read where that is not possible."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chatrt.errors import StoreError
from chatrt.store import Store, StoredTurn
from chatrt.store.database import SCHEMA_VERSION, open_reader, open_writer
from chatrt.store.records import pack_ids

if TYPE_CHECKING:
    from pathlib import Path

KEY = "key"

# What the first released version made, with two turns in it.
VERSION_1 = """
CREATE TABLE conversations (
    id TEXT PRIMARY KEY, key_id TEXT NOT NULL, title TEXT,
    created_at REAL NOT NULL, updated_at REAL NOT NULL, UNIQUE (id, key_id)
);
CREATE TABLE turns (
    response_id TEXT PRIMARY KEY, parent_id TEXT, conversation_id TEXT, key_id TEXT NOT NULL,
    model TEXT NOT NULL, instructions TEXT, input_json TEXT NOT NULL, prompt_ids BLOB NOT NULL,
    output_ids BLOB NOT NULL, text TEXT NOT NULL, status TEXT NOT NULL, usage_json TEXT NOT NULL,
    timing_json TEXT NOT NULL, params_json TEXT NOT NULL, created_at REAL NOT NULL, seed INTEGER,
    is_whole INTEGER NOT NULL,
    FOREIGN KEY (conversation_id, key_id) REFERENCES conversations (id, key_id) ON DELETE CASCADE
);
CREATE INDEX turns_by_conversation ON turns (conversation_id, created_at);
CREATE INDEX conversations_by_key ON conversations (key_id, updated_at);
INSERT INTO conversations VALUES ('conv', 'key', 'cats', 1.0, 3.0);
PRAGMA user_version = 1;
"""
INSERT = "INSERT INTO turns VALUES (?, ?, 'conv', 'key', 'tiny', NULL, ?, ?, ?, ?, 'completed', "
INSERT += "'{}', '{}', '{}', ?, 7, 0)"


def old_turn(response_id: str, parent_id: str | None, at: float) -> StoredTurn:
    return StoredTurn(
        response_id=response_id,
        parent_id=parent_id,
        conversation_id="conv",
        key_id=KEY,
        model="tiny",
        input_json='[{"role": "user", "content": "cats?"}]',
        prompt_ids=(1, 2, 3),
        output_ids=(4, 5),
        text="meow",
        created_at=at,
        seed=7,
    )


OLD = [old_turn("r1", None, 2.0), old_turn("r2", "r1", 3.0)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "conversations.sqlite3"
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.executescript(VERSION_1)
    for turn in OLD:
        ids = pack_ids(turn.prompt_ids), pack_ids(turn.output_ids)
        row = (turn.response_id, turn.parent_id, turn.input_json, *ids, turn.text, turn.created_at)
        connection.execute(INSERT, row)
    connection.commit()
    connection.close()
    return path


def columns(path: Path) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    rows = connection.execute("PRAGMA table_info(turns)").fetchall()
    connection.close()
    return [row[1:] for row in rows]


def test_an_older_file_keeps_its_turns_and_takes_new_ones(path: Path) -> None:
    new = replace(OLD[1], response_id="r3", parent_id="r2", settled_from=1, settled_ids=(9, 8))
    with Store.open(path) as store:
        assert store.chain("r2", KEY) == OLD
        store.save_turn(new).result()
        assert store.newest_response_id("conv", KEY) == "r3"
    with Store.open(path) as store:
        assert store.chain("r3", KEY) == [*OLD, new]
        assert new.settled_sequence == (1, 9, 8)


def test_an_upgraded_file_is_as_a_new_one(path: Path, tmp_path: Path) -> None:
    new = tmp_path / "new" / "conversations.sqlite3"
    Store.open(path).close()
    Store.open(new).close()
    assert columns(path) == columns(new)
    for one in (path, new):
        connection = sqlite3.connect(one)
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        connection.close()


def test_an_upgrade_that_another_process_was_faster_with_harms_nothing(path: Path) -> None:
    first, second = open_writer(path), open_writer(path)
    for connection in (first, second):
        assert connection.execute("SELECT count(settled_ids) FROM turns").fetchone() == (2,)
        connection.close()


def test_an_older_file_that_cannot_be_upgraded_can_be_read(path: Path) -> None:
    reader = open_reader(path)
    sql = "SELECT response_id, settled_from, settled_ids FROM turns ORDER BY rowid DESC"
    assert reader.execute(sql).fetchall() == [("r2", None, b""), ("r1", None, b"")]
    reader.close()
    assert len(columns(path)) == 17


def test_an_older_file_that_cannot_be_written_still_serves_its_conversations(path: Path) -> None:
    with Store(path, StoreError("the folder is read-only"), open_reader(path)) as store:
        assert store.chain("r2", KEY) == OLD
        assert [one.last_response_id for one in store.list_conversations(KEY)] == ["r2"]
        assert store.newest_response_id("conv", KEY) == "r2"
        assert [item.text for item in store.items("conv", KEY)] == ["cats?", "meow"] * 2
