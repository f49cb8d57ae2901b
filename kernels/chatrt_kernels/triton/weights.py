"""Weight matrices as kernels read them: dense, or 8 or 4 bits for groups of 32 inputs.

Knows: the storage formats of files, how codes are packed. Does not know: layers, files.
Invariant: 8-bit groups and 4-bit affine groups keep the values of Q8_0, Q4_0 and Q4_1 exactly;
other quantised formats become 8-bit groups of their values.
Cost: 8.5 and 5 bits a weight.

    8 bits   codes int8 [out, in], a float16 scale for each group
    4 bits   64 inputs in 32 bytes: byte j has input j low and j + 32 high; a float16 step and a
             float16 minimum for each group
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatrt_kernels.formats import QuantFormat, QuantizedTensor, dequantize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt_kernels.ops import Weight

GROUP = 32
_FOUR_BITS = (QuantFormat.Q4_0, QuantFormat.Q4_1, QuantFormat.Q4_K)
_PLAIN = (QuantFormat.F32, QuantFormat.F16, QuantFormat.BF16)


@dataclass(slots=True, eq=False)
class GpuWeight:
    """A matrix on the device, dense or in groups; `stacked` may move it.

    `codes`: the dense matrix `[out, in]`, int8 codes of the same shape, or packed 4-bit codes uint8
    `[out, in / 2]`. `scales` float16 `[out, in / GROUP]` for 8 bits, `[out, in / GROUP, 2]` (step,
    minimum) for 4, None for a dense one.
    """

    shape: tuple[int, int]  # (out_features, in_features)
    codes: Tensor
    scales: Tensor | None = None

    @property
    def bits(self) -> int | None:
        """8 or 4; None for a dense matrix."""
        if self.scales is None:
            return None
        return 4 if self.codes.dtype is torch.uint8 else 8

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds on the device."""
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows `[n, in_features]` of int64 ids `[n]` as numbers."""
        codes = self.codes.index_select(0, ids)
        if self.scales is None:
            return codes.to(dtype)
        return _values(codes, self.scales.index_select(0, ids)).to(dtype)

    def restricted(self, ids: Tensor) -> GpuWeight:
        """A copy of the rows int64 `[n]`, in this order."""
        ids = ids.to(self.codes.device)
        scales = None if self.scales is None else self.scales.index_select(0, ids)
        return GpuWeight((len(ids), self.shape[1]), self.codes.index_select(0, ids), scales)

    @staticmethod
    def stacked(weights: Sequence[GpuWeight]) -> GpuWeight:
        """One matrix whose products are those of all, which are of one kind, side by side.

        They become views of it, so that nothing is held twice. Those that lie in a row already
        stay where they are.
        """
        first = weights[0]
        counts = [weight.shape[0] for weight in weights]
        codes = _in_a_row([weight.codes for weight in weights])
        scales = [weight.scales for weight in weights if weight.scales is not None]
        stack = GpuWeight(
            (sum(counts), first.shape[1]), codes, _in_a_row(scales) if scales else None
        )
        start = 0
        for weight, count in zip(weights, counts, strict=True):
            weight.codes = codes[start : start + count]
            if stack.scales is not None:
                weight.scales = stack.scales[start : start + count]
            start += count
        return stack


def _in_a_row(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one tensor: a view where each begins where the one before ends."""
    first = parts[0]
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    ends = [part.data_ptr() + part.nbytes for part in parts]
    starts = [part.data_ptr() for part in parts]
    storage = first.untyped_storage()
    room = storage.nbytes() - (starts[0] - storage.data_ptr())
    if starts[1:] == ends[:-1] and sum(part.nbytes for part in parts) <= room:
        return first.as_strided(shape, first.stride())
    return torch.cat(list(parts))


def prepare(
    weight: QuantizedTensor | Tensor, *, dtype: torch.dtype, device: torch.device
) -> GpuWeight:
    """A matrix `[out_features, in_features]` on the device; `dtype` is that of dense ones."""
    if not isinstance(weight, QuantizedTensor):
        out_features, in_features = weight.shape
        dense = weight.to(device=device, dtype=dtype).contiguous()
        return GpuWeight((out_features, in_features), dense)
    if weight.format in _PLAIN:
        return GpuWeight(weight.shape, dequantize(weight, dtype).to(device))
    data = QuantizedTensor(weight.format, weight.data.to(device), weight.shape)
    if weight.format in _FOUR_BITS and weight.shape[1] % (2 * GROUP) == 0:
        return _four_bits(data)
    return _eight_bits(data)


def gpu_weight(weight: Weight) -> GpuWeight:
    """The weight, which this executor must have prepared."""
    assert isinstance(weight, GpuWeight), f"{type(weight).__name__} is another executor's weight"
    return weight


def _groups(numbers: Tensor) -> Tensor:
    """`[rows, n]` as `[rows, n / GROUP, GROUP]`."""
    return numbers.reshape(numbers.shape[0], -1, GROUP)


def _blocks(weight: QuantizedTensor) -> Tensor:
    """The stored bytes `[rows, blocks, bytes of a block]`."""
    return weight.data.reshape(weight.shape[0], -1, weight.format.bytes_per_block)


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 numbers `[rows, in_features]` of codes and scales."""
    if codes.dtype is torch.uint8:
        packed = _groups(codes)
        groups = torch.stack((packed & 0x0F, packed >> 4), dim=-2).flatten(-3, -2).float()
        return (groups * scales[..., :1].float() + scales[..., 1:].float()).flatten(-2)
    groups = _groups(codes).float()
    return (groups * scales.unsqueeze(-1).float()).flatten(-2)


def _eight_bits(weight: QuantizedTensor) -> GpuWeight:
    groups = _groups(dequantize(weight, torch.float32))
    if weight.format is QuantFormat.Q8_0:
        scales = _blocks(weight)[..., :2].contiguous().view(torch.float16)
    else:
        scales = (groups.abs().amax(-1, keepdim=True) / 127).to(torch.float16)
    steps = groups / torch.where(scales == 0, 1, scales).float()
    codes = torch.round(steps).clamp_(-128, 127).to(torch.int8)
    return GpuWeight(weight.shape, codes.flatten(-2), scales.squeeze(-1).contiguous())


def _four_bits(weight: QuantizedTensor) -> GpuWeight:
    values = _groups(dequantize(weight, torch.float32))
    if weight.format is QuantFormat.Q4_K:
        low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
        pair = torch.cat(((high - low) / 15, low), dim=-1).to(torch.float16)
    else:
        pair = _stored_pair(weight)
    step, minimum = pair[..., :1].float(), pair[..., 1:].float()
    steps = (values - minimum) / torch.where(step == 0, 1, step)
    codes = torch.round(steps).clamp_(0, 15).to(torch.uint8)
    halves = codes.reshape(codes.shape[0], -1, 2, GROUP)
    packed = halves[..., 0, :] | halves[..., 1, :] << 4
    return GpuWeight(weight.shape, packed.flatten(-2).contiguous(), pair.contiguous())


def _stored_pair(weight: QuantizedTensor) -> Tensor:
    """Steps and minima `[out, groups, 2]` of Q4_0 and Q4_1, as they are stored."""
    blocks = _blocks(weight)
    steps = blocks[..., :2].contiguous().view(torch.float16)
    if weight.format is QuantFormat.Q4_1:
        return torch.cat((steps, blocks[..., 2:4].contiguous().view(torch.float16)), dim=-1)
    return torch.cat((steps, -8 * steps), dim=-1)  # exact: eight is a power of two
