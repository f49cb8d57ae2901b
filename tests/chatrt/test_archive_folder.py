"""The folder: its lock, its modes, its quota, and what a killed process leaves in it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chatrt.archive import DiskPages
from chatrt.archive.faults import Fault
from chatrt.errors import ArchiveError, FolderInUse
from tests.chatrt.archive_support import (
    FILE_BYTES,
    MODEL,
    PATIENCE_S,
    PLENTY,
    Kept,
    file_of,
    keys_of,
    page_files,
    path_of,
)
from tests.support import time_scale

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "kv"


@pytest.fixture
def kept(folder: Path) -> Iterator[Kept]:
    kept = Kept(folder)
    yield kept
    kept.close()


_KILLED = """
import sys
from pathlib import Path
from tests.chatrt.archive_support import Kept, path_of, payload_of
kept = Kept(Path(sys.argv[1]))
number = 0
while True:
    for record in path_of(number, *range(100)):
        while not kept.archive.save(record, payload_of(record)):
            pass
    number += 1
    print(number, flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_kill_9_while_pages_are_written_loses_no_whole_page(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(folder)],
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    ) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline()
        process.kill()
    files = page_files(folder)
    assert len(files) >= 250
    kept = Kept(folder)
    known = []
    for number in range(200):
        records = path_of(number, *range(100))
        have = [record for record in records if kept.archive.knows(record.key)]
        assert have == records[: len(have)], "what is left of a sequence is its front"
        assert kept.has(have)
        known += have
    assert len(known) == len(files)
    assert kept.failures() == {}
    assert not list(folder.rglob("*.part"))
    kept.close()


def test_what_a_killed_process_did_not_finish_is_removed_at_the_start(
    kept: Kept, folder: Path
) -> None:
    kept.save(path_of(1))
    kept.close()
    path = file_of(folder, path_of(1)[0])
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_bytes(b"half")
    elsewhere = folder / ("0" * 32) / path.parent.name / (path.name + ".part")
    elsewhere.parent.mkdir(parents=True)
    elsewhere.write_bytes(b"half")
    someones = [path.with_name("notes.txt"), folder / "README", folder / "x.part"]
    for one in someones:
        one.write_text("not ours", encoding="utf-8")
    again = Kept(folder)
    assert not unfinished.exists()
    assert not elsewhere.exists()
    assert all(one.exists() for one in someones)
    assert again.has(path_of(1))
    again.close()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_files_and_folders_are_for_their_user_only(kept: Kept, folder: Path) -> None:
    kept.save(path_of(1, 2))
    for one in [folder.parent, folder, *folder.rglob("*")]:
        assert one.stat().st_mode & 0o777 == (0o700 if one.is_dir() else 0o600), one


def test_four_thousand_pages_are_known_within_a_second(kept: Kept, folder: Path) -> None:
    kept.save(path_of(0))
    kept.close()
    whole = file_of(folder, path_of(0)[0])
    group = whole.parents[1]
    for number in range(1, 41):
        for record in path_of(number, *range(99)):
            part = group / record.key.hex()[:2]
            part.mkdir(exist_ok=True)
            (part / f"{record.key.hex()}.{record.parent.hex()}.kv").hardlink_to(whole)
    start = time.monotonic()
    again = Kept(folder)
    assert time.monotonic() - start < 1.0 * time_scale()
    assert again.archive.figures().num_disk_pages == 4001
    firsts = [path_of(number)[0] for number in range(41)]
    assert all(again.archive.knows(record.key) for record in firsts)
    again.close()


def test_a_second_process_is_told_that_the_folder_is_taken(kept: Kept, folder: Path) -> None:
    with pytest.raises(FolderInUse, match="is used by another server") as caught:
        DiskPages(folder, max_bytes=PLENTY)
    assert str(folder) in caught.value.message
    code = (
        "import sys; from pathlib import Path; from chatrt.archive import DiskPages\n"
        "from chatrt.errors import FolderInUse\n"
        "try: DiskPages(Path(sys.argv[1]), max_bytes=1)\n"
        "except FolderInUse: print('taken')\n"
        "else: print('free')"
    )

    def asked() -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert asked() == "taken"
    kept.save(path_of(1))
    kept.close()
    assert asked() == "free"


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file", encoding="utf-8")
    with pytest.raises(ArchiveError, match=r"the KV folder .* cannot be used: ") as caught:
        DiskPages(tmp_path / "file" / "kv", max_bytes=PLENTY)
    assert not isinstance(caught.value, FolderInUse)
    assert "\n" not in caught.value.message


def test_over_the_quota_the_end_of_the_oldest_sequence_goes(folder: Path) -> None:
    kept = Kept(folder, max_bytes=8 * FILE_BYTES + 100)
    old, new = path_of(1, 2, 3, 4), path_of(5, 6, 7, 8)
    kept.save(old)
    kept.clock.now_s += 10
    kept.save(new)
    kept.clock.now_s += 10
    kept.save(path_of(9, 10))
    assert [kept.archive.knows(key) for key in keys_of(old)] == [True, True, False, False]
    assert kept.has(new)
    kept.clock.now_s += 10
    kept.archive.touch(keys_of([*old, *path_of(9, 10)]))
    kept.clock.now_s += 10
    kept.save(path_of(11, 12))
    assert [kept.archive.knows(key) for key in keys_of(new)] == [True, True, False, False]
    figures = kept.archive.figures()
    assert (figures.num_disk_pages, figures.num_evicted_from_disk) == (8, 4)
    assert len(page_files(folder)) == 8
    kept.close()


def test_loading_counts_as_use(folder: Path) -> None:
    kept = Kept(folder, max_bytes=4 * FILE_BYTES)
    old, new = path_of(1, 2), path_of(3, 4)
    kept.save([*old, *new])
    kept.clock.now_s += 10
    assert kept.has(old)
    kept.clock.now_s += 10
    kept.save(path_of(5))
    assert kept.has(old)
    assert not kept.archive.knows(new[1].key)
    kept.close()


def test_a_sequence_that_is_longer_than_the_quota_keeps_its_front(folder: Path) -> None:
    kept = Kept(folder, max_bytes=5 * FILE_BYTES)
    records = path_of(*range(9))
    kept.save(path_of(100))
    kept.clock.now_s += 10
    kept.save(records)
    assert [kept.archive.knows(key) for key in keys_of(records)] == [True] * 5 + [False] * 4
    assert kept.has(records[:5])
    assert kept.failures() == {Fault.QUOTA: 4}
    kept.close()


def test_the_quota_is_for_other_models_too_and_their_old_pages_go_first(folder: Path) -> None:
    other = Kept(folder, model="another", max_bytes=5 * FILE_BYTES)
    theirs = path_of(1, 2, 3, model="another")
    other.save(theirs)
    kept = other.reopened(model=MODEL)
    kept.clock.now_s += 10
    kept.save(path_of(1, 2))
    assert kept.archive.figures().other_bytes == 3 * FILE_BYTES
    kept.clock.now_s += 10
    kept.save(path_of(3))
    assert kept.archive.figures().num_other_pages == 2
    assert len(page_files(folder)) == 5
    again = kept.reopened(model="another")
    assert [again.archive.knows(key) for key in keys_of(theirs)] == [True, True, False]
    # This time the other model's are the younger ones.
    again.clock.now_s += 10
    again.archive.touch(keys_of(theirs))
    again.save(path_of(9, model="another"))
    assert [again.archive.knows(key) for key in keys_of(theirs)] == [True, True, False]
    assert again.archive.figures().num_other_pages == 2
    again.close()


def test_a_quota_that_was_lowered_is_kept_after_the_start(kept: Kept, folder: Path) -> None:
    records = path_of(*range(100))
    kept.save(records)
    again = kept.reopened(max_bytes=10 * FILE_BYTES)
    assert again.archive.flush(PATIENCE_S)
    assert len(page_files(folder)) == 10
    assert again.has(records[:10])
    again.close()


def test_the_time_of_use_is_written_at_most_once_a_minute(kept: Kept, folder: Path) -> None:
    records = path_of(1)
    kept.save(records)
    path = file_of(folder, records[0])
    first = path.stat().st_mtime

    def touched_after(seconds: float) -> float:
        kept.clock.now_s += seconds
        kept.archive.touch(keys_of(records))
        assert kept.archive.flush(PATIENCE_S)
        return path.stat().st_mtime

    assert touched_after(59.0) == first
    assert touched_after(2.0) == kept.clock.now_s
    assert touched_after(30.0) == kept.clock.now_s - 30.0


def test_what_was_used_before_a_restart_is_young_after_it(folder: Path) -> None:
    kept = Kept(folder, max_bytes=4 * FILE_BYTES)
    one, other = path_of(1, 2), path_of(3, 4)
    kept.save([*one, *other])
    kept.clock.now_s += 100
    kept.archive.touch(keys_of(one))
    again = kept.reopened()
    again.clock.now_s += 100
    again.save(path_of(5))
    assert again.has(one)
    assert not again.archive.knows(other[1].key)
    again.close()
