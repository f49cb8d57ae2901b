"""Pages moved by one kernel, against plain indexing: every format, both layouts, odd numbers."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatrt.kvcache import KVCache
from chatrt_kernels import pages
from chatrt_kernels.ops import KVLayout
from chatrt_kernels.page_moves import PageMoves, PageRuns, TorchPageMoves, independent
from chatrt_kernels.triton.page_moves import TritonPageMoves
from tests.chatrt_kernels.triton_support import KV_DTYPES

NUM_PAGES = 70
MOVES = [TorchPageMoves, TritonPageMoves]
_PAGE_DIM = 2


class Copy(NamedTuple):
    """Rows from page to page."""

    src: int
    dst: int
    num_rows: int


def cache(
    dtype: torch.dtype,
    layout: KVLayout = KVLayout.ROWS,
    *,
    num_pages: int = NUM_PAGES,
    kv_heads: int = 2,
) -> KVCache:
    """Two layers of pages with arbitrary bytes, none of them alike."""
    kv = KVCache.allocate(
        num_layers=2,
        num_pages=num_pages,
        page_size=4,
        kv_heads=kv_heads,
        head_dim=32,
        dtype=dtype,
        device="cpu",
        layout=layout,
    )
    generator = torch.Generator().manual_seed(num_pages + kv_heads)
    for one in runs_of(kv):
        one.runs.random_(0, 256, generator=generator)
    return kv


def tensors_of(*caches: KVCache) -> list[torch.Tensor]:
    found = [tensor for kv in caches for tensor in (kv.data, kv.scales)]
    return [tensor for tensor in found if tensor is not None]


def runs_of(*caches: KVCache) -> list[PageRuns]:
    return [
        PageRuns.of(tensor, page_dim=_PAGE_DIM, by_rows=kv.layout is KVLayout.ROWS)
        for kv in caches
        for tensor in tensors_of(kv)
    ]


def snapshot(*caches: KVCache) -> list[torch.Tensor]:
    return [one.runs.clone() for one in runs_of(*caches)]


def bytes_of(kv: KVCache, page_id: int) -> bytes:
    """A page as `pages.gather_pages` gives it, tensor by tensor."""
    gathered = [pages.gather_pages(t, [page_id], page_dim=_PAGE_DIM) for t in tensors_of(kv)]
    return b"".join(one.view(torch.uint8).numpy().tobytes() for one in gathered)


@pytest.mark.parametrize("make", MOVES)
@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("page_ids", [[5], list(range(64, 1, -1))], ids=["1", "63"])
def test_gathered_pages_are_those_of_plain_indexing_and_go_back_as_they_were(
    make: type[TorchPageMoves | TritonPageMoves],
    layout: KVLayout,
    dtype: torch.dtype,
    page_ids: list[int],
) -> None:
    target, draft = cache(dtype, layout), cache(torch.int8, layout, kv_heads=1)
    moves = make(runs_of(target, draft))
    staging = torch.full((64, moves.page_bytes), 0xEE, dtype=torch.uint8)

    moves.gather(page_ids, staging)

    for page_id, row in zip(page_ids, staging, strict=False):
        assert row.numpy().tobytes() == bytes_of(target, page_id) + bytes_of(draft, page_id)
    assert (staging[len(page_ids) :] == 0xEE).all()

    other_target, other_draft = (
        cache(dtype, layout, num_pages=80),
        cache(torch.int8, layout, num_pages=80, kv_heads=1),
    )
    before = snapshot(other_target, other_draft)
    to_ids = [page_id + 10 for page_id in page_ids]
    make(runs_of(other_target, other_draft)).scatter(to_ids, staging)
    untouched = [page_id for page_id in range(80) if page_id not in to_ids]
    for one, old in zip(runs_of(other_target, other_draft), before, strict=True):
        assert torch.equal(one.runs[:, untouched], old[:, untouched])
    for page_id, to_id in zip(page_ids, to_ids, strict=True):
        assert bytes_of(other_target, to_id) == bytes_of(target, page_id)
        assert bytes_of(other_draft, to_id) == bytes_of(draft, page_id)


@pytest.mark.parametrize("make", MOVES)
@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("num_copies", [1, 33])
def test_leading_rows_are_copied_in_all_layers_and_scales_and_nothing_else_changes(
    make: type[TorchPageMoves | TritonPageMoves],
    layout: KVLayout,
    dtype: torch.dtype,
    num_copies: int,
) -> None:
    kv = cache(dtype, layout)
    before = snapshot(kv)
    copies = [Copy(i, NUM_PAGES - 1 - i, 1 + i % 4) for i in range(num_copies)]

    make(runs_of(kv)).copy_rows(copies)

    for one, expected in zip(runs_of(kv), before, strict=True):
        for src, dst, num_rows in copies:
            size = num_rows * one.row_bytes if layout is KVLayout.ROWS else one.runs.shape[2]
            expected[:, dst, :size] = expected[:, src, :size]
        assert torch.equal(one.runs, expected)


def test_runs_and_rows_need_not_be_whole_words() -> None:
    tensor = torch.arange(2 * 9 * 3 * 5, dtype=torch.uint8).view(2, 9, 3, 5)
    expected = tensor.clone()
    expected[:, 7, :2] = expected[:, 1, :2]
    moves = TritonPageMoves([PageRuns.of(tensor, page_dim=1, by_rows=True)])
    moves.copy_rows([Copy(1, 7, 2)])
    assert torch.equal(tensor, expected)
    staging = torch.zeros(2, moves.page_bytes, dtype=torch.uint8)
    moves.gather([8, 0], staging)
    assert torch.equal(staging[0], tensor[:, 8].reshape(-1))
    assert torch.equal(staging[1], tensor[:, 0].reshape(-1))


def test_no_page_is_moved_where_none_is_named() -> None:
    kv = cache(torch.float32)
    before = snapshot(kv)
    moves: PageMoves = TritonPageMoves(runs_of(kv))
    staging = torch.zeros(1, moves.page_bytes, dtype=torch.uint8)
    moves.copy_rows([])
    moves.gather([], staging)
    moves.scatter([], staging)
    assert not staging.any()
    assert all(map(torch.equal, snapshot(kv), before))


@given(
    st.lists(st.builds(Copy, st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)), max_size=12),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_copies_of_a_batch_may_be_done_in_any_order(copies: list[Copy], random: object) -> None:
    in_order = torch.arange(6 * 3).view(6, 3)
    shuffled = in_order.clone()
    for copy in copies:
        in_order[copy.dst, : copy.num_rows] = in_order[copy.src, : copy.num_rows].clone()
    for batch in independent(copies):
        random.shuffle(batch)  # type: ignore[attr-defined]
        for one in batch:
            shuffled[one.dst, : one.num_rows] = shuffled[one.src, : one.num_rows].clone()
    assert torch.equal(in_order, shuffled)


def test_a_staging_buffer_of_another_width_is_our_bug() -> None:
    moves = TritonPageMoves(runs_of(cache(torch.float32)))
    with pytest.raises(AssertionError, match="8 bytes for "):
        moves.gather([0], torch.zeros(1, 8, dtype=torch.uint8))
