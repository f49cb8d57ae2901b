"""Pages of several tensors moved together: page to page, out into a staging buffer, and back.

    # a page's bytes       tensor 0, its runs in order │ tensor 1, its runs │ …     `page_bytes`
    # a run                what one page has in one piece of memory: a layer's keys, say

Knows: tensors of which one dimension counts pages, bytes. Does not know: what a page holds, who
owns it, devices.
Invariant: what `gather` wrote, given to `scatter`, makes any page hold the same bytes; the bytes of
a page are those of `pages.gather_pages`, tensor by tensor. Cost: none beyond the copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor


class RowCopy(Protocol):
    """The first `num_rows` rows of page `src` go onto page `dst`."""

    @property
    def src(self) -> int:
        """Where from."""
        ...

    @property
    def dst(self) -> int:
        """Where to."""
        ...

    @property
    def num_rows(self) -> int:
        """How many, from the first on."""
        ...


@dataclass(frozen=True, slots=True)
class PageRuns:
    """One tensor's pages as bytes, uint8 `[num_runs, num_pages, run_bytes]`, on its own memory.

    Rows of a page are `row_bytes` of each run; all of it where a page does not lie row by row.
    """

    runs: Tensor
    row_bytes: int

    @classmethod
    def of(cls, pages: Tensor, *, page_dim: int, by_rows: bool) -> PageRuns:
        """A tensor whose pages lie behind the dimensions in front of theirs, or outermost.

        `by_rows`: the dimension behind that of pages counts rows, and they lie in this order.
        """
        num_pages, page_size = pages.shape[page_dim : page_dim + 2]
        if pages.is_contiguous():
            runs = pages.view(torch.uint8).view(-1, num_pages, _bytes_in(pages, page_dim))
        else:
            outermost = pages.movedim(page_dim, 0)
            assert outermost.is_contiguous(), "pages lie neither in runs nor outermost"
            runs = outermost.view(torch.uint8).view(1, num_pages, -1)
        run_bytes = runs.shape[2]
        return cls(runs, run_bytes // page_size if by_rows else run_bytes)

    @property
    def num_runs(self) -> int:
        """Pieces of a page."""
        return self.runs.shape[0]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in this tensor."""
        return self.runs.shape[0] * self.runs.shape[2]


class PageMoves(Protocol):
    """Moves pages of the tensors that it was made for, in the order of the current stream."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all tensors."""
        ...

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        """Do the copies as if one after the other; other rows of a destination stay.

        Where a page does not lie row by row the whole of it is copied.
        """
        ...

    def gather(self, page_ids: Sequence[int], out: Tensor) -> None:
        """out[i] = page `page_ids[i]`; uint8 `[at least len(page_ids), page_bytes]`, contiguous."""
        ...

    def scatter(self, page_ids: Sequence[int], source: Tensor) -> None:
        """Page `page_ids[i]` = source[i], as `gather` wrote it; ids must differ."""
        ...


MakePageMoves: TypeAlias = "Callable[[Sequence[PageRuns]], PageMoves]"


class TorchPageMoves:
    """`PageMoves` in PyTorch's own operations, on any device: the oracle."""

    def __init__(self, tensors: Sequence[PageRuns]) -> None:
        self._tensors = tuple(tensors)
        self._ends = tuple(accumulate(one.page_bytes for one in self._tensors))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all tensors."""
        return self._ends[-1]

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        """One copy for each tensor of each."""
        for copy in copies:
            for one in self._tensors:
                size = min(copy.num_rows * one.row_bytes, one.runs.shape[2])
                one.runs[:, copy.dst, :size] = one.runs[:, copy.src, :size]

    def gather(self, page_ids: Sequence[int], out: Tensor) -> None:
        """One gather for each tensor."""
        ids = _on(page_ids, out.device)
        for one, part in self._parts(out[: len(page_ids)]):
            part.copy_(one.runs.index_select(1, ids).movedim(0, 1))

    def scatter(self, page_ids: Sequence[int], source: Tensor) -> None:
        """One scatter for each tensor."""
        ids = _on(page_ids, source.device)
        for one, part in self._parts(source[: len(page_ids)]):
            one.runs.index_copy_(1, ids, part.movedim(0, 1))

    def _parts(self, pages: Tensor) -> Iterable[tuple[PageRuns, Tensor]]:
        """Each tensor, and its part `[pages, num_runs, run_bytes]` of whole pages."""
        for one, end in zip(self._tensors, self._ends, strict=True):
            part = pages[:, end - one.page_bytes : end]
            yield one, part.view(len(pages), one.num_runs, one.runs.shape[2])


def independent(copies: Iterable[RowCopy]) -> list[list[RowCopy]]:
    """The copies in batches, one after the other; those of a batch may be done in any order.

    A batch ends in front of a copy that reads or writes what one of it writes, or writes what one
    of it reads: a page may be given up and taken again between two copies.
    """
    batches: list[list[RowCopy]] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        if not batches or copy.src in written or copy.dst in written or copy.dst in read:
            batches.append([])
            read, written = set(), set()
        batches[-1].append(copy)
        read.add(copy.src)
        written.add(copy.dst)
    return batches


def _on(page_ids: Sequence[int], device: torch.device) -> Tensor:
    """The ids on a device, which is not waited for: a driver takes so small a list at once."""
    return torch.tensor(page_ids, dtype=torch.int64).to(device, non_blocking=True)


def _bytes_in(pages: Tensor, page_dim: int) -> int:
    """Bytes of a page behind one index of the dimensions in front of it."""
    return pages[(0,) * page_dim].nbytes // pages.shape[page_dim]
