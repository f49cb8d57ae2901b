"""Copying pages inside a KV tensor, out of it and back into it.

Knows: tensors of which one dimension counts pages and the next the rows inside a page.
Does not know: what a page holds, who owns it, or which model it belongs to.
Invariant: only the destination pages (or rows) change.
Cost: one gather and one scatter for any number of pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def copy_pages(
    kv: Tensor, src_ids: Sequence[int], dst_ids: Sequence[int], *, page_dim: int
) -> None:
    """Copy page `src_ids[i]` onto page `dst_ids[i]` for all i at once.

    All sources are read before any destination is written. Destinations must differ.
    """
    assert len(src_ids) == len(dst_ids), f"{len(src_ids)} sources, {len(dst_ids)} destinations"
    kv = movable(kv)
    pages = kv.index_select(page_dim, _ids(src_ids, kv))
    kv.index_copy_(page_dim, _ids(dst_ids, kv), pages)


def copy_page_rows(kv: Tensor, src_id: int, dst_id: int, num_rows: int, *, page_dim: int) -> None:
    """Copy the first `num_rows` rows of page `src_id` onto page `dst_id`; later rows stay."""
    # once the page dimension is selected away, the rows have its index
    src = kv.select(page_dim, src_id).narrow(page_dim, 0, num_rows)
    kv.select(page_dim, dst_id).narrow(page_dim, 0, num_rows).copy_(src)


def gather_pages(kv: Tensor, page_ids: Sequence[int], *, page_dim: int) -> Tensor:
    """A contiguous copy `[len(page_ids), …]`, pages first, so each is one run of bytes.

    The other dimensions follow in the order that they have in `kv`.
    """
    gathered = movable(kv).movedim(page_dim, 0).index_select(0, _ids(page_ids, kv))
    return gathered.view(kv.dtype)


def scatter_pages(kv: Tensor, page_ids: Sequence[int], pages: Tensor, *, page_dim: int) -> None:
    """Write what `gather_pages` returned (from any device) onto `page_ids`, which must differ."""
    assert pages.shape[0] == len(page_ids), f"{pages.shape[0]} pages for {len(page_ids)} ids"
    target, source = movable(kv), movable(pages.to(kv.device))
    target.movedim(page_dim, 0).index_copy_(0, _ids(page_ids, kv), source)


def movable(tensor: Tensor) -> Tensor:
    """The same memory in a dtype that every indexing op takes: 8-bit floats as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor


def _ids(page_ids: Sequence[int], kv: Tensor) -> Tensor:
    return torch.tensor(page_ids, dtype=torch.int64, device=kv.device)
