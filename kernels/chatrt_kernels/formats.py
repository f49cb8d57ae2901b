"""The bytes in which weight matrices are stored, and how they become numbers.

Knows: the GGUF block layouts, each row of a matrix being a whole number of blocks.
Does not know: files, models, devices.
Invariant: `dequantize` in float32 gives exactly the values that the GGUF format defines (each
product and each sum rounded to float32 on its own); other dtypes are rounded from those.
Cost: one pass, in slices of rows, so that the temporaries stay near `_SLICE_ELEMENTS` elements.
Source: the block layouts of ggml (ggml-common.h), as the `gguf` library states them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

_SLICE_ELEMENTS = 1 << 20


class BlockLayout(NamedTuple):
    """How many values share one block, and how many bytes the block takes."""

    block_size: int
    bytes_per_block: int


class QuantFormat(Enum):
    """A storage format; the value is the name that GGUF uses.

    Q8_0: float16 scale d, 32 int8 q; d * q. Q4_0: d, 32 nibbles; d * (q - 8). Q4_1: d, float16
    minimum m, 32 nibbles; d * q + m. Nibbles: the low halves of 16 bytes, then their high halves.
    """

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"

    @property
    def block_size(self) -> int:
        """Values per block; 1 for the plain float formats."""
        return _LAYOUTS[self].block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes per block."""
        return _LAYOUTS[self].bytes_per_block

    def row_bytes(self, in_features: int) -> int:
        """Bytes of one row; `in_features` must be a multiple of the block size."""
        num_blocks, rest = divmod(in_features, self.block_size)
        assert rest == 0, f"{in_features} features are no multiple of {self.block_size}"
        return num_blocks * self.bytes_per_block


_LAYOUTS = {
    QuantFormat.F32: BlockLayout(1, 4),
    QuantFormat.F16: BlockLayout(1, 2),
    QuantFormat.BF16: BlockLayout(1, 2),
    QuantFormat.Q8_0: BlockLayout(32, 34),
    QuantFormat.Q4_0: BlockLayout(32, 18),
    QuantFormat.Q4_1: BlockLayout(32, 20),
}
_PLAIN_DTYPES = {
    QuantFormat.F32: torch.float32,
    QuantFormat.F16: torch.float16,
    QuantFormat.BF16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix in its stored bytes; `data` is uint8 `[out_features, row_bytes]`.

    `data` is never written to, so it may be a view of a memory-mapped file.
    """

    format: QuantFormat
    data: Tensor
    shape: tuple[int, int]  # (out_features, in_features)

    def __post_init__(self) -> None:
        out_features, in_features = self.shape
        expected = (out_features, self.format.row_bytes(in_features))
        assert self.data.dtype == torch.uint8, f"data is {self.data.dtype}, not uint8"
        assert tuple(self.data.shape) == expected, f"data is {tuple(self.data.shape)}, {expected=}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored form."""
        return self.data.numel()


def dequantize(tensor: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values, as a new contiguous tensor `[out_features, in_features]` on the data's device."""
    out_features, in_features = tensor.shape
    values = torch.empty(tensor.shape, dtype=dtype, device=tensor.data.device)
    step = max(1, _SLICE_ELEMENTS // max(1, in_features))
    for start in range(0, out_features, step):
        rows = tensor.data[start : start + step]
        values[start : start + step] = _dequantize_rows(tensor.format, rows)
    return values


def _dequantize_rows(quant_format: QuantFormat, rows: Tensor) -> Tensor:
    """uint8 `[rows, row_bytes]` to `[rows, in_features]`: float32, or the plain format's own."""
    plain = _PLAIN_DTYPES.get(quant_format)
    if plain is not None:
        return rows.contiguous().view(plain)
    blocks = rows.reshape(rows.shape[0], -1, quant_format.bytes_per_block)
    scales = _halves(blocks[..., :2])
    if quant_format is QuantFormat.Q8_0:
        values = blocks[..., 2:].contiguous().view(torch.int8) * scales
    elif quant_format is QuantFormat.Q4_0:
        values = (_nibbles(blocks[..., 2:]).to(torch.int8) - 8) * scales
    else:
        values = _nibbles(blocks[..., 4:]) * scales + _halves(blocks[..., 2:4])
    return values.flatten(1)


def _halves(pairs: Tensor) -> Tensor:
    """uint8 `[..., 2]`, little endian float16, to float32 `[..., 1]`."""
    return pairs.contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 `[..., 16]` to uint8 `[..., 32]`: low halves of all bytes, then their high halves."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1)
