"""Saving, loading, abandoning and wiping, also at the worst moments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chatrt.archive import folder as folder_module
from chatrt.archive.loads import NUM_AHEAD
from chatrt.archive.tiers import NUM_QUEUED
from tests.chatrt.archive_support import (
    FILE_BYTES,
    PAGE_BYTES,
    PATIENCE_S,
    PLENTY,
    Gate,
    Kept,
    keys_of,
    page_files,
    path_of,
    payload_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def kept(folder: Path) -> Iterator[Kept]:
    kept = Kept(folder)
    yield kept
    kept.close()


def gated(monkeypatch: pytest.MonkeyPatch, kept: Kept, name: str, *, after: bool = False) -> Gate:
    """Holds the file thread in front of a call of the folder, or behind it."""
    assert kept.disk is not None
    gate = Gate(getattr(kept.disk._folder, name), after=after)
    monkeypatch.setattr(kept.disk._folder, name, gate)
    return gate


def test_what_was_saved_comes_back_in_order_and_after_a_restart(kept: Kept) -> None:
    records = path_of(*range(40))
    kept.save(records)
    assert kept.has(records)
    again = kept.reopened()
    assert all(again.archive.knows(key) for key in keys_of(records))
    assert again.has(records)
    assert {page.tier for page in again.load(records)} == {"disk"}
    again.close()


@pytest.mark.parametrize("on_disk", [True, False])
def test_host_memory_is_asked_before_the_disk(folder: Path, on_disk: bool) -> None:
    kept = Kept(folder if on_disk else None, host_bytes=PLENTY)
    records = path_of(*range(40))
    kept.save(records)
    assert {page.tier for page in kept.load(records)} == {"host"}
    assert kept.has(records)
    figures = kept.archive.figures()
    assert (figures.num_host_pages, figures.host_bytes) == (40, 40 * PAGE_BYTES)
    assert figures.num_disk_pages == (40 if on_disk else 0)
    assert figures.disk_bytes == figures.num_disk_pages * FILE_BYTES
    kept.close()


def test_a_page_read_from_disk_is_in_host_memory_the_next_time(kept: Kept) -> None:
    records = path_of(1, 2)
    kept.save(records)
    again = kept.reopened(host_bytes=PLENTY)
    assert [page.tier for page in again.load(records)] == ["disk", "disk"]
    assert [page.tier for page in again.load(records)] == ["host", "host"]
    assert again.has(records)
    again.close()


def test_what_falls_out_of_host_memory_is_still_on_disk(folder: Path) -> None:
    kept = Kept(folder, host_bytes=3 * PAGE_BYTES)
    one, other = path_of(1, 2, 3), path_of(4, 5, 6)
    kept.save(one)
    kept.clock.now_s += 1
    kept.save(other)
    assert kept.archive.figures().num_host_pages == 3
    assert kept.has(one)
    assert kept.has(other)
    kept.close()


def test_nothing_is_taken_without_a_tier() -> None:
    kept = Kept(None)
    (record,) = path_of(1)
    assert kept.archive.num_room == 0
    assert not kept.archive.save(record, payload_of(record))
    assert not kept.archive.knows(record.key)
    assert [page.payload for page in kept.load([record])] == [None]
    kept.close()


def test_a_load_ends_at_the_first_page_that_is_not_there(kept: Kept) -> None:
    records = path_of(*range(5))
    kept.save([*records[:2], *records[3:]])
    pages = kept.load(records)
    assert [page.payload is None for page in pages] == [False, False, True]
    assert [page.tier for page in pages] == ["disk", "disk", "none"]
    assert kept.archive.take_loaded() == []


def test_an_empty_load_is_over_at_once(kept: Kept) -> None:
    kept.archive.load([])
    assert kept.archive.take_loaded() == []


@pytest.mark.parametrize("host_bytes", [0, PLENTY])
def test_no_more_than_a_few_pages_are_read_ahead_of_the_engine(
    folder: Path, host_bytes: int
) -> None:
    kept = Kept(folder, host_bytes=host_bytes)
    records = path_of(*range(50))
    kept.save(records)
    ticket = kept.archive.load(records)
    kept.wait_until_ahead(NUM_AHEAD)
    taken = kept.archive.take_loaded()
    assert len(taken) == NUM_AHEAD
    taken += kept.take(ticket, 50 - NUM_AHEAD)
    assert [page.payload for page in taken] == [payload_of(record) for record in records]
    kept.close()


def test_several_loads_each_arrive_whole_and_in_order(kept: Kept) -> None:
    paths = [path_of(name, *range(30)) for name in range(100, 104)]
    for records in paths:
        kept.save(records)
    tickets = {kept.archive.load(records): records for records in paths}
    taken: dict[int, list[bytes | bytearray | None]] = {ticket: [] for ticket in tickets}
    while any(len(taken[ticket]) < len(records) for ticket, records in tickets.items()):
        for page in kept.archive.take_loaded():
            assert page.index == len(taken[page.ticket])
            taken[page.ticket].append(page.payload)
        if kept.woken.wait(0.01):
            kept.woken.clear()
    for ticket, records in tickets.items():
        assert taken[ticket] == [payload_of(record) for record in records]


def test_nothing_of_an_abandoned_load_arrives(monkeypatch: pytest.MonkeyPatch, kept: Kept) -> None:
    records = path_of(*range(20))
    kept.save(records)
    gate = gated(monkeypatch, kept, "read", after=True)
    ticket = kept.archive.load(records)
    assert gate.reached.wait(PATIENCE_S)
    kept.archive.abandon(ticket)
    kept.archive.abandon(ticket)
    gate.open.set()
    assert kept.archive.flush(PATIENCE_S)
    assert kept.archive.take_loaded() == []
    assert kept.has(records)


def test_a_page_that_still_waits_to_be_written_can_be_loaded(
    monkeypatch: pytest.MonkeyPatch, kept: Kept
) -> None:
    gate = gated(monkeypatch, kept, "write")
    records = path_of(1, 2)
    for record in records:
        assert kept.archive.save(record, payload_of(record))
    assert gate.reached.wait(PATIENCE_S)
    assert all(kept.archive.knows(key) for key in keys_of(records))
    assert kept.has(records)
    gate.open.set()


def test_the_queue_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch, kept: Kept) -> None:
    gate = gated(monkeypatch, kept, "write")
    records = path_of(*range(NUM_QUEUED + 1))
    assert kept.archive.num_room == NUM_QUEUED
    taken = [kept.archive.save(record, payload_of(record)) for record in records]
    assert taken == [True] * NUM_QUEUED + [False]
    assert kept.archive.num_room == 0
    assert not kept.archive.knows(records[-1].key)
    assert kept.archive.save(records[0], payload_of(records[0])), "a known page needs no room"
    gate.open.set()
    assert kept.archive.flush(PATIENCE_S)
    assert kept.archive.num_room == NUM_QUEUED
    kept.save(records)
    assert kept.has(records)


def test_a_page_saved_twice_is_written_once_and_keeps_its_payload(kept: Kept) -> None:
    records = path_of(1)
    kept.save(records)
    kept.save(records, version=1)
    assert kept.has(records)
    assert kept.archive.figures().num_written == 1


def test_wiping_deletes_a_path_up_to_where_another_branches_off(folder: Path) -> None:
    for host_bytes in (0, PLENTY):
        kept = Kept(folder / str(host_bytes), host_bytes=host_bytes)
        one, other = path_of(1, 2, 3, 4), path_of(1, 2, 5)
        kept.save(one)
        kept.save(other)
        kept.archive.wipe(keys_of(one))
        assert [kept.archive.knows(key) for key in keys_of(one)] == [True, True, False, False]
        assert kept.archive.flush(PATIENCE_S)
        left = {record.key.hex() for record in other}
        assert page_files(folder / str(host_bytes)).keys() == left
        assert kept.has(other)
        kept.archive.wipe(keys_of(other))
        assert kept.archive.flush(PATIENCE_S)
        assert not page_files(folder / str(host_bytes))
        assert kept.archive.figures().num_wiped == 5
        kept.close()


def test_wiping_goes_on_past_pages_that_were_never_archived(kept: Kept) -> None:
    records = path_of(1, 2, 3, 4)
    kept.save([records[0], records[2]])
    kept.archive.wipe(keys_of(records))
    assert not any(kept.archive.knows(key) for key in keys_of(records))


def test_what_is_wiped_while_it_is_written_does_not_survive(
    monkeypatch: pytest.MonkeyPatch, kept: Kept, folder: Path
) -> None:
    gate = gated(monkeypatch, kept, "write", after=True)
    records = path_of(1, 2)
    for record in records:
        assert kept.archive.save(record, payload_of(record))
    assert gate.reached.wait(PATIENCE_S)
    assert page_files(folder), "the first file is written, but not noted yet"
    kept.archive.wipe(keys_of(records))
    gate.open.set()
    assert kept.archive.flush(PATIENCE_S)
    assert not page_files(folder)
    assert not any(kept.archive.knows(key) for key in keys_of(records))


def test_what_is_saved_again_while_it_is_wiped_and_written_is_the_new_page(
    monkeypatch: pytest.MonkeyPatch, kept: Kept
) -> None:
    gate = gated(monkeypatch, kept, "write", after=True)
    records = path_of(1)
    assert kept.archive.save(records[0], payload_of(records[0]))
    assert gate.reached.wait(PATIENCE_S)
    kept.archive.wipe(keys_of(records))
    assert kept.archive.save(records[0], payload_of(records[0], 1))
    gate.open.set()
    assert kept.archive.flush(PATIENCE_S)
    assert kept.has(records, version=1)
    assert kept.reopened().has(records, version=1)


@pytest.mark.parametrize("after", [False, True])
def test_what_is_wiped_while_it_is_read_does_not_arrive(
    monkeypatch: pytest.MonkeyPatch, folder: Path, after: bool
) -> None:
    kept = Kept(folder, host_bytes=0)
    records = path_of(1, 2, 3)
    kept.save(records)
    kept = kept.reopened(host_bytes=PLENTY)
    gate = gated(monkeypatch, kept, "read", after=after)
    ticket = kept.archive.load(records)
    assert gate.reached.wait(PATIENCE_S)
    kept.archive.wipe(keys_of(records))
    gate.open.set()
    assert [page.payload for page in kept.take(ticket, 3)] == [None]
    assert kept.archive.flush(PATIENCE_S)
    assert not page_files(folder)
    assert kept.archive.figures().num_host_pages == 0
    kept.close()


def test_pages_that_are_ready_are_taken_back_when_they_are_wiped(kept: Kept) -> None:
    records = path_of(1, 2, 3, 4)
    kept.save([*records, *path_of(1, 2, 9)])
    ticket = kept.archive.load(records)
    kept.wait_until_ahead(4)
    kept.archive.wipe(keys_of(records))
    pages = kept.take(ticket, 4)
    assert [page.payload is None for page in pages] == [False, False, True]
    assert kept.archive.take_loaded() == []


def test_what_is_wiped_before_the_scan_found_it_is_deleted_too(
    monkeypatch: pytest.MonkeyPatch, kept: Kept, folder: Path
) -> None:
    one, other = path_of(1, 2, 3), path_of(1, 5)
    kept.save([*one, *other])
    kept.close()
    gate = Gate(folder_module._pages_in)
    monkeypatch.setattr(folder_module, "_pages_in", gate)
    again = Kept(folder, scanned=False)
    assert gate.reached.wait(PATIENCE_S)
    assert not again.archive.wait_ready(0.0)
    assert not again.archive.knows(one[2].key)
    again.archive.wipe(keys_of(one))
    gate.open.set()
    assert again.archive.flush(PATIENCE_S)
    assert page_files(folder).keys() == {one[0].key.hex(), other[1].key.hex()}
    assert again.has(other)
    again.close()


def test_a_closed_archive_takes_nothing_and_harms_nothing(kept: Kept) -> None:
    records = path_of(1)
    kept.save(records)
    waiting = kept.archive.load(path_of(7))
    kept.close()
    kept.close()
    assert kept.archive.num_room == 0
    assert not kept.archive.save(records[0], payload_of(records[0]))
    ticket = kept.archive.load(records)
    pages = kept.archive.take_loaded()
    assert [(page.ticket, page.payload) for page in pages] == [(waiting, None), (ticket, None)]
    kept.archive.wipe(keys_of(records))
    kept.archive.touch(keys_of(records))


def test_a_wake_that_fails_loses_no_page(folder: Path) -> None:
    kept = Kept(folder)

    def fails() -> None:
        kept.woken.set()
        raise RuntimeError("the loop is closed")

    kept.archive._worker._wake = fails
    records = path_of(1, 2)
    kept.save(records)
    assert kept.has(records)
    assert kept.failures()["bug"] >= 1
    kept.save(path_of(3))
    kept.close()


def test_an_error_of_our_own_in_the_thread_ends_loads_and_not_the_thread(
    monkeypatch: pytest.MonkeyPatch, kept: Kept
) -> None:
    records = path_of(1, 2)
    kept.save(records)
    assert kept.disk is not None
    with monkeypatch.context() as patch:
        patch.setattr(kept.disk, "read", lambda _: 1 / 0)
        assert [page.payload for page in kept.load(records)] == [None]
    assert kept.has(records)
