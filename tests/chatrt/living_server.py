"""The whole server around a tiny model, which a test can hold, stop kindly or lose as by a kill.

Knows: how the parts are put together (as `chatrt serve` does), their threads, their folders.
Does not know: conversations, what a test asks.
Invariant: a life has an event loop and threads of its own; what is behind it is in `folder` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from chatrt.archive import Archive, DiskPages
from chatrt.cost_model import LinearCostModel
from chatrt.engine import Engine, EngineLimits
from chatrt.engine.archiving import Archiving
from chatrt.host import EngineHost
from chatrt.metrics import Metrics
from chatrt.native_sampling import NativeSampler
from chatrt.page_bytes import PageBytes
from chatrt.pages import PageAllocator
from chatrt.params import SamplingParams
from chatrt.prefix import PrefixTree
from chatrt.scheduler import Scheduler, SchedulerLimits
from chatrt.server.server import Server
from chatrt.server.settings import ServerSettings
from chatrt.service import ChatService, ServiceSettings
from chatrt.session_manager import SessionManager
from chatrt.store import Store
from chatrt.streamed_pages import StreamedPages
from chatrt.testing.engine import PAGE_SIZE, tiny_target
from chatrt.testing.heads import head_drafter, tiny_head
from chatrt.testing.streams import late_streams
from chatrt_drafts.auto import AutoDrafter
from chatrt_drafts.ngram import NgramDrafter
from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.cpu.sampling import NativeSampling
from chatrt_kernels.page_moves import TorchPageMoves
from tests.chatrt_kernels.cpu_support import NATIVE_PATH, compiled
from tests.support import time_scale

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from chatrt.engine import Target
    from chatrt.kvcache import KVCache
    from chatrt.page_bytes import PageCopier
    from chatrt.text.tokenizer import Tokenizer

T = TypeVar("T")

KEYS = ("key-one", "key-two")
MODEL = "tiny"
PATIENCE_S = 5.0 * time_scale()
DEFAULTS = SamplingParams(temperature=0.0, max_output_tokens=12)
_LAYERS = (0, 1)
FINGERPRINT = "tiny with a head"


@cache
def native_ops() -> NativeOps:
    """The kernels of this machine: rows are the same bits in any company."""
    return NativeOps(NativeLibrary(compiled(NATIVE_PATH)), 1)


@dataclass(frozen=True)
class Size:
    """How much of everything a server has; bytes and seconds as the settings count them.

    `copies_beside`: pages are copied beside the steps, as on a GPU.
    """

    num_pages: int = 32
    max_context: int = 256
    num_drafts: int = 4
    max_parked: int = 64
    host_bytes: int = 0
    disk_bytes: int = 2**24
    grace_s: float = 30.0
    slow_client_s: float = 30.0
    outbox_bytes: int = 2**20
    copies_beside: bool = False


class ErrorLog(logging.Handler):
    """Collects what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """One more line."""
        self.lines.append(self.format(record))


class _Killed(BaseException):
    """Nothing catches it but the end of the engine's thread."""


class MortalHost(EngineHost):
    """A host whose thread ends where its engine is killed."""

    def _run(self) -> None:
        with contextlib.suppress(_Killed):
            super()._run()


class PacedEngine(Engine):
    """Is seldom asked to look after its copies while it is held, as one that waits for a disk.

    Its steps are counted then, and an idle one would use them up before anything is asked of it.
    """

    pace: Pace

    @property
    def poll_s(self) -> float | None:
        """As the engine says, while it steps freely."""
        due_s = super().poll_s
        return due_s if due_s is None or self.pace.is_free else max(due_s, 0.25)


class Pace:
    """Lets an engine step freely, so many steps, or never again; for its thread and the test's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._permits: int | None = None  # None: as many as it likes
        self._is_dead = False
        self._is_idle = True

    @property
    def is_free(self) -> bool:
        """Whether steps are not counted."""
        return self._permits is None

    def hold(self) -> None:
        """No further step, until `allow` or `free`."""
        with self._changed:
            self._permits = 0

    def allow(self, count: int) -> None:
        """Lets a held engine take so many further steps."""
        with self._changed:
            if self._permits is not None:
                self._permits += count
                self._changed.notify_all()

    def free(self) -> None:
        """Steps freely from now on."""
        with self._changed:
            self._permits = None
            self._changed.notify_all()

    def kill(self) -> None:
        """The engine's thread ends where it is about to step."""
        with self._changed:
            self._is_dead = True
            self._changed.notify_all()

    def wait_used(self) -> None:
        """Until a held engine has used its steps, or has nothing to do."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: self._permits is None or not self._permits or self._is_idle, PATIENCE_S
            )

    def paced(self, step: Callable[[], bool]) -> Callable[[], bool]:
        """A step that waits until it may be taken."""

        def paced_step() -> bool:
            with self._changed:
                self._is_idle = False
                self._changed.wait_for(lambda: self._is_dead or self._permits != 0)
                if self._is_dead:
                    raise _Killed
            worked = step()
            with self._changed:
                if self._permits:
                    self._permits -= 1
                self._is_idle = not worked
                self._changed.notify_all()
            return worked

        return paced_step


def native_target(tokenizer: Tokenizer, size: Size) -> Target:
    """The tiny model on the native kernels, sampled natively too."""
    ops = native_ops()
    target = tiny_target(tokenizer, num_pages=size.num_pages, max_context=size.max_context, ops=ops)
    kernel = NativeSampling(ops.kernels.functions, target.vocab_size)
    return replace(target, make_sampler=partial(NativeSampler, kernel=kernel))


@dataclass
class LivingServer:
    """One life of the server, begun by `start` and ended by `stop` or `kill`."""

    tokenizer: Tokenizer
    folder: Path
    size: Size
    pace: Pace = field(default_factory=Pace)

    def start(self) -> None:
        """Put it together and listen."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="living-server")
        self._thread.start()
        self.run(self._start())

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.server.port

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 2 * PATIENCE_S) -> T:
        """What a coroutine on the server's loop returns."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def call(self, function: Callable[[Engine], T]) -> T:
        """What a call between two steps of the engine returns."""
        return self.run(self.host.call(function))

    def stop(self) -> None:
        """End it kindly, as `chatrt serve` does on SIGTERM after the drain."""
        self.pace.free()
        self.run(self._stop(), 10 * PATIENCE_S)
        self._end_loop()

    def kill(self) -> None:
        """Lose it: nothing more is computed, sent or written, nobody is told.

        What the store was given is written by its thread, as by a process that dies a moment later.
        """
        self.pace.kill()
        self.host.wake()
        self.host._thread.join(PATIENCE_S)
        assert not self.host._thread.is_alive()
        self.run(self._abort())
        with self.archive._changed:
            thread = self.archive._worker.end()
        if thread is not None:
            thread.join(PATIENCE_S)
        assert self.archive._tiers.disk is not None
        self.archive._tiers.disk.close()  # the lock of a process goes with it
        self.store.close()
        self._end_loop()

    def num_page_files(self) -> int:
        """Page files in its folder, once all that is on its way to or from disk has arrived."""
        assert self.archive.flush(PATIENCE_S)
        return sum(1 for _ in (self.folder / "pages").rglob("*.kv*"))

    def known_turns(self) -> set[str]:
        """The ids of all turns that it could continue."""
        rows = self.store._read("SELECT response_id FROM turns", ())
        return {*self.service._history._turns, *(row[0] for row in rows)}

    async def _start(self) -> None:
        size = self.size
        target = native_target(self.tokenizer, size)
        head = tiny_head(target.decoder.config, feature_layers=_LAYERS)
        heads = head_drafter(head, target, native_ops(), num_slots=size.max_parked + 16)
        allocator = PageAllocator(size.num_pages)
        sessions = SessionManager(allocator, PrefixTree(allocator, PAGE_SIZE), page_size=PAGE_SIZE)
        limits = SchedulerLimits(max_num_batched_tokens=target.batches.max_rows)
        costs = LinearCostModel(fixed_ms=0.2, decode_row_ms=0.05, prefill_row_ms=0.02)
        seeds = itertools.count(time.time_ns() % 2**40)
        engine = PacedEngine(
            target,
            sessions=sessions,
            scheduler=Scheduler(sessions, limits, costs),
            drafter=AutoDrafter(NgramDrafter(), heads),
            limits=EngineLimits(
                max_context=size.max_context,
                num_drafts=size.num_drafts,
                max_parked=size.max_parked,
                num_expected=32,
            ),
            clock=time.perf_counter_ns,
            draw_seed=lambda: next(seeds),
        )
        engine.pace = self.pace
        copier = self._copier([target.kv, heads.kv], engine)
        engine.step = self.pace.paced(engine.step)  # type: ignore[method-assign]  # held by tests
        self.engine = engine
        self.host = MortalHost(engine)
        self.host.start()
        self._open_archive(copier)
        await self._serve()

    def _copier(self, caches: list[KVCache], engine: Engine) -> PageCopier:
        """Copies pages at once, or beside the steps: a copy is done some steps later then."""
        if not self.size.copies_beside:
            return PageBytes(caches)
        streams, beside = late_streams()
        step = engine.step

        def step_and_get_on() -> bool:
            worked = step()
            beside.advance()
            return worked

        engine.step = step_and_get_on  # type: ignore[method-assign]  # the device gets on too
        for kv in caches:
            kv.move_pages_by(TorchPageMoves)
        return StreamedPages(caches, TorchPageMoves, streams, slot_pages=2)

    def _open_archive(self, copier: PageCopier) -> None:
        pages = self.folder / "pages"
        pages.mkdir(parents=True, exist_ok=True)
        self.archive = Archive(
            page_bytes=copier.num_bytes,
            page_size=PAGE_SIZE,
            fingerprint=FINGERPRINT,
            host_bytes=self.size.host_bytes,
            disk=DiskPages(pages, max_bytes=self.size.disk_bytes),
            wake=self.host.wake,
        )
        archiving = Archiving(self.archive, copier, self.engine.sessions, fingerprint=FINGERPRINT)
        self.host.post(lambda engine: engine.keep_pages_in(archiving))

    async def _serve(self) -> None:
        size = self.size
        self.store = Store.open(self.folder / "chats.sqlite")
        self.service = ChatService(
            self.host,
            self.tokenizer,
            self.store,
            Metrics(MODEL),
            ServiceSettings(model=MODEL, max_context=size.max_context, sampling=DEFAULTS),
            archive=self.archive,
        )
        settings = ServerSettings(
            port=0,
            api_keys=KEYS,
            disconnect_grace_s=size.grace_s,
            slow_client_s=size.slow_client_s,
            outbox_bytes=size.outbox_bytes,
            drain_s=0.0,
        )
        self.server = Server(self.service, settings)
        await self.server.start()

    async def _stop(self) -> None:
        await self.server.drain()
        await self.host.stop()
        await self.service.close()
        await asyncio.to_thread(self.archive.close, PATIENCE_S)

    async def _abort(self) -> None:
        assert self.server._server is not None
        self.server._server.server.close()
        for connection in list(self.server._connections):
            connection._socket.transport.abort()
        await self._cancel_others()

    async def _cancel_others(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=PATIENCE_S)

    def _end_loop(self) -> None:
        self.run(self._cancel_others())
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()
