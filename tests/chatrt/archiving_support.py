"""An engine over an archive, whose pages are copied at once, or beside its steps and late."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from chatrt.archive import Archive, DiskPages
from chatrt.engine.archiving import Archiving
from chatrt.page_bytes import PageBytes
from chatrt.streamed_pages import StreamedPages
from chatrt.testing.engine import (
    PAGE_SIZE,
    Outcome,
    engine_over,
    outcomes,
    tiny_target,
    turn_request,
)
from chatrt.testing.streams import LateStream
from chatrt_kernels.page_moves import TorchPageMoves
from chatrt_kernels.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from chatrt.engine import Engine
    from chatrt.kvcache import KVCache
    from chatrt.page_bytes import PageCopier
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import TurnRequest

PROMPT = list(b"the moon is made of cheese and the sea of salt, and so is everything else here")
TIMEOUT_S = 30.0


@dataclass
class World:
    """An engine over an archive, and the means to wait for it.

    `beside` is the stream on which pages are copied; None where they are copied at once.
    """

    engine: Engine
    archive: Archive
    news: threading.Event
    beside: LateStream | None = None

    def run(self, request: TurnRequest) -> Outcome:
        """Submit one turn and step until it ended."""
        self.engine.submit(request)
        return self.until_ended(request.response_id)

    def until_ended(self, response_id: str) -> Outcome:
        """Step until a turn ended; copies are done when there is nothing else to do."""
        found: dict[str, Outcome] = {}
        while response_id not in found or found[response_id].finished is None:
            worked = self.engine.step()
            outcomes(self.engine.take_events(), found)
            if worked or self.finish_copies() or response_id in found:
                continue
            assert self.news.wait(TIMEOUT_S), "nothing arrives"
            self.news.clear()
        return found[response_id]

    def finish_copies(self) -> bool:
        """Do all copies that are under way; whether there were any."""
        if self.beside is None or not len(self.beside):
            return False
        self.beside.finish()
        return True

    def settle(self) -> None:
        """Until all that is to be written is written."""
        while self.engine.step() or self.finish_copies() or self.archive.num_room == 0:
            assert self.archive.flush(TIMEOUT_S)
        assert self.archive.flush(TIMEOUT_S)

    def num_on_disk(self) -> int:
        """Pages in files."""
        return self.archive.figures().num_disk_pages


class OpenWorld(Protocol):
    """Opens a world, over a folder or main memory alone."""

    def __call__(
        self,
        tokenizer: Tokenizer,
        folder: Path | None,
        *,
        num_pages: int = 64,
        host_bytes: int = 0,
    ) -> AbstractContextManager[World]:
        """The world while it is used."""
        ...


@contextmanager
def world(
    tokenizer: Tokenizer,
    folder: Path | None,
    *,
    num_pages: int = 64,
    host_bytes: int = 0,
    beside: LateStream | None = None,
) -> Iterator[World]:
    """See `OpenWorld`; pages are copied on the stream `beside`, at once without one."""
    target = tiny_target(tokenizer, num_pages=num_pages)
    engine = engine_over(target, max_context=256)
    copier = _copier(target.kv, beside)
    news = threading.Event()
    archive = Archive(
        page_bytes=copier.num_bytes,
        page_size=PAGE_SIZE,
        fingerprint="tiny",
        host_bytes=host_bytes,
        disk=None if folder is None else DiskPages(folder, max_bytes=2**24),
        wake=news.set,
    )
    engine.keep_pages_in(Archiving(archive, copier, engine.sessions, fingerprint="tiny"))
    assert folder is None or archive.wait_ready(TIMEOUT_S)
    try:
        yield World(engine, archive, news, beside)
    finally:
        engine.cancel_all()
        engine.sessions.check_invariants()
        archive.close(TIMEOUT_S)


@contextmanager
def world_beside(
    tokenizer: Tokenizer,
    folder: Path | None,
    *,
    num_pages: int = 64,
    host_bytes: int = 0,
) -> Iterator[World]:
    """See `OpenWorld`; pages are copied beside the steps, as late as can be."""
    with world(
        tokenizer, folder, num_pages=num_pages, host_bytes=host_bytes, beside=LateStream()
    ) as opened:
        yield opened


def _copier(kv: KVCache, beside: LateStream | None) -> PageCopier:
    if beside is None:
        return PageBytes([kv])
    kv.move_pages_by(TorchPageMoves)
    streams = Streams(LateStream(prompt=True), beside, beside, pinned=False)
    return StreamedPages([kv], TorchPageMoves, streams, slot_pages=3)


def kept(name: str, token_ids: list[int], **fields: object) -> TurnRequest:
    """A turn whose pages are to be kept."""
    request = turn_request(name, token_ids)
    return replace(request, archived=True, **fields)  # type: ignore[arg-type]  # names of its own


def write_prompt(open_world: OpenWorld, tokenizer: Tokenizer, folder: Path) -> int:
    """A life before: the prompt was answered, and its pages are on disk; returns how many."""
    with open_world(tokenizer, folder) as before:
        before.run(kept("a", PROMPT))
        before.settle()
        return before.num_on_disk()
