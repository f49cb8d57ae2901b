"""Pages moved on a GPU: whether every byte is right, and how fast they go out and back.

Knows: caches, what the server copies pages with, synchronising. Does not know: models, turns.
Invariant: pages hold what they held before when a function here has returned.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatrt.kvcache import KVCache
from chatrt.session import PageCopy
from chatrt.streamed_pages import StreamedPages
from chatrt.testing.gpu_parity import KV_DTYPES, Parity
from chatrt.testing.gpu_times import median_ms
from chatrt_kernels.page_moves import PageRuns, TorchPageMoves

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chatrt.page_bytes import CopyOut
    from chatrt_kernels.page_moves import MakePageMoves
    from chatrt_kernels.streams import Streams

_NUM_PAGES = 70


def check_moves(device: torch.device, make_moves: MakePageMoves) -> Iterator[Parity]:
    """Pages of every format copied, gathered and scattered: how many bytes are not the oracle's."""
    for name, dtype in KV_DTYPES.items():
        ours = _arbitrary(device, dtype)
        theirs = [PageRuns(one.runs.clone(), one.row_bytes) for one in ours]
        moves, oracle = make_moves(ours), TorchPageMoves(theirs)
        staged = torch.zeros(2, 63, moves.page_bytes, dtype=torch.uint8, device=device)
        ids = list(range(63, 0, -1))
        copies = [
            PageCopy(page_id, (page_id * 3 + 1) % _NUM_PAGES, page_id % 17) for page_id in ids
        ]
        for one, rows in ((moves, staged[0]), (oracle, staged[1])):
            one.gather(ids, rows)
            one.copy_rows(copies)
            one.scatter([page_id + 6 for page_id in ids], rows)
        wrong = int((staged[0] != staged[1]).sum())
        for a, b in zip(ours, theirs, strict=True):
            wrong += int((a.runs != b.runs).sum())
        yield Parity(f"pages of {name} moved", float(wrong), 0.0)


def _arbitrary(device: torch.device, dtype: torch.dtype) -> tuple[PageRuns, ...]:
    """One layer of pages with any bytes."""
    kv = KVCache.allocate(
        num_layers=1,
        num_pages=_NUM_PAGES,
        page_size=16,
        kv_heads=2,
        head_dim=64,
        dtype=dtype,
        device=device,
    )
    for one in kv.runs():
        one.runs.copy_(torch.arange(one.runs.numel(), device=device).view(one.runs.shape) % 251)
    return kv.runs()


def wrong_pages(
    kv: KVCache, streams: Streams, make_moves: MakePageMoves, num_pages: int = 64
) -> int:
    """How many pages differ once they were out and back.

    Each is written over as soon as its copy has begun, which must not be what is copied.
    """
    pages = StreamedPages([kv], make_moves, streams)
    before = [one.runs[:, :num_pages].clone() for one in kv.runs()]

    def write_over(begin: int, count: int) -> None:
        for one in kv.runs():
            one.runs[:, begin : begin + count] = 0xA5

    payloads: list[bytes] = []
    for begin in range(0, num_pages, pages.num_out):
        count = min(pages.num_out, num_pages - begin)
        copy = pages.copy_out(range(begin, begin + count))
        write_over(begin, count)
        copy.wait()
        payloads += [copy.take() for _ in range(count)]
    _put(pages, payloads)
    kv.arrivals = None
    differs = torch.zeros(num_pages, dtype=torch.bool, device=kv.data.device)
    for one, old in zip(kv.runs(), before, strict=True):
        differs |= (one.runs[:, :num_pages] != old).any(dim=2).any(dim=0)
    return int(differs.sum())


def row_copies_ms(
    kv: KVCache, make_moves: MakePageMoves, num_copies: int = 8
) -> tuple[float, float]:
    """Milliseconds of copies on write, half a page each: by these moves, and one by one."""
    copies = [PageCopy(2 * i, 2 * i + 1, kv.page_size // 2) for i in range(num_copies)]
    before = [one.runs[:, : 2 * num_copies].clone() for one in kv.runs()]
    device, own = kv.data.device, kv.moves
    kv.move_pages_by(make_moves)
    together_ms = median_ms(lambda: kv.copy_rows(copies), device, 10)
    kv.moves = None
    apart_ms = median_ms(lambda: kv.copy_rows(copies), device, 10)
    kv.moves = own
    for one, old in zip(kv.runs(), before, strict=True):
        one.runs[:, : 2 * num_copies] = old
    return together_ms, apart_ms


@dataclass(frozen=True, slots=True)
class PageSpeeds:
    """GB/s (10⁹ bytes) of pages that leave the device and come back, beside plain copies.

    `out` is until they lie in pinned memory, batch after batch; `taken` until their payloads are
    the archive's, batches overlapping; `back` from payloads to their places. `plain_out` and
    `plain_back` are copies of whole pinned buffers.
    """

    out: float
    taken: float
    back: float
    plain_out: float
    plain_back: float


def page_speeds(
    kv: KVCache, streams: Streams, make_moves: MakePageMoves, num_pages: int = 64
) -> PageSpeeds:
    """Pages that go to main memory and back as the server copies them."""
    pages, device = StreamedPages([kv], make_moves, streams), kv.data.device
    payloads: list[bytes] = []

    def take_all() -> None:
        payloads[:] = _payloads(pages, num_pages)

    def put_all() -> None:
        _put(pages, payloads)

    gigabytes = num_pages * pages.num_bytes / 1e9
    out_s = statistics.median(_out_s(pages, num_pages) for _ in range(5))
    taken_ms, back_ms = median_ms(take_all, device, 3), median_ms(put_all, device, 3)
    plain_out, plain_back = _plain_gbs(device, num_pages * pages.num_bytes, pinned=streams.pinned)
    kv.arrivals = None
    return PageSpeeds(
        gigabytes / out_s,
        gigabytes / taken_ms * 1e3,
        gigabytes / back_ms * 1e3,
        plain_out,
        plain_back,
    )


def _payloads(pages: StreamedPages, num_pages: int) -> list[bytes]:
    """Of the first pages, copied as fast as there are slots."""
    leaving: deque[tuple[CopyOut, int]] = deque()
    found: list[bytes] = []
    begun = 0
    while len(found) < num_pages:
        count = min(pages.num_out, num_pages - begun)
        if count:
            leaving.append((pages.copy_out(range(begun, begun + count)), count))
            begun += count
            continue
        copy, count = leaving.popleft()
        copy.wait()
        found += [copy.take() for _ in range(count)]
    return found


def _out_s(pages: StreamedPages, num_pages: int) -> float:
    """Seconds in which pages come to pinned memory, batch after batch, nothing taken meanwhile."""
    seconds, begun = 0.0, 0
    while begun < num_pages:
        count = min(pages.num_out, num_pages - begun)
        started_ns = time.perf_counter_ns()
        copy = pages.copy_out(range(begun, begun + count))
        copy.wait()
        seconds += (time.perf_counter_ns() - started_ns) / 1e9
        for _ in range(count):
            copy.take()
        begun += count
    return seconds


def _plain_gbs(device: torch.device, num_bytes: int, *, pinned: bool) -> tuple[float, float]:
    """GB/s of one copy to main memory, and of one back."""
    here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    out_ms = median_ms(lambda: here.copy_(there, non_blocking=True), device, 5)
    back_ms = median_ms(lambda: there.copy_(here, non_blocking=True), device, 5)
    return num_bytes / out_ms / 1e6, num_bytes / back_ms / 1e6


def _put(pages: StreamedPages, payloads: list[bytes]) -> None:
    """Payloads back to the first pages, as fast as there are slots."""
    waiting = list(enumerate(payloads))
    while waiting:
        count = min(pages.num_in, len(waiting))
        pages.copy_in(waiting[:count])
        del waiting[:count]
        pages.poll()
    pages.land(range(len(payloads)))
