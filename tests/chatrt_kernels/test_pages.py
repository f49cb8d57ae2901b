from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chatrt_kernels import pages

PAGE_DIMS = [0, 1, 2]


def pool(page_dim: int, num_pages: int = 6) -> Tensor:
    """Pages of 4 rows with 3 features, other dimensions in front; every element differs."""
    shape = [*[2, 3][:page_dim], num_pages, 4, 3]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def page(kv: Tensor, page_id: int, page_dim: int) -> Tensor:
    return kv.select(page_dim, page_id)


@pytest.mark.parametrize("page_dim", PAGE_DIMS)
def test_copied_pages_equal_their_sources_and_no_other_page_changes(page_dim: int) -> None:
    kv, before = pool(page_dim), pool(page_dim)

    pages.copy_pages(kv, [1, 5], [4, 0], page_dim=page_dim)

    for page_id, expected in enumerate([5, 1, 2, 3, 1, 5]):
        assert torch.equal(page(kv, page_id, page_dim), page(before, expected, page_dim))


def test_pages_can_trade_places_since_all_are_read_first() -> None:
    kv, before = pool(0), pool(0)

    pages.copy_pages(kv, [1, 2, 3], [2, 3, 1], page_dim=0)

    assert torch.equal(kv[[2, 3, 1]], before[[1, 2, 3]])


@pytest.mark.parametrize("page_dim", PAGE_DIMS)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4])
def test_only_the_leading_rows_of_a_page_are_copied(page_dim: int, num_rows: int) -> None:
    kv, before = pool(page_dim), pool(page_dim)

    pages.copy_page_rows(kv, 2, 4, num_rows, page_dim=page_dim)

    copied, source, old = (page(t, i, page_dim) for t, i in ((kv, 4), (before, 2), (before, 4)))
    assert torch.equal(copied[..., :num_rows, :], source[..., :num_rows, :])
    assert torch.equal(copied[..., num_rows:, :], old[..., num_rows:, :])
    assert torch.equal(page(kv, 2, page_dim), source)


@pytest.mark.parametrize("page_dim", PAGE_DIMS)
def test_gathered_pages_are_contiguous_copies_in_the_order_asked_for(page_dim: int) -> None:
    kv, before = pool(page_dim), pool(page_dim)

    gathered = pages.gather_pages(kv, [5, 0, 5], page_dim=page_dim)
    kv.zero_()

    assert gathered.is_contiguous()
    for got, page_id in zip(gathered, [5, 0, 5], strict=True):
        assert torch.equal(got, page(before, page_id, page_dim))


@pytest.mark.parametrize("page_dim", PAGE_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_scatter_puts_back_what_gather_took(page_dim: int, dtype: torch.dtype) -> None:
    kv, before = pool(page_dim).to(dtype), pool(page_dim).to(dtype)
    gathered = pages.gather_pages(kv, [1, 3, 4], page_dim=page_dim)
    kv.zero_()

    pages.scatter_pages(kv, [4, 1, 0], gathered, page_dim=page_dim)

    for page_id, source in ((4, 1), (1, 3), (0, 4)):
        assert torch.equal(page(kv, page_id, page_dim), page(before, source, page_dim))
    assert not page(kv, 2, page_dim).any()


@pytest.mark.parametrize("page_dim", PAGE_DIMS)
def test_no_pages_are_copied_gathered_or_scattered_without_ids(page_dim: int) -> None:
    kv, before = pool(page_dim), pool(page_dim)

    pages.copy_pages(kv, [], [], page_dim=page_dim)
    gathered = pages.gather_pages(kv, [], page_dim=page_dim)
    pages.scatter_pages(kv, [], gathered, page_dim=page_dim)

    assert gathered.shape[0] == 0
    assert torch.equal(kv, before)


def test_lists_of_unequal_length_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="2 sources, 1 destinations"):
        pages.copy_pages(pool(0), [1, 2], [3], page_dim=0)
    with pytest.raises(AssertionError, match="6 pages for 1 ids"):
        pages.scatter_pages(pool(0), [1], pool(0), page_dim=0)
