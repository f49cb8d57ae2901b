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
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SLICE_ELEMENTS = 1 << 20


class BlockLayout(NamedTuple):
    """How many values share one block, and how many bytes the block takes."""

    block_size: int
    bytes_per_block: int


class QuantFormat(Enum):
    """A storage format; the value is the name that GGUF uses.

    Q8_0: float16 scale d, 32 int8 q; d * q. Q4_0: d, 32 nibbles; d * (q - 8). Q4_1: d, float16
    minimum m, 32 nibbles; d * q + m. Nibbles: the low halves of 16 bytes, then their high halves.

    Blocks of 256 have scales for each run of values inside, all unsigned but those of Q6_K:
    Q4_K: d, float16 e, eight 6-bit scales s and minima m in 12 bytes, nibbles of 4 x 32 bytes;
    run i of 32 values is (d * s_i) * q - (e * m_i).
    Q5_K: the same, with 32 bytes before the nibbles: bit i of byte j is the fifth bit of value j
    of run i. Q6_K: nibbles of 2 x 64 bytes, 2 x 32 bytes of upper pairs of bits (the lowest pairs
    of 32 bytes, then the next ones), 16 int8 scales s, d; run i of 16 is (d * s_i) * (q - 32).
    """

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"

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
    QuantFormat.Q4_K: BlockLayout(256, 144),
    QuantFormat.Q5_K: BlockLayout(256, 176),
    QuantFormat.Q6_K: BlockLayout(256, 210),
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
    return _BLOCK_VALUES[quant_format](blocks).flatten(1)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[..., 2:].contiguous().view(torch.int8) * _halves(blocks[..., :2])


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[..., 2:]).to(torch.int8) - 8) * _halves(blocks[..., :2])


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[..., 4:]) * _halves(blocks[..., :2]) + _halves(blocks[..., 2:4])


def _q4_k(blocks: Tensor) -> Tensor:
    return _affine_runs(blocks, _nibbles(_split(blocks[..., 16:], 4, 32)))


def _q5_k(blocks: Tensor) -> Tensor:
    low = _nibbles(_split(blocks[..., 48:], 4, 32))
    fifth = _bit_fields(blocks[..., None, 16:48], bits=1)
    return _affine_runs(blocks, low.flatten(-2) | fifth.flatten(-2) << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(_split(blocks[..., :128], 2, 64)).flatten(-2)
    high = _bit_fields(_split(blocks[..., 128:192], 2, 1, 32), bits=2).flatten(-3)
    codes = (low | high << 4).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8) * _halves(blocks[..., 208:])
    return (_split(codes, 16, 16) * scales[..., None]).flatten(-2)


def _affine_runs(blocks: Tensor, codes: Tensor) -> Tensor:
    """Values of Q4_K or Q5_K blocks `[..., bytes]` with 256 codes each, in any shape behind."""
    scales, minima = _six_bits(blocks[..., 4:16])
    scales = _halves(blocks[..., :2]) * scales
    minima = _halves(blocks[..., 2:4]) * minima
    runs = codes.reshape(*blocks.shape[:-1], 8, 32)
    return (runs * scales[..., None] - minima[..., None]).flatten(-2)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 `[..., 12]` to eight scales and eight minima `[..., 8]`.

    The first four of each are the low six bits of a byte; the upper two bits of these bytes, over
    the halves of the last four bytes, are the other four.
    """
    first, second, last = _split(packed, 3, 4).unbind(-2)
    scales = torch.cat((first & 0x3F, last & 0x0F | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 0x3F, last >> 4 | second >> 6 << 4), dim=-1)
    return scales, minima


def _bit_fields(packed: Tensor, *, bits: int) -> Tensor:
    """uint8 `[..., 1, bytes]` to `[..., 8 / bits, bytes]`: the lowest bits of all bytes first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return packed >> shifts[:, None] & (1 << bits) - 1


def _split(values: Tensor, *sizes: int) -> Tensor:
    """`[..., n]` to `[..., *sizes]`, whose product is n."""
    return values.reshape(*values.shape[:-1], *sizes)


def _halves(pairs: Tensor) -> Tensor:
    """uint8 `[..., 2]`, little endian float16, to float32 `[..., 1]`."""
    return pairs.contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 `[..., n]` to uint8 `[..., 2 n]`: low halves of all bytes, then their high halves."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1)


# uint8 `[rows, blocks, bytes]` to float32 `[rows, blocks, values]`
_BLOCK_VALUES: Mapping[QuantFormat, Callable[[Tensor], Tensor]] = {
    QuantFormat.Q8_0: _q8_0,
    QuantFormat.Q4_0: _q4_0,
    QuantFormat.Q4_1: _q4_1,
    QuantFormat.Q4_K: _q4_k,
    QuantFormat.Q5_K: _q5_k,
    QuantFormat.Q6_K: _q6_k,
}
