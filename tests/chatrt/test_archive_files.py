"""Page files that are not what they should be: found out, removed, said once, never used."""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatrt.archive.faults import BadPage, Complaints, Fault
from chatrt.archive.keys import fingerprint_key
from chatrt.archive.page_file import PageLayout, check, make_header
from tests.chatrt.archive_support import (
    FILE_BYTES,
    HEADER_BYTES,
    MODEL,
    PAGE_BYTES,
    PAGE_SIZE,
    PATIENCE_S,
    Clock,
    Kept,
    file_of,
    keys_of,
    page_files,
    path_of,
    payload_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LAYOUT = PageLayout(fingerprint_key(MODEL), PAGE_SIZE, PAGE_BYTES)
RECORDS = path_of(1, 2, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def kept(folder: Path) -> Iterator[Kept]:
    kept = Kept(folder)
    kept.save(RECORDS)
    yield kept
    kept.close()


def cut(path: Path) -> None:
    os.truncate(path, FILE_BYTES - 1)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_payload(path: Path) -> None:
    flip(path, FILE_BYTES - 100)


def flip_ids(path: Path) -> None:
    flip(path, HEADER_BYTES - 10)


def flip_magic(path: Path) -> None:
    flip(path, 0)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def newer_format(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8:12] = struct.pack("<I", 2)
    path.write_bytes(data)


def other_page(path: Path) -> None:
    shutil.copy(file_of(path.parents[2], RECORDS[0]), path)


def other_model(path: Path) -> None:
    foreign = path.parents[3] / "foreign"
    kept = Kept(foreign, model="another")
    kept.save(path_of(1, model="another"))
    kept.close()
    (file,) = page_files(foreign).values()
    shutil.copy(file, path)


def gone(path: Path) -> None:
    path.unlink()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_full_folder(path: Path) -> None:
    a_folder(path)
    (path / "file").write_text("someone's", encoding="utf-8")


def a_link(path: Path) -> None:
    target = path.parents[3] / "target"
    path.rename(target)
    path.symlink_to(target)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = [
    (cut, Fault.WRONG_SIZE),
    (grow, Fault.WRONG_SIZE),
    (empty, Fault.WRONG_SIZE),
    (flip_payload, Fault.DAMAGED),
    (flip_ids, Fault.DAMAGED),
    (flip_magic, Fault.DAMAGED),
    (newer_format, Fault.FOREIGN),
    (other_page, Fault.MIXED_UP),
    (other_model, Fault.FOREIGN),
    (gone, Fault.MISSING),
    (a_folder, Fault.UNREADABLE),
    (a_full_folder, Fault.UNREADABLE),
    (a_link, Fault.UNREADABLE),
    (a_pipe, Fault.UNREADABLE),
]


@pytest.mark.skipif(os.name == "nt", reason="pipes and links are POSIX's")
@pytest.mark.parametrize(("damage", "fault"), DAMAGES, ids=[one.__name__ for one, _ in DAMAGES])
def test_a_bad_file_ends_the_load_and_is_removed(
    kept: Kept, folder: Path, damage: Callable[[Path], None], fault: Fault
) -> None:
    path = file_of(folder, RECORDS[1])
    damage(path)
    pages = kept.load(RECORDS)
    assert [page.payload is None for page in pages] == [False, True]
    assert kept.failures() == {fault: 1}
    assert kept.archive.flush(PATIENCE_S)
    assert not path.is_file()
    assert not kept.archive.knows(RECORDS[1].key)
    if path.is_dir():
        # Something of someone else's stays, and the page cannot be kept: nothing else suffers.
        kept.save([RECORDS[1]])
        assert not kept.archive.knows(RECORDS[1].key)
        assert kept.failures() == {fault: 1, Fault.BLOCKED: 1}
        kept.save(path_of(7, 8))
        assert kept.has(path_of(7, 8))
    else:
        kept.save([RECORDS[1]])
        assert kept.has(RECORDS)
        assert kept.reopened().has(RECORDS)


@pytest.mark.skipif(os.name == "nt", reason="pipes and links are POSIX's")
@pytest.mark.parametrize("damage", [one for one, _ in DAMAGES])
def test_a_file_that_went_bad_between_two_runs_is_never_used(
    kept: Kept, folder: Path, damage: Callable[[Path], None]
) -> None:
    kept.close()
    damage(file_of(folder, RECORDS[1]))
    again = Kept(folder)
    pages = again.load(RECORDS)
    assert [page.payload is None for page in pages] == [False, True]
    again.close()


def test_two_files_that_were_swapped_are_both_found_out(kept: Kept, folder: Path) -> None:
    one, other = file_of(folder, RECORDS[0]), file_of(folder, RECORDS[1])
    aside = folder / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    assert [page.payload for page in kept.load(RECORDS)] == [None]
    assert [page.payload for page in kept.load(RECORDS[1:])] == [None]
    assert kept.failures() == {Fault.MIXED_UP: 2}


def test_a_file_renamed_to_another_parent_is_found_out(kept: Kept, folder: Path) -> None:
    kept.close()
    path = file_of(folder, RECORDS[1])
    path.rename(path.with_name(f"{RECORDS[1].key.hex()}.{'0' * 32}.kv"))
    again = Kept(folder)
    assert [page.payload is None for page in again.load(RECORDS)] == [False, True]
    assert again.archive.flush(PATIENCE_S)
    assert RECORDS[1].key.hex() not in page_files(folder)
    again.close()


def test_a_record_with_the_same_key_and_other_ids_gets_nothing(kept: Kept) -> None:
    # What a collision of keys would look like.
    own = RECORDS[0]
    other = type(own)(own.key, own.parent, (9,) * PAGE_SIZE)
    assert [page.payload for page in kept.load([other])] == [None]
    assert kept.failures() == {Fault.MIXED_UP: 1}


def test_another_model_sees_nothing_of_these_pages_and_leaves_them_alone(
    kept: Kept, folder: Path
) -> None:
    before = page_files(folder).keys()
    other = kept.reopened(model="another")
    assert not any(other.archive.knows(key) for key in keys_of(RECORDS))
    assert other.archive.figures().num_other_pages == 3
    other.save(path_of(1, model="another"))
    assert page_files(folder).keys() > before
    assert other.reopened(model=MODEL).has(RECORDS)


def test_a_lack_of_means_on_our_side_ends_the_load_and_keeps_the_file(
    monkeypatch: pytest.MonkeyPatch, kept: Kept, folder: Path
) -> None:
    def refuses(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("chatrt.archive.folder.os.open", refuses)
        assert [page.payload for page in kept.load(RECORDS)] == [None]
    assert kept.failures() == {Fault.TOO_BUSY: 1}
    assert len(page_files(folder)) == 3
    assert kept.has(RECORDS)


@given(place=st.integers(0, HEADER_BYTES + PAGE_BYTES - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(place: int, bit: int) -> None:
    (record,) = path_of(5)
    payload = payload_of(record)
    data = bytearray(make_header(LAYOUT, record, payload) + payload)
    assert len(data) == LAYOUT.file_bytes == FILE_BYTES
    check(LAYOUT, record, bytes(data[:HEADER_BYTES]), data[HEADER_BYTES:])
    data[place] ^= 1 << bit
    with pytest.raises(BadPage):
        check(LAYOUT, record, bytes(data[:HEADER_BYTES]), data[HEADER_BYTES:])


def test_the_file_is_as_the_module_says() -> None:
    (record,) = path_of(5)
    payload = payload_of(record)
    header = make_header(LAYOUT, record, payload)
    facts = (
        b"chatrtKV" + struct.pack("<I", 1) + fingerprint_key(MODEL) + record.key + record.parent
    ) + struct.pack("<IQ4i", PAGE_SIZE, PAGE_BYTES, 5, 5, 5, 5)
    assert header == facts + struct.pack("<I", zlib.crc32(facts + payload))


def test_each_kind_of_fault_has_one_line_then_one_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    complaints = Complaints(clock)
    for number in range(3):
        complaints.report(Fault.DAMAGED, f"page-{number}")
    complaints.report(Fault.MISSING, "page-x")
    assert len(caplog.messages) == 2
    assert caplog.messages[0].endswith("computed again: page-0")
    clock.now_s += 61
    complaints.report(Fault.DAMAGED, "page-3")
    complaints.report(Fault.DAMAGED, "page-4")
    assert len(caplog.messages) == 3
    assert caplog.messages[2].endswith("3 more, the last page-3")
    assert complaints.counts() == {"damaged": 5, "missing": 1}
