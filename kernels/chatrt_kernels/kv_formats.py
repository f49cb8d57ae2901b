"""How keys and values are stored in a page: as floats, or in 8 or 4 bits with scales.

Knows: one head's numbers of one token at a time. Does not know: pages, models, devices.
Invariant: what a row is stored as depends on that row alone.
Cost: `bytes_per_head`. In PyTorch, as the oracle; kernels do the same in registers.
Source: per-token scales for values as in KIVI (arXiv 2402.02750), groups as in Q4_1 of ggml, keys
turned by a Hadamard matrix as in QuaRot (arXiv 2404.00456).

    FLOAT   the numbers as they are                       head_dim × itemsize
    INT8    codes of −127 … 127, a float32 scale          head_dim + 4
    FP8     e4m3 with a float32 scale that makes 448 max  head_dim + 4
    INT4    groups of 16: 16 steps between a float16      head_dim ÷ 2 + 4 for each 16
            minimum and a maximum; byte j of a head has
            dimension j low and j + head_dim ÷ 2 high; keys are stored turned (`turn`),
            and so are the queries that meet them
"""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch import Tensor

INT4_GROUP = 16
_INT8_MAX = 127.0
_FP8_MAX = 448.0
_INT4_STEPS = 15.0


class KVFormat(Enum):
    """What a page's numbers are; the value is a setting's name where it is no dtype's."""

    FLOAT = "float"
    INT8 = "int8"
    FP8 = "fp8"
    INT4 = "int4"

    @classmethod
    def of(cls, dtype: torch.dtype) -> KVFormat:
        """The format of pages whose tensor has this dtype."""
        return _FORMATS.get(dtype, cls.FLOAT)

    @property
    def codes_per_byte(self) -> int:
        """Numbers in one element of a page's tensor."""
        return 2 if self is KVFormat.INT4 else 1

    def stored_width(self, head_dim: int) -> int:
        """Elements of a page's tensor for one head."""
        return head_dim // self.codes_per_byte

    def scale_shape(self, head_dim: int) -> tuple[int, ...] | None:
        """What the scales of one head of one token look like; None without any.

        INT4 has `[groups, 2]`: scale, minimum.
        """
        match self:
            case KVFormat.FLOAT:
                return None
            case KVFormat.INT4:
                return (head_dim // INT4_GROUP, 2)
        return ()

    @property
    def turns_keys(self) -> bool:
        """Whether `turn` has been applied to stored keys, and is to be to queries."""
        return self is KVFormat.INT4

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of the scales."""
        return torch.float16 if self is KVFormat.INT4 else torch.float32


_FORMATS = {
    torch.int8: KVFormat.INT8,
    torch.float8_e4m3fn: KVFormat.FP8,
    torch.uint8: KVFormat.INT4,
}


def bytes_per_head(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of the keys (or the values) of one head of one token, scales included."""
    kind = KVFormat.of(dtype)
    shape = kind.scale_shape(head_dim)
    scales = 0 if shape is None else torch.Size(shape).numel() * kind.scale_dtype.itemsize
    return kind.stored_width(head_dim) * dtype.itemsize + scales


def why_not(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why heads of this size cannot be stored so, None if they can."""
    if KVFormat.of(dtype) is KVFormat.INT4 and head_dim % (2 * INT4_GROUP):
        return f"heads have {head_dim} dimensions, 4-bit pages need a multiple of {2 * INT4_GROUP}"
    return None


def quantize(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Rows `[..., head_dim]` as they are stored: elements of `dtype`, and scales if there are."""
    match KVFormat.of(dtype):
        case KVFormat.FLOAT:
            return rows.to(dtype), None
        case KVFormat.INT8:
            scaled, scales = _scaled(rows, _INT8_MAX)
            return torch.round(scaled).to(dtype), scales
        case KVFormat.FP8:
            scaled, scales = _scaled(rows, _FP8_MAX)
            # by way of float16, as kernels do it: their e4m3 are the upper bits of those
            return scaled.to(torch.float16).to(dtype), scales
        case KVFormat.INT4:
            return _quantize_int4(rows)


def dequantize(stored: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The numbers `[..., head_dim]` of stored rows `[..., stored_width]`, in a float `dtype`."""
    match KVFormat.of(stored.dtype):
        case KVFormat.FLOAT:
            return stored.to(dtype)
        case KVFormat.INT4:
            assert scales is not None
            codes = torch.cat((stored & 0x0F, stored >> 4), dim=-1)
            groups = _groups(codes).float()
            values = groups * scales[..., :1].float() + scales[..., 1:].float()
            return values.flatten(-2).to(dtype)
    assert scales is not None
    return (stored.float() * scales.unsqueeze(-1)).to(dtype)


def turn(rows: Tensor) -> Tensor:
    """Rows `[..., head_dim]` times an orthogonal matrix: products of two turned rows stay the same.

    Keys of one token have a few large dimensions, which set the steps of all in their group. Sums
    and differences spread them: of dimensions i and i + head_dim / 2 first, then within each half,
    in blocks as large as the largest power of two that divides it, of dimensions 1, 2, 4, … apart.
    Kernels add in this very order.
    """
    half = rows.shape[-1] // 2
    block = half & -half
    steps = [half] + [1 << stage for stage in range(block.bit_length() - 1)]
    for step in steps:
        pairs = rows.reshape(*rows.shape[:-1], -1, 2, step)
        first, second = pairs.unbind(-2)
        rows = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    return rows * turned_by(half)


def turned_by(half: int) -> float:
    """What `turn` multiplies its sums by, for heads of 2 · `half` dimensions."""
    return 1 / math.sqrt(2 * (half & -half))


def _groups(numbers: Tensor) -> Tensor:
    """`[..., head_dim]` as `[..., groups, INT4_GROUP]`."""
    return numbers.reshape(*numbers.shape[:-1], -1, INT4_GROUP)


def _scaled(rows: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Rows divided so that the largest number of each is `largest`, and what they were divided by.

    A row of zeros has scale 0: dividing by the smallest normal number keeps it at 0.
    """
    wide = rows.to(torch.float32)
    scales = wide.abs().amax(-1) / largest
    return wide / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1), scales


def _quantize_int4(rows: Tensor) -> tuple[Tensor, Tensor]:
    groups = _groups(rows.to(torch.float32))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    pair = torch.cat(((high - low) / _INT4_STEPS, low), dim=-1).to(torch.float16)
    scale, minimum = pair[..., :1].float(), pair[..., 1:].float()
    # where all are alike, the scale is 0 and so are the codes
    steps = (groups - minimum) / torch.where(scale > 0, scale, 1.0)
    codes = torch.round(steps).clamp_(0, _INT4_STEPS).to(torch.uint8).flatten(-2)
    first, second = codes.chunk(2, dim=-1)
    return first | second << 4, pair
