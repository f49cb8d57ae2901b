"""Random matrices in every storage format, for tests of executors.

Every bit pattern that a format allows may come: any codes, any scales inside a block, and float16
numbers of either sign and of different size from block to block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chatrt_kernels.formats import QuantFormat, QuantizedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

PLAIN = {
    QuantFormat.F32: torch.float32,
    QuantFormat.F16: torch.float16,
    QuantFormat.BF16: torch.bfloat16,
}
# Where a block's float16 numbers start, and how large each is, so that values are of order 1.
_HALVES = {
    QuantFormat.Q8_0: ((0, 1 / 64),),
    QuantFormat.Q4_0: ((0, 1 / 4),),
    QuantFormat.Q4_1: ((0, 1 / 4), (2, 1.0)),
    QuantFormat.Q4_K: ((0, 1 / 200), (2, 1 / 32)),
    QuantFormat.Q5_K: ((0, 1 / 400), (2, 1 / 32)),
    QuantFormat.Q6_K: ((208, 1 / 1400),),
}


def random_matrix(quant_format: QuantFormat, shape: tuple[int, int], seed: int) -> QuantizedTensor:
    """A matrix `[out_features, in_features]` whose values are of order 1."""
    generator = torch.Generator().manual_seed(seed)
    out_features, in_features = shape
    plain = PLAIN.get(quant_format)
    if plain is not None:
        values = torch.randn(shape, generator=generator).to(plain)
        return QuantizedTensor(quant_format, values.view(torch.uint8), shape)
    num_blocks = in_features // quant_format.block_size
    blocks = torch.randint(
        0,
        256,
        (out_features, num_blocks, quant_format.bytes_per_block),
        generator=generator,
        dtype=torch.uint8,
    )
    for start, size in _HALVES[quant_format]:
        halves = torch.randn(out_features, num_blocks, 1, generator=generator) * size
        blocks[..., start : start + 2] = halves.to(torch.float16).view(torch.uint8)
    return QuantizedTensor(quant_format, blocks.flatten(1), shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one type hold the same bits; a NaN equals the same NaN."""
    assert a.dtype == b.dtype, f"{a.dtype}, {b.dtype}"
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Every tensor holds the bits of its counterpart."""
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(one, other), index
