"""Pages copied beside a computation: the right bytes however late a copy is, and nobody waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatrt.kvcache import KVCache
from chatrt.page_bytes import PageBytes
from chatrt.session import PageCopy
from chatrt.streamed_pages import SLOT_BYTES, StreamedPages
from chatrt.testing.streams import LateStream, late_streams
from chatrt_kernels.ops import KVLayout
from chatrt_kernels.page_moves import TorchPageMoves
from chatrt_kernels.streams import Streams
from chatrt_kernels.triton.page_moves import TritonPageMoves
from tests.chatrt_kernels.triton_support import KV_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatrt.page_bytes import CopyOut
    from chatrt_kernels.page_moves import MakePageMoves

NUM_PAGES = 8
MOVES: list[MakePageMoves] = [TorchPageMoves, TritonPageMoves]


def cache(
    dtype: torch.dtype = torch.float32,
    layout: KVLayout = KVLayout.ROWS,
    *,
    num_layers: int = 1,
    seed: int = 0,
) -> KVCache:
    """Pages with arbitrary bytes, none of them alike."""
    kv = KVCache.allocate(
        num_layers=num_layers,
        num_pages=NUM_PAGES,
        page_size=4,
        kv_heads=1,
        head_dim=32,
        dtype=dtype,
        device="cpu",
        layout=layout,
    )
    generator = torch.Generator().manual_seed(seed)
    for one in kv.runs():
        one.runs.random_(0, 256, generator=generator)
    return kv


def fill(kv: KVCache, page_id: int, value: int) -> None:
    for one in kv.runs():
        one.runs[:, page_id] = value


def bytes_in(runs: torch.Tensor) -> bytes:
    return runs.contiguous().numpy().tobytes()


def payloads(copy: CopyOut, count: int) -> list[bytes]:
    return [copy.take() for _ in range(count)]


@pytest.mark.parametrize("make", MOVES)
@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_what_is_copied_beside_a_computation_is_what_is_copied_at_once_and_the_other_way_round(
    make: MakePageMoves, layout: KVLayout, dtype: torch.dtype
) -> None:
    target, head = cache(dtype, layout, num_layers=2), cache(torch.int8, layout, seed=1)
    streams, beside = late_streams()
    streamed, plain = StreamedPages([target, head], make, streams), PageBytes([target, head])
    assert streamed.num_bytes == plain.num_bytes
    expected = [plain.read(page_id) for page_id in (5, 0, 7)]

    copy = streamed.copy_out([5, 0, 7])
    beside.finish()
    assert payloads(copy, 3) == expected

    for page_id in range(NUM_PAGES):
        fill(target, page_id, 0)
        fill(head, page_id, 0)
    streamed.copy_in(list(zip((1, 2, 6), expected, strict=True)))
    assert [plain.read(page_id) for page_id in (1, 2, 6)] == expected
    assert not any(plain.read(5))

    plain.copy_in([(3, expected[0])])
    again = streamed.copy_out([3])
    beside.finish()
    assert again.take() == expected[0]


def test_a_page_that_is_written_anew_before_its_copy_is_done_is_copied_as_it_was() -> None:
    kv = cache()
    streams, beside = late_streams()
    pages = StreamedPages([kv], TorchPageMoves, streams)
    before = PageBytes([kv]).read(3)
    copy = pages.copy_out([3])
    fill(kv, 3, 7)
    assert not copy.is_done()
    assert beside.num_stalls == beside.num_host_waits == 0
    beside.finish()
    assert copy.take() == before


def test_slots_are_not_used_again_before_their_payloads_are_taken() -> None:
    kv = cache()
    streams, beside = late_streams()
    pages = StreamedPages([kv], TorchPageMoves, streams, slot_pages=2)
    plain = PageBytes([kv])
    expected = [plain.read(page_id) for page_id in range(4)]
    copies = [pages.copy_out([0, 1]), pages.copy_out([2, 3])]
    assert pages.num_out == 0
    beside.finish()
    found = [copies[0].take()]
    assert pages.num_out == 0
    found.append(copies[0].take())
    assert pages.num_out == 2
    third = pages.copy_out([5, 6])
    beside.finish()
    assert found + payloads(copies[1], 2) == expected
    assert payloads(third, 2) == [plain.read(5), plain.read(6)]


def test_pages_land_before_their_first_use_and_only_that_waits_for_their_copy() -> None:
    kv = cache()
    streams, beside = late_streams()
    pages = StreamedPages([kv], TorchPageMoves, streams)
    plain = PageBytes([kv])
    payload = plain.read(0)
    pages.copy_in([(6, payload)])
    pages.land([0, 1, 2, 3, 4, 5, 7])
    kv.copy_rows([PageCopy(src=1, dst=2, num_rows=4)])
    assert beside.num_stalls == 0
    assert len(beside) > 0  # on its way still, and nobody waited

    kv.copy_rows([PageCopy(src=6, dst=3, num_rows=4)])
    assert beside.num_stalls == 1
    assert beside.num_host_waits == 0
    assert plain.read(3) == plain.read(6) == payload


def test_copies_that_are_done_land_between_two_steps_without_a_wait() -> None:
    kv = cache()
    streams, beside = late_streams()
    pages = StreamedPages([kv], TorchPageMoves, streams, slot_pages=1)
    payload = PageBytes([kv]).read(0)
    for page_id in (4, 5, 6, 7):
        assert pages.num_in == 1
        pages.copy_in([(page_id, payload)])
    pages.poll()
    assert pages.num_in == 0
    assert pages.is_busy
    beside.finish()
    pages.poll()
    assert pages.num_in == 1
    assert not pages.is_busy
    assert beside.num_stalls == beside.num_host_waits == 0
    assert all(bytes_in(one.runs[:, 7]) == bytes_in(one.runs[:, 0]) for one in kv.runs())


def test_a_page_that_was_given_up_while_its_bytes_were_coming_belongs_to_whoever_writes_it() -> (
    None
):
    kv = cache()
    streams, beside = late_streams()
    pages = StreamedPages([kv], TorchPageMoves, streams)
    pages.copy_in([(6, PageBytes([kv]).read(0))])
    pages.land([6])  # another session's step, which writes the page next
    fill(kv, 6, 9)
    beside.finish()
    pages.poll()
    assert all((one.runs[:, 6] == 9).all() for one in kv.runs())


def test_a_slot_is_filled_again_only_behind_the_scatter_that_reads_it() -> None:
    race = Race()
    for page_id in (1, 2, 3):  # one slot three times: what is free last is taken first
        race.copy_in([page_id])
        race.finish_copies()
        while race.compute.advance():
            pass
        race.finish_copies()
        race.copier.land([page_id])  # its scatter is not done when the slot is taken again
        race.copier.poll()
    race.finish()


def test_more_pages_than_are_taken_are_our_bug() -> None:
    pages = StreamedPages([cache()], TorchPageMoves, late_streams()[0], slot_pages=1)
    with pytest.raises(AssertionError, match="2 pages, 1 are taken"):
        pages.copy_in([(page_id, bytes(pages.num_bytes)) for page_id in range(2)])


def test_a_batch_has_no_more_bytes_than_a_slot_and_at_least_one_page() -> None:
    small = StreamedPages([cache()], TorchPageMoves, late_streams()[0])
    assert small.num_out == 16
    large = KVCache.allocate(
        num_layers=1,
        num_pages=2,
        page_size=SLOT_BYTES // 512,
        kv_heads=1,
        head_dim=128,
        dtype=torch.float32,
        device="cpu",
    )
    assert StreamedPages([large], TorchPageMoves, late_streams()[0]).num_out == 1


@dataclass
class Race:
    """All streams late: whatever order a device may choose, and what must come out of it.

    `pages` is what each page holds once all that was asked for so far is done, in this order.
    """

    kv: KVCache = field(default_factory=cache)
    compute: LateStream = field(default_factory=LateStream)
    out: LateStream = field(default_factory=LateStream)
    back: LateStream = field(default_factory=LateStream)
    pages: list[int] = field(default_factory=lambda: [0] * NUM_PAGES)
    leaving: list[tuple[CopyOut, list[int]]] = field(default_factory=list)
    reads: list[tuple[int, list[int]]] = field(default_factory=list)
    num_values: int = 0

    def __post_init__(self) -> None:
        streams = Streams(self.compute, self.out, self.back, pinned=False)
        self.copier = StreamedPages([self.kv], TorchPageMoves, streams, slot_pages=2)
        for page_id in range(NUM_PAGES):
            fill(self.kv, page_id, 0)

    def value(self) -> int:
        self.num_values = (self.num_values + 1) % 256
        return self.num_values

    def copy_out(self, page_ids: Sequence[int]) -> None:
        if self.copier.num_out >= len(page_ids):
            expected = [self.pages[page_id] for page_id in page_ids]
            self.leaving.append((self.copier.copy_out(page_ids), expected))

    def copy_in(self, page_ids: Sequence[int]) -> None:
        self.copier.poll()
        if self.copier.num_in >= len(page_ids):
            values = [self.value() for _ in page_ids]
            payload = [bytes([one]) * self.copier.num_bytes for one in values]
            self.copier.copy_in(list(zip(page_ids, payload, strict=True)))
            for page_id, one in zip(page_ids, values, strict=True):
                self.pages[page_id] = one

    def step(self, page_ids: Sequence[int]) -> None:
        """Read the pages, and write the last of them."""
        self.copier.land(page_ids)
        last, value = page_ids[-1], self.value()
        for page_id in page_ids:
            found: list[int] = []
            self.reads.append((self.pages[page_id], found))
            self.compute.launch(partial(self._read, page_id, found))
        self.compute.launch(partial(fill, self.kv, last, value))
        self.pages[last] = value

    def take(self) -> None:
        if self.leaving and self.leaving[0][0].is_done():
            copy, expected = self.leaving.pop(0)
            found = [set(copy.take()) for _ in expected]
            assert found == [{one} for one in expected]

    def finish_copies(self) -> None:
        """As far as copies can get while what computes stands still."""
        while self.out.advance() or self.back.advance():
            pass

    def finish(self) -> None:
        """Everything is done, one way or another, and was right."""
        self.copier.land(range(NUM_PAGES))
        while any(stream.advance() for stream in (self.compute, self.out, self.back)):
            pass
        assert not any(map(len, (self.compute, self.out, self.back)))
        while self.leaving:
            self.take()
        for expected, found in self.reads:
            assert found == [expected]
        for page_id, value in enumerate(self.pages):
            assert all((one.runs[:, page_id] == value).all() for one in self.kv.runs())

    def _read(self, page_id: int, found: list[int]) -> None:
        found.extend({value for one in self.kv.runs() for value in bytes_in(one.runs[:, page_id])})


ACTIONS: dict[str, Callable[[Race, Sequence[int]], object]] = {
    "copy out": Race.copy_out,
    "copy in": Race.copy_in,
    "step": Race.step,
    "take": lambda race, _: race.take(),
    "poll": lambda race, _: race.copier.poll(),
    "compute": lambda race, _: race.compute.advance(),
    "out": lambda race, _: race.out.advance(),
    "back": lambda race, _: race.back.advance(),
    "all copies": lambda race, _: race.finish_copies(),
}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(ACTIONS)),
            st.lists(st.integers(0, NUM_PAGES - 1), min_size=1, max_size=2, unique=True),
        ),
        min_size=10,
        max_size=80,
    )
)
@settings(max_examples=400, deadline=None)
def test_every_byte_is_right_in_whatever_order_the_streams_get_on(
    actions: list[tuple[str, list[int]]],
) -> None:
    race = Race()
    for name, page_ids in actions:
        ACTIONS[name](race, page_ids)
    race.finish()
