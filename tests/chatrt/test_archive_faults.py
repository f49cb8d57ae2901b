"""Disks that are full, read-only or go away: writing pauses, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chatrt.archive import DiskPages
from chatrt.archive.faults import Fault
from chatrt.archive.worker import RETRY_S
from chatrt.errors import FolderInUse
from tests.chatrt.archive_support import (
    PATIENCE_S,
    PLENTY,
    Kept,
    page_files,
    path_of,
    payload_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "kv"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, where we may mount one."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    point = tmp_path / "tiny"
    point.mkdir()
    if mount is None or umount is None:
        pytest.skip("no mount")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(point)], capture_output=True
    )
    if done.returncode:
        pytest.skip("may not mount a file system")
    yield point
    subprocess.run([umount, "-l", str(point)], check=True)


def test_a_full_disk_stops_writing_and_nothing_else(
    tiny_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ballast = tiny_disk / "ballast"
    kept = Kept(tiny_disk / "kv", host_bytes=0)
    kept.save(path_of(1, 2))
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(1 << 17))
    check_that_writing_pauses(kept, Fault.DISK_FULL, ballast.unlink)
    assert len(caplog.messages) == 2, "a minute lies between the two"
    assert "the disk is full: no KV pages are written for a minute, reads go on" in caplog.text
    assert not list(tiny_disk.rglob("*.part"))
    kept.close()


def test_a_write_that_fails_stops_writing_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    kept = Kept(folder)
    kept.save(path_of(1, 2))

    def refuses(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("chatrt.archive.folder.os.replace", refuses)
        check_that_writing_pauses(kept, Fault.DISK_FULL, patch.undo)
    assert not list(folder.rglob("*.part"))
    kept.close()


def check_that_writing_pauses(kept: Kept, fault: Fault, repair: Callable[[], object]) -> None:
    """`path_of(1, 2)` is kept and writing fails; `repair` ends that."""
    records = path_of(1, 2, 3, 4)
    assert kept.archive.save(records[2], payload_of(records[2]))
    assert kept.archive.flush(PATIENCE_S)
    assert kept.failures() == {fault: 1}
    assert kept.archive.num_room == 0
    assert not kept.archive.save(records[2], payload_of(records[2]))
    assert not kept.archive.knows(records[2].key)
    assert kept.has(records[:2])
    kept.clock.now_s += RETRY_S + 1
    assert kept.archive.num_room > 0
    assert kept.archive.save(records[2], payload_of(records[2]))
    assert kept.archive.flush(PATIENCE_S)
    assert kept.failures() == {fault: 2}
    repair()
    assert kept.archive.num_room == 0, "it is not tried again at once"
    kept.clock.now_s += RETRY_S + 1
    kept.save(records[2:])
    assert kept.has(records)


def test_while_writing_pauses_host_memory_goes_on_and_disk_follows_later(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    kept = Kept(folder, host_bytes=PLENTY)

    def refuses(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    records = path_of(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr("chatrt.archive.folder.os.replace", refuses)
        kept.save(records)
    assert kept.has(records)
    assert not page_files(folder)
    assert kept.failures() == {Fault.UNWRITABLE: 1}
    kept.clock.now_s += RETRY_S + 1
    kept.save(records)
    assert len(page_files(folder)) == 2
    kept.close()


_READ_ONLY = """
import os, sys
from pathlib import Path
from tests.chatrt.archive_support import PATIENCE_S, Kept, keys_of, path_of, payload_of
kept = Kept(Path(sys.argv[1]))
assert kept.has(path_of(1, 2))
for folder in Path(sys.argv[1]).rglob("*"):
    if folder.is_dir():
        folder.chmod(0o500)
if os.geteuid() == 0:
    os.seteuid(65534)  # root may write anywhere
(record,) = path_of(7)
assert kept.archive.save(record, payload_of(record))
assert kept.archive.flush(PATIENCE_S)
print(sorted(kept.failures()))
assert kept.has(path_of(1, 2))
kept.archive.wipe(keys_of(path_of(1, 2)))
print(kept.archive.flush(PATIENCE_S), kept.archive.knows(path_of(1)[0].key))
os.seteuid(os.getuid())
for folder in Path(sys.argv[1]).rglob("*"):
    if folder.is_dir():
        folder.chmod(0o700)
print(kept.archive.flush(PATIENCE_S), len(list(Path(sys.argv[1]).rglob("*.kv"))))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Not tmp_path: when root runs the tests the reader is another user, who may not enter it."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.name == "nt", reason="folder modes are POSIX's")
def test_in_a_read_only_folder_reads_go_on_and_a_wipe_says_that_it_is_not_done(
    open_folder: Path,
) -> None:
    folder = open_folder / "kv"
    kept = Kept(folder)
    kept.save(path_of(1, 2))
    kept.close()
    script = _READ_ONLY
    if os.geteuid() == 0:
        script = script.replace("0o500", "0o555")
        for one in [folder, *folder.rglob("*")]:
            one.chmod(0o755 if one.is_dir() else 0o644)
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    failures, refused, wiped = done.stdout.splitlines()
    assert failures == "['unwritable']"
    assert refused == "False False"
    assert wiped == "True 0"


def test_a_folder_that_vanishes_is_made_again_after_a_minute(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Kept(folder)
    kept.save(path_of(1, 2))
    shutil.rmtree(folder)
    assert [page.payload for page in kept.load(path_of(1, 2))] == [None]
    kept.save(path_of(3))
    assert not folder.exists()
    assert kept.archive.num_room == 0
    assert kept.failures() == {Fault.MISSING: 1, Fault.FOLDER_GONE: 1}
    assert len(caplog.messages) == 2
    kept.clock.now_s += RETRY_S + 1
    kept.save(path_of(3, 4))
    assert kept.has(path_of(3, 4))
    assert kept.archive.figures().num_disk_pages == 2
    with pytest.raises(FolderInUse):
        DiskPages(folder, max_bytes=PLENTY)
    kept.close()


def test_a_folder_that_cannot_be_had_again_is_tried_once_a_minute(folder: Path) -> None:
    kept = Kept(folder, host_bytes=PLENTY)
    shutil.rmtree(folder)
    folder.write_text("in its place", encoding="utf-8")
    kept.save(path_of(1))
    kept.clock.now_s += RETRY_S + 1
    kept.save(path_of(2))
    assert kept.failures() == {Fault.FOLDER_GONE: 1, Fault.UNWRITABLE: 1}
    assert kept.has(path_of(1))
    folder.unlink()
    kept.clock.now_s += RETRY_S + 1
    kept.save(path_of(3))
    assert len(page_files(folder)) == 1
    kept.close()
