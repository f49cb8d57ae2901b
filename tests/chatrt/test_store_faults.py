"""The store under faults: threads, killed processes, full disks, read-only folders, corruption."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chatrt.errors import StoreError
from chatrt.store import Store, StoredTurn
from chatrt.store.database import SCHEMA_VERSION, open_reader, open_writer
from chatrt.store.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "key"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "conversations.sqlite3"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path) as store:
        yield store


def turn(response_id: str, parent_id: str | None = None, *, text: str = "hi") -> StoredTurn:
    return StoredTurn(
        response_id=response_id,
        parent_id=parent_id,
        key_id=KEY,
        model="tiny",
        prompt_ids=(1, 2, 3),
        text=text,
        created_at=1.0,
    )


def test_many_threads_write_and_read_at_once(store: Store) -> None:
    def work(number: int) -> None:
        for index in range(20):
            name = f"t{number}-{index}"
            store.save_turn(turn(name)).result()
            assert store.load_turn(name, KEY) is not None

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(store.load_turn(f"t{n}-{i}", KEY) for n in range(6) for i in range(20))


def test_what_is_queued_at_close_is_written_and_later_writes_are_refused(path: Path) -> None:
    store = Store.open(path)
    done = [store.save_turn(turn(f"r{number}")) for number in range(100)]
    store.close()
    store.close()
    assert all(one.exception(timeout=0) is None for one in done)
    with pytest.raises(StoreError, match="is closed"):
        store.save_turn(turn("late")).result()
    with pytest.raises(StoreError, match="cannot be read"):
        store.load_turn("r1", KEY)


def test_two_stores_on_one_file_see_each_others_turns(path: Path) -> None:
    with Store.open(path) as one, Store.open(path) as other:
        one.save_turn(turn("a")).result()
        other.save_turn(turn("b", "a")).result()
        assert len(one.chain("b", KEY)) == 2


_KILLED = """
import os, signal, sys
from pathlib import Path
from chatrt.store import Store, StoredTurn
store = Store.open(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    store.save_turn(StoredTurn(response_id=f"r{number}", key_id="key", model="m", text="x" * 5000,
                               prompt_ids=tuple(range(1000)), created_at=float(number))).result()
    print(number, flush=True)
for number in range(1000, 1400):
    store.save_turn(StoredTurn(response_id=f"r{number}", key_id="key", model="m", created_at=0.0))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_kill_9_loses_no_turn_whose_future_resolved(path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, str(path), "7"], capture_output=True, text=True, check=False
    )
    assert killed.returncode == -9, killed.stderr
    assert killed.stdout.split() == [str(number) for number in range(7)]
    with Store.open(path) as store:
        for number in range(7):
            kept = store.load_turn(f"r{number}", KEY)
            assert kept is not None
            assert kept.prompt_ids == tuple(range(1000))
        store.save_turn(turn("after")).result()
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_full_disk_refuses_the_write_and_reads_go_on(path: Path) -> None:
    connection = open_writer(path)
    with Store(path, Writer(connection, path), open_reader(path)) as store:
        store.save_turn(turn("a")).result()
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreError, match=r"cannot be written: the disk is full"):
            store.save_turn(turn("big", text="x" * 100_000)).result()
        assert store.load_turn("a", KEY) == turn("a")
        assert store.load_turn("big", KEY) is None
        connection.execute(f"PRAGMA max_page_count = {pages + 1000}")
        store.save_turn(turn("big", text="x" * 100_000)).result()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file", encoding="utf-8")
    with pytest.raises(StoreError, match="cannot be opened") as caught:
        Store.open(tmp_path / "data" / "conversations.sqlite3")
    assert "\n" not in caught.value.message


_READ_ONLY = """
import os, sys
from pathlib import Path
from chatrt.errors import StoreError
from chatrt.store import Store, StoredTurn
if os.geteuid() == 0:
    os.seteuid(65534)  # root may write anywhere
turn = StoredTurn(response_id="b", key_id="key", model="m", created_at=0.0)
with Store.open(Path(sys.argv[1])) as store:
    print(store.load_turn("a", "key").text)
    try:
        store.save_turn(turn).result()
    except StoreError as error:
        print(error)
try:
    Store.open(Path(sys.argv[1]).with_name("new.sqlite3"))
except StoreError as error:
    print(error)
"""


@pytest.mark.skipif(os.name == "nt", reason="folder modes are POSIX's")
def test_in_a_read_only_folder_reads_go_on_and_writes_raise() -> None:
    # Not tmp_path: when root runs the tests the reader is another user, who may not enter it.
    folder = Path(tempfile.mkdtemp())
    path = folder / "conversations.sqlite3"
    try:
        with Store.open(path) as store:
            store.save_turn(turn("a", text="kept")).result()
        path.chmod(0o444)
        folder.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", _READ_ONLY, str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        text, refused, not_opened = done.stdout.splitlines()
        assert text == "kept"
        assert refused.startswith("the conversation store")
        assert refused.endswith("read-only")
        assert not_opened.endswith("new.sqlite3 cannot be opened: Permission denied")
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


@pytest.mark.parametrize("damage", ["not a database", "torn pages"])
def test_a_corrupt_file_is_kept_under_another_name_and_a_new_one_made(
    path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    with Store.open(path) as store:
        for number in range(50):
            store.save_turn(turn(f"r{number}", text="x" * 2000)).result()
    data = path.read_bytes()
    broken = b"rubbish" * 1000 if damage == "not a database" else data[:8192] + b"\xa5" * 8192
    path.write_bytes(broken)
    with Store.open(path) as store:
        assert store.load_turn("r1", KEY) is None
        store.save_turn(turn("new")).result()
    aside = path.with_name(path.name + ".corrupt-1")
    assert aside.read_bytes() == broken
    assert "was corrupt; it was kept as conversations.sqlite3.corrupt-1" in caplog.text
    path.write_bytes(broken)
    Store.open(path).close()
    assert path.with_name(path.name + ".corrupt-2").exists()


def test_a_file_of_a_newer_chatrt_is_refused_and_left_alone(path: Path) -> None:
    Store.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"schema 3, written by a newer chatrt.* up to schema 2"):
        Store.open(path)
    assert path.read_bytes() == before


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_the_file_is_for_its_user_only(store: Store, path: Path) -> None:
    store.save_turn(turn("a")).result()
    for one in path.parent.iterdir():
        assert one.stat().st_mode & 0o077 == 0, one


def test_a_job_that_fails_leaves_nothing_behind_and_the_next_one_runs(path: Path) -> None:
    writer = Writer(open_writer(path), path)

    def fails(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO conversations VALUES ('c', 'key', NULL, 0, 0)")
        raise RuntimeError("our own bug")

    def count(connection: sqlite3.Connection) -> int:
        (number,) = connection.execute("SELECT count(*) FROM conversations").fetchone()
        return int(number)

    with pytest.raises(RuntimeError, match="our own bug"):
        writer.submit(fails).result()
    assert writer.submit(count).result() == 0
    writer.close()
