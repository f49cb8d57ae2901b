"""Pages of several tensors moved by one kernel: page to page, into a staging buffer, and back.

Knows: runs of bytes, a table of where they lie. Does not know: what a page holds, streams.
Invariant: one program has one piece of one run of one page; nothing but the destination is written.
Cost: one launch, and one small list copied to the device, whatever the number of pages, layers and
tensors: data, scales and a draft's pages go together.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from chatrt_kernels.page_moves import independent
from chatrt_kernels.triton.launch import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt_kernels.page_moves import PageRuns, RowCopy

# What a kernel does with a page.
COPY, GATHER, SCATTER = 0, 1, 2
_BLOCK = 1024  # words of a program
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class TritonPageMoves:
    """Implements `chatrt_kernels.page_moves.PageMoves`; compiled when it is made."""

    def __init__(self, tensors: Sequence[PageRuns]) -> None:
        self._tensors = tuple(tensors)  # the table has their addresses, which must stay theirs
        self._device = self._tensors[0].runs.device
        self.page_bytes = sum(one.page_bytes for one in self._tensors)
        self._word = _word_bytes(self._tensors)
        self._most_words = max(one.runs.shape[2] for one in self._tensors) // self._word
        self._table = _table(self._tensors, self._word).to(self._device)
        self._none = torch.empty(1, dtype=_WORDS[self._word], device=self._device)
        self._warm_up()

    def copy_rows(self, copies: Sequence[RowCopy]) -> None:
        """One launch for all copies that do not depend on each other."""
        for batch in independent(copies):
            self._move([(one.src, one.dst, one.num_rows) for one in batch], self._none, COPY)

    def gather(self, page_ids: Sequence[int], out: Tensor) -> None:
        """One launch."""
        self._move([(page_id, 0, 0) for page_id in page_ids], self._staging(out), GATHER)

    def scatter(self, page_ids: Sequence[int], source: Tensor) -> None:
        """One launch."""
        self._move([(page_id, 0, 0) for page_id in page_ids], self._staging(source), SCATTER)

    def _staging(self, pages: Tensor) -> Tensor:
        assert pages.is_contiguous(), "pages of a staging buffer lie one behind the other"
        assert pages.shape[1] == self.page_bytes, f"{pages.shape[1]} bytes for {self.page_bytes}"
        return pages.view(_WORDS[self._word])

    def _move(self, moves: Sequence[tuple[int, int, int]], staging: Tensor, mode: int) -> None:
        if not moves:
            return
        # not waited for: the driver takes so small a list at once
        listed = torch.tensor(moves, dtype=torch.int64).to(self._device, non_blocking=True)
        num_blocks = triton.cdiv(self._most_words, _BLOCK)
        _move_pages[(len(moves), self._table.shape[0], num_blocks)](
            *(self._table, listed, staging),
            self.page_bytes // self._word,
            MODE=mode,
            BLOCK=_BLOCK,
            num_warps=4,
            **OPTIONS,
        )

    def _warm_up(self) -> None:
        """Compile all that there is: no row is copied, and page 0 goes out and back as it is."""
        self._move([(0, 0, 0)], self._none, COPY)
        page = torch.empty(1, self.page_bytes, dtype=torch.uint8, device=self._device)
        self.gather([0], page)
        self.scatter([0], page)


def _word_bytes(tensors: Sequence[PageRuns]) -> int:
    """The largest word in which runs, rows and what is in front of them are whole."""
    sizes = [size for one in tensors for size in (one.runs.shape[2], one.row_bytes)]
    addresses = [one.runs.data_ptr() for one in tensors]
    return math.gcd(max(_WORDS), *sizes, *addresses)


def _table(tensors: Sequence[PageRuns], word: int) -> Tensor:
    """int64 `[runs of all tensors, 4]`: address, words of a run, of a row, in front of it."""
    rows = []
    ends = accumulate(one.page_bytes for one in tensors)
    for one, end in zip(tensors, ends, strict=True):
        run_bytes, first = one.runs.shape[2], end - one.page_bytes
        for index, run in enumerate(one.runs):
            front = first + index * run_bytes
            rows.append([run.data_ptr(), run_bytes // word, one.row_bytes // word, front // word])
    return torch.tensor(rows, dtype=torch.int64)


@triton.jit
def _move_pages(
    table_ptr,
    moves_ptr,
    staging_ptr,
    page_words,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_move = tl.program_id(0).to(tl.int64)
    p_run = table_ptr + tl.program_id(1).to(tl.int64) * 4
    p_move = moves_ptr + i_move * 3
    # the table has addresses, which become pointers to words as the staging buffer's are
    run_ptr = tl.load(p_run).to(staging_ptr.dtype)
    b_words = tl.load(p_run + 1)
    p_page = run_ptr + tl.load(p_move) * b_words
    p_staged = staging_ptr + i_move * page_words + tl.load(p_run + 3)
    b_end = b_words
    if MODE == 0:
        b_end = tl.minimum(tl.load(p_move + 2) * tl.load(p_run + 2), b_words)
        p_staged = run_ptr + tl.load(p_move + 1) * b_words
    o = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = o < b_end
    if MODE == 2:
        tl.store(p_page + o, tl.load(p_staged + o, mask=m), mask=m)
    else:
        tl.store(p_staged + o, tl.load(p_page + o, mask=m), mask=m)
