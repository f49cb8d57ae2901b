"""Any order of calls, restarts and damage: what comes back is what was saved for that key."""

from __future__ import annotations

import tempfile
import threading
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.chatrt.archive_support import (
    FILE_BYTES,
    PAGE_BYTES,
    PATIENCE_S,
    Clock,
    Kept,
    keys_of,
    page_files,
    path_of,
    payload_of,
)

if TYPE_CHECKING:
    from chatrt.archive import PageRecord

# A few names only, so that paths share fronts.
names = st.lists(st.integers(0, 1), min_size=1, max_size=5)


class ArchiveMachine(RuleBasedStateMachine):
    """`versions` is the model: which payloads a key may still have."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self.scratch.name) / "kv"
        self.versions: dict[bytes, set[int]] = {}
        self.is_damaged = False
        self.num_saved = 0

    @initialize(
        host_pages=st.sampled_from([0, 3, 100]),
        disk_pages=st.sampled_from([None, 4, 100]),
    )
    def start(self, host_pages: int, disk_pages: int | None) -> None:
        self.host_bytes = host_pages * PAGE_BYTES
        self.max_bytes = (disk_pages or 0) * FILE_BYTES
        self.kept = Kept(
            None if disk_pages is None else self.folder,
            host_bytes=self.host_bytes,
            max_bytes=self.max_bytes,
            clock=Clock(),
        )
        self.archive = self.kept.archive

    @rule(path=names, flush=st.booleans())
    def save(self, path: list[int], flush: bool) -> None:
        for record in path_of(*path):
            self.num_saved += 1
            known = self.archive.knows(record.key)
            room = self.archive.num_room
            if not self.archive.save(record, payload_of(record, self.num_saved)):
                # The tail of a sequence that fills host memory alone is refused too.
                assert room == 0 or self.kept.folder is None
                continue
            # A page that was on disk may have been given up and taken anew in between.
            self.versions.setdefault(record.key, set()).add(self.num_saved)
            if not known and self.kept.folder is None:
                self.versions[record.key] = {self.num_saved}
        if flush:
            assert self.archive.flush(PATIENCE_S)

    @rule(path=names)
    def load(self, path: list[int]) -> None:
        self.check(path_of(*path))

    @rule(paths=st.lists(names, min_size=2, max_size=3), abandon=st.booleans())
    def load_at_once(self, paths: list[list[int]], abandon: bool) -> None:
        records = [path_of(*path) for path in paths]
        tickets = [self.archive.load(one) for one in records]
        if abandon:
            self.archive.abandon(tickets.pop())
        wanted = dict(zip(tickets, records, strict=False))
        ended: set[int] = set()
        while len(ended) < len(wanted):
            for page in self.archive.take_loaded():
                record = wanted[page.ticket][page.index]
                self.check_payload(record, page.payload)
                if page.payload is None or page.index + 1 == len(wanted[page.ticket]):
                    ended.add(page.ticket)
            if len(ended) < len(wanted):
                assert self.kept.woken.wait(PATIENCE_S)
                self.kept.woken.clear()

    @rule(path=names, loading=st.booleans())
    def wipe(self, path: list[int], loading: bool) -> None:
        records = path_of(*path)
        ticket = self.archive.load(records) if loading else None
        self.archive.wipe(keys_of(records))
        for record in records:
            # What no other path goes through is gone.
            if not self.archive.knows(record.key):
                self.versions.pop(record.key, None)
        if ticket is not None:
            for page in self.archive.take_loaded():
                assert page.ticket == ticket
                self.check_payload(records[page.index], page.payload)
            self.archive.abandon(ticket)
        assert self.archive.flush(PATIENCE_S)
        left = page_files(self.folder)
        assert not [r for r in records if r.key not in self.versions and r.key.hex() in left]

    @rule(path=names, seconds=st.integers(0, 100))
    def touch(self, path: list[int], seconds: int) -> None:
        self.kept.clock.now_s += seconds
        self.archive.touch(keys_of(path_of(*path)))

    @rule(path=names, place=st.integers(0, FILE_BYTES - 1))
    def damage(self, path: list[int], place: int) -> None:
        assert self.archive.flush(PATIENCE_S)
        record = path_of(*path)[-1]
        file = page_files(self.folder).get(record.key.hex())
        if file is not None:
            data = bytearray(file.read_bytes())
            data[place] ^= 1
            file.write_bytes(data)
            self.is_damaged = True

    @rule()
    def restart(self) -> None:
        if self.kept.folder is None:
            return
        clock = self.kept.clock
        self.kept.close()
        self.kept = Kept(
            self.folder, host_bytes=self.host_bytes, max_bytes=self.max_bytes, clock=clock
        )
        self.archive = self.kept.archive

    @rule()
    def index_and_folder_agree_when_nothing_is_left_to_do(self) -> None:
        assert self.archive.flush(PATIENCE_S)
        figures = self.archive.figures()
        files = page_files(self.folder)
        assert figures.num_disk_pages == len(files)
        assert figures.disk_bytes == len(files) * FILE_BYTES <= max(self.max_bytes, 0)
        assert figures.num_queued == 0
        assert "bug" not in figures.failures
        assert not list(self.folder.rglob("*.part"))

    @invariant()
    def host_memory_stays_within_its_bytes(self) -> None:
        assert self.archive.figures().host_bytes <= self.host_bytes

    def teardown(self) -> None:
        if hasattr(self, "kept"):
            self.kept.close()
        self.scratch.cleanup()

    def check(self, records: list[PageRecord]) -> None:
        assert self.archive.flush(PATIENCE_S)
        num_known = len(list(takewhile(self.archive.knows, keys_of(records))))
        pages = self.kept.load(records)
        num_loaded = sum(page.payload is not None for page in pages)
        assert num_loaded == num_known or (self.is_damaged and num_loaded < num_known)
        for record, page in zip(records, pages, strict=False):
            self.check_payload(record, page.payload)
        assert pages[-1].payload is None or len(pages) == len(records)

    def check_payload(self, record: PageRecord, payload: bytes | bytearray | None) -> None:
        if payload is not None:
            versions = self.versions.get(record.key, set())
            assert payload in [payload_of(record, version) for version in versions]


ArchiveMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestArchiveMachine = ArchiveMachine.TestCase


def test_an_engine_that_saves_loads_and_wipes_at_full_speed_never_gets_a_wrong_page(
    tmp_path: Path,
) -> None:
    kept = Kept(tmp_path / "kv", host_bytes=6 * PAGE_BYTES, max_bytes=30 * FILE_BYTES)
    archive = kept.archive
    paths = [path_of(number, *range(8)) for number in range(8)]
    of_ticket: dict[int, list[PageRecord]] = {}
    num_right = 0
    for turn in range(400):
        records = paths[turn % 8]
        for record in records:
            archive.save(record, payload_of(record))
        ticket = archive.load(records)
        of_ticket[ticket] = records
        if turn % 3 == 0:
            archive.wipe(keys_of(paths[(turn * 5) % 8]))
        if turn % 7 == 0:
            archive.abandon(ticket)
            del of_ticket[ticket]
        for page in archive.take_loaded():
            record = of_ticket[page.ticket][page.index]
            assert page.payload is None or page.payload == payload_of(record)
            num_right += page.payload is not None
    assert num_right > 0
    for records in paths:
        archive.wipe(keys_of(records))
    assert archive.flush(PATIENCE_S)
    assert not page_files(tmp_path)
    assert kept.failures().keys() <= {"quota"}
    kept.close()


def test_a_second_thread_may_look_while_the_engine_works(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kv", host_bytes=4 * PAGE_BYTES)
    records = path_of(*range(60))
    is_over = threading.Event()
    wrong: list[str] = []

    def look() -> None:
        while not is_over.is_set():
            figures = kept.archive.figures()
            if figures.host_bytes > 4 * PAGE_BYTES or figures.num_queued > 8:
                wrong.append(str(figures))

    watcher = threading.Thread(target=look)
    watcher.start()
    kept.save(records)
    assert kept.has(records)
    is_over.set()
    watcher.join()
    assert not wrong
    kept.close()
