"""Weight matrices in the tiles that the kernels read, and the memory that they lie in.

Knows: which number stands for a format, how much memory a matrix takes.
Does not know: how tiles are laid out; `source/weights.h` says that.
Invariant: repacking moves the file's own values; nothing is rounded.
Cost: one pass over the file's bytes; the copy is as large as they are, K-quants up to 3 % larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chatrt_kernels.cpu.structs import WeightStruct
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


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A matrix in strips; `strips` keeps their memory alive.

    `sensitive` matrices read the remainders of more groups of activations than others.
    """

    format: QuantFormat
    shape: tuple[int, int]
    strips: Tensor
    sensitive: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the strips."""
        return self.strips.numel()

    @property
    def is_plain(self) -> bool:
        """Whether it multiplies float activations, not quantised ones."""
        return self.format in _PLAIN.values()

    def struct(self) -> WeightStruct:
        """What the kernels see of it."""
        return WeightStruct(
            _CODES[self.format], *self.shape, self.sensitive, self.strips.data_ptr()
        )


class WeightMemory:
    """Gives matrices their memory, out of blocks that the system may back with large pages."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def repack(self, weight: QuantizedTensor | Tensor, *, sensitive: bool) -> NativeWeight:
        """The matrix in strips; a dense one keeps its type (float64 becomes float32)."""
        if not isinstance(weight, QuantizedTensor):
            weight = _as_stored(weight)
        functions, code = self._pool.kernels.functions, _CODES[weight.format]
        num_bytes = functions.chatrt_weight_bytes(code, *weight.shape)
        strips = self._take(num_bytes)
        rows = weight.data.contiguous()
        functions.chatrt_repack(
            self._pool.handle, code, rows.data_ptr(), *weight.shape, strips.data_ptr()
        )
        return NativeWeight(weight.format, weight.shape, strips, sensitive)

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
