"""Weight matrices in the tiles that the kernels read, and the memory that they lie in.

Knows: which number stands for a format, how much memory a matrix takes.
Does not know: how tiles are laid out; `source/weights.h` says that.
Invariant: repacking moves the file's own values; nothing is rounded. Whatever order rows lie in,
they keep their numbers.
Cost: one pass over the file's bytes; the copy is as large as they are, K-quants up to 3 % larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chatrt_kernels.cpu.structs import WeightStruct, address
from chatrt_kernels.formats import QuantFormat, QuantizedTensor

if TYPE_CHECKING:
    from chatrt_kernels.cpu.binding import ThreadPool

_CODES = {
    QuantFormat.F32: 0,
    QuantFormat.F16: 1,
    QuantFormat.BF16: 2,
    QuantFormat.Q8_0: 3,
    QuantFormat.Q4_0: 4,
    QuantFormat.Q4_1: 5,
    QuantFormat.Q4_K: 6,
    QuantFormat.Q5_K: 7,
    QuantFormat.Q6_K: 8,
}
_PLAIN = {
    torch.float32: QuantFormat.F32,
    torch.float16: QuantFormat.F16,
    torch.bfloat16: QuantFormat.BF16,
}
_BLOCK_BYTES = 64 << 20
_LARGE_PAGE_BYTES = 2 << 20
_LINE_BYTES = 64
STRIP_ROWS = 16  # kStripRows in weights.h


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Rows that lie in another order than they are numbered in; both int32 `[out_features]`.

    `numbers` has the number of the row at each place, `ranks` the place of the row of each number.
    """

    numbers: Tensor
    ranks: Tensor

    @classmethod
    def starting_with(cls, first_rows: Tensor, num_rows: int) -> RowOrder:
        """The rows int64 `[n]`, then the others, both ascending: results land side by side.

        Raises:
            ValueError: One comes twice, or is not among the `num_rows`.
        """
        if len(first_rows) and not (0 <= int(first_rows.min()) <= int(first_rows.max()) < num_rows):
            found = f"{int(first_rows.min())} to {int(first_rows.max())}"
            raise ValueError(f"first rows from {found}, the matrix has {num_rows}")
        is_first = torch.zeros(num_rows, dtype=torch.bool)
        is_first[first_rows] = True
        ascending, others = is_first.nonzero().flatten(), is_first.logical_not().nonzero().flatten()
        if len(ascending) != len(first_rows):
            raise ValueError(f"{len(first_rows)} first rows, only {len(ascending)} different ones")
        return cls.of(torch.cat((ascending, others)))

    @classmethod
    def of(cls, numbers: Tensor) -> RowOrder:
        """Of the numbers int64 `[n]`, a permutation."""
        return cls(numbers.to(torch.int32), numbers.argsort().to(torch.int32))

    @property
    def num_bytes(self) -> int:
        """Bytes of both tables."""
        return self.numbers.nbytes + self.ranks.nbytes


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A matrix in strips; `strips` keeps their memory alive.

    `sensitive` matrices read the remainders of more groups of activations than others. `order` is
    None where rows lie in the order of their numbers. `is_view`: the strips are another weight's.
    """

    format: QuantFormat
    shape: tuple[int, int]
    strips: Tensor
    sensitive: bool
    order: RowOrder | None = None
    is_view: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the strips, unless they are another's, and of the row order."""
        own = 0 if self.is_view else self.strips.numel()
        return own + (self.order.num_bytes if self.order else 0)

    @property
    def is_plain(self) -> bool:
        """Whether it multiplies float activations, not quantised ones."""
        return self.format in _PLAIN.values()

    def struct(self) -> WeightStruct:
        """What the kernels see of it."""
        order = self.order
        return WeightStruct(
            *(_CODES[self.format], *self.shape, self.sensitive, self.strips.data_ptr()),
            address(order.numbers if order else None),
            address(order.ranks if order else None),
        )

    def restricted(self, rows: Tensor) -> NativeWeight:
        """A view of the rows int64 `[n]`, numbered in this order; they must lie first in memory.

        Raises:
            ValueError: Others do.
        """
        num_rows, (out_features, in_features) = len(rows), self.shape
        lying = self.order.numbers if self.order else torch.arange(out_features, dtype=torch.int32)
        places = rows.argsort()
        if not torch.equal(lying[:num_rows], rows[places].to(torch.int32)):
            raise ValueError(
                f"{num_rows} rows of {out_features} are asked for that do not lie first: prepare "
                "the weight with them as its first rows"
            )
        strips = self.strips.view(-(-out_features // STRIP_ROWS), -1)
        strips = strips[: -(-num_rows // STRIP_ROWS)].flatten()
        order = None if torch.equal(rows[places], rows) else RowOrder.of(places)
        shape = (num_rows, in_features)
        return NativeWeight(self.format, shape, strips, self.sensitive, order, is_view=True)


class WeightMemory:
    """Gives matrices their memory, out of blocks that the system may back with large pages."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def repack(
        self, weight: QuantizedTensor | Tensor, *, sensitive: bool, first_rows: Tensor | None
    ) -> NativeWeight:
        """The matrix in strips; a dense one keeps its type (float64 becomes float32).

        Raises:
            ValueError: A row of `first_rows` comes twice, or is not there.
        """
        if not isinstance(weight, QuantizedTensor):
            weight = _as_stored(weight)
        functions, code = self._pool.kernels.functions, _CODES[weight.format]
        num_bytes = functions.chatrt_weight_bytes(code, *weight.shape)
        order = None
        if first_rows is not None:
            order = RowOrder.starting_with(first_rows, weight.shape[0])
        strips = self._take(num_bytes)
        rows = weight.data.contiguous()
        functions.chatrt_repack(
            *(self._pool.handle, code, rows.data_ptr()),
            address(order.numbers if order else None),
            *(*weight.shape, strips.data_ptr()),
        )
        return NativeWeight(weight.format, weight.shape, strips, sensitive, order)

    def _take(self, num_bytes: int) -> Tensor:
        start = -(-self._used // _LINE_BYTES) * _LINE_BYTES
        if start + num_bytes > self._block.numel():
            size = max(_BLOCK_BYTES, num_bytes)
            self._block, start = large_pages(self._pool, size), 0
        self._used = start + num_bytes
        return self._block[start : self._used]


def large_pages(pool: ThreadPool, num_bytes: int) -> Tensor:
    """Untouched memory, uint8 `[num_bytes]`, that starts where a large page does."""
    whole = torch.empty(num_bytes + _LARGE_PAGE_BYTES, dtype=torch.uint8)
    start = -whole.data_ptr() % _LARGE_PAGE_BYTES
    block = whole[start : start + num_bytes]
    advise_large_pages(pool, block.data_ptr(), num_bytes)
    return block


def advise_large_pages(pool: ThreadPool, start: int, num_bytes: int) -> None:
    """Ask the system for large pages in memory that will be read at full speed.

    Looking addresses up page by page would cost more than the reading. Only whole large pages are
    asked for: a tensor that shares its memory's first or last page with others leaves them alone.
    """
    first = -(-start // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
    end = (start + num_bytes) // _LARGE_PAGE_BYTES * _LARGE_PAGE_BYTES
    if end > first:
        pool.kernels.functions.chatrt_advise_large_pages(first, end - first)


def _as_stored(matrix: Tensor) -> QuantizedTensor:
    """A dense matrix as bytes in its own type."""
    dense = matrix if matrix.dtype in _PLAIN else matrix.to(torch.float32)
    rows = dense.contiguous().view(torch.uint8)
    out_features, in_features = matrix.shape
    return QuantizedTensor(_PLAIN[dense.dtype], rows, (out_features, in_features))
