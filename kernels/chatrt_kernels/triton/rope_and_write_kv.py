"""Rotary position embedding of queries and keys; keys and values go to their slots of the pages.

Knows: rows, slots, page formats. Does not know: sequences, attention.
Invariant: one program has one head of one row, so no other row or head changes its bits. A row
whose slot is negative is padding: it is written nowhere.
Cost: q, k and v are read once; a page's numbers are quantised in registers and written once.
Source: RoFormer, arXiv 2104.09864, in the order that pairs dimension i with i + head_dim / 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from chatrt_kernels.kv_formats import INT4_GROUP, KVFormat, turned_by
from chatrt_kernels.triton.launch import OPTIONS, packed_rows, power_of_two

if TYPE_CHECKING:
    from torch import Tensor

    from chatrt_kernels.ops import KVLayer, RowMeta

# How a kernel names a page's format.
FLOAT, INT8, FP8, INT4 = 0, 1, 2, 3
FORMAT_NUMBERS = {
    KVFormat.FLOAT: FLOAT,
    KVFormat.INT8: INT8,
    KVFormat.FP8: FP8,
    KVFormat.INT4: INT4,
}


def rope_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: Tensor,
    meta: RowMeta,
    kv: KVLayer,
    *,
    out: Tensor,
) -> None:
    """Rotate q `[rows, heads * head_dim]` into `out` (which may be q), write k and v.

    Shapes as `chatrt_kernels.ops.Calls.rope_and_write_kv` has them.
    """
    num_rows = k.shape[0]
    if not num_rows:
        return
    head_dim = rope.shape[1]
    kv_heads = kv.keys.shape[2]
    num_heads = q.shape[1] // head_dim
    kind = KVFormat.of(kv.keys.dtype)
    keys, values = as_elements(kv.keys), as_elements(kv.values)
    key_scales = keys if kv.key_scales is None else kv.key_scales
    value_scales = values if kv.value_scales is None else kv.value_scales
    _rope_and_write_kv[(num_rows, num_heads + 2 * kv_heads)](
        *(q, k, v, rope, meta.positions, meta.write_slots, out),
        *(keys, values, key_scales, value_scales),
        *(num_heads, kv_heads),
        *(packed_rows(q) if num_heads else 0, packed_rows(k), packed_rows(v)),
        *(packed_rows(out) if num_heads else 0, rope.stride(0)),
        *keys.stride()[:3],
        *key_scales.stride()[:3],
        PAGE_SIZE=keys.shape[1],
        HALF=head_dim // 2,
        BLOCK=power_of_two(head_dim // 2),
        GROUP=INT4_GROUP,
        UNIT=turned_by(head_dim // 2),
        FORMAT=FORMAT_NUMBERS[kind],
        num_warps=1,
        **OPTIONS,
    )


def as_elements(pages: Tensor) -> Tensor:
    """A page tensor as a kernel reads it: e4m3 as bytes, since not all targets have the type."""
    return pages.view(torch.uint8) if pages.dtype is torch.float8_e4m3fn else pages


@triton.jit
def _add_and_subtract(b_x, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of dimensions `STEP` apart in the place of the first, differences in the second's."""
    b_pairs = tl.permute(tl.reshape(b_x, (BLOCK // (2 * STEP), 2, STEP)), (0, 2, 1))
    b_first, b_second = tl.split(b_pairs)
    b_both = tl.join(b_first + b_second, b_first - b_second)
    return tl.reshape(tl.permute(b_both, (0, 2, 1)), (BLOCK,))


@triton.jit
def _turn_half(b_x, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """What `kv_formats.turn` does within one half of a head, before its last factor."""
    for stage in tl.static_range(13):
        if HALF % (2 << stage) == 0:
            b_x = _add_and_subtract(b_x, 1 << stage, BLOCK)
    return b_x


@triton.jit
def _round_to_even(b_x):
    """The nearest whole number, halves to even, for numbers below 2²²."""
    return (b_x + 12582912.0) - 12582912.0


@triton.jit
def _fp8_bits(b_x):
    """e4m3 of |x| ≤ 448: float16 of x / 256 has its bits, seven places higher."""
    b_bits = (b_x * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    b_magnitude = b_bits & 0x7FFF
    b_rounded = (b_magnitude + 0x3F + ((b_magnitude >> 7) & 1)) >> 7
    return (b_rounded | ((b_bits >> 8) & 0x80)).to(tl.uint8)


@triton.jit
def _write_group_of_four_bits(b_x, m_x, p_scale, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Codes 0 … 15 of one half of a head, group by group; scales and minima are stored."""
    NUM: tl.constexpr = BLOCK // GROUP
    b_groups = tl.reshape(b_x, (NUM, GROUP))
    b_low = tl.min(b_groups, axis=1)
    b_scale = ((tl.max(b_groups, axis=1) - b_low) / 15.0).to(tl.float16)
    b_minimum = b_low.to(tl.float16)
    o_group = tl.arange(0, NUM)
    m_group = tl.max(tl.reshape(m_x.to(tl.int32), (NUM, GROUP)), axis=1) > 0
    tl.store(p_scale + o_group * 2, b_scale, mask=m_group)
    tl.store(p_scale + o_group * 2 + 1, b_minimum, mask=m_group)
    b_wide = b_scale.to(tl.float32)
    b_divisor = tl.where(b_wide > 0.0, b_wide, 1.0)
    b_steps = (b_groups - b_minimum.to(tl.float32)[:, None]) / b_divisor[:, None]
    b_codes = tl.minimum(tl.maximum(_round_to_even(b_steps), 0.0), 15.0)
    return tl.reshape(b_codes, (BLOCK,)).to(tl.int32)


@triton.jit
def _write_head(
    b_first,
    b_second,
    o_half,
    m_half,
    p_page,
    p_scale,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Store one head's two halves; 8-bit formats with one scale, four bits with one a group."""
    if FORMAT == 0:
        tl.store(p_page + o_half, b_first.to(p_page.dtype.element_ty), mask=m_half)
        tl.store(p_page + HALF + o_half, b_second.to(p_page.dtype.element_ty), mask=m_half)
    elif FORMAT == 3:
        b_low = _write_group_of_four_bits(b_first, m_half, p_scale, GROUP, BLOCK)
        p_upper = p_scale + 2 * (HALF // GROUP)
        b_high = _write_group_of_four_bits(b_second, m_half, p_upper, GROUP, BLOCK)
        tl.store(p_page + o_half, (b_low | (b_high << 4)).to(tl.uint8), mask=m_half)
    else:
        b_most = tl.maximum(tl.max(tl.abs(b_first), axis=0), tl.max(tl.abs(b_second), axis=0))
        LARGEST: tl.constexpr = 127.0 if FORMAT == 1 else 448.0
        b_scale = b_most / LARGEST
        tl.store(p_scale, b_scale)
        # a head of zeros has scale 0 and stays 0
        b_divisor = tl.maximum(b_scale, 1.1754943508222875e-38)
        b_first = b_first / b_divisor
        b_second = b_second / b_divisor
        if FORMAT == 1:
            tl.store(p_page + o_half, _round_to_even(b_first).to(tl.int8), mask=m_half)
            tl.store(p_page + HALF + o_half, _round_to_even(b_second).to(tl.int8), mask=m_half)
        else:
            tl.store(p_page + o_half, _fp8_bits(b_first), mask=m_half)
            tl.store(p_page + HALF + o_half, _fp8_bits(b_second), mask=m_half)


@triton.jit
def _rope_and_write_kv(
    q_ptr,
    k_ptr,
    v_ptr,
    rope_ptr,
    positions_ptr,
    slots_ptr,
    out_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    num_heads,
    kv_heads,
    stride_q,
    stride_k,
    stride_v,
    stride_out,
    stride_rope,
    stride_page,
    stride_slot,
    stride_head,
    stride_scale_page,
    stride_scale_slot,
    stride_scale_head,
    PAGE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    FORMAT: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1)
    o_half = tl.arange(0, BLOCK)
    m_half = o_half < HALF
    is_query = i_head < num_heads
    is_value = i_head >= num_heads + kv_heads
    i_kv = (i_head - num_heads) % kv_heads
    b_slot = tl.load(slots_ptr + i_row)
    if is_query:
        p_head = q_ptr + i_row * stride_q + i_head * (2 * HALF)
    elif is_value:
        p_head = v_ptr + i_row * stride_v + i_kv * (2 * HALF)
    else:
        p_head = k_ptr + i_row * stride_k + i_kv * (2 * HALF)
    b_first = tl.load(p_head + o_half, mask=m_half, other=0.0).to(tl.float32)
    b_second = tl.load(p_head + HALF + o_half, mask=m_half, other=0.0).to(tl.float32)
    if not is_value:
        p_rope = rope_ptr + tl.load(positions_ptr + i_row) * stride_rope + o_half
        b_cos = tl.load(p_rope, mask=m_half, other=0.0)
        b_sin = tl.load(p_rope + HALF, mask=m_half, other=0.0)
        b_turned = b_first * b_cos - b_second * b_sin
        b_second = b_second * b_cos + b_first * b_sin
        b_first = b_turned
        if FORMAT == 3:
            # `kv_formats.turn` has the reasons, and this order
            b_sum = b_first + b_second
            b_second = _turn_half(b_first - b_second, HALF, BLOCK) * UNIT
            b_first = _turn_half(b_sum, HALF, BLOCK) * UNIT
    if is_query:
        p_out = out_ptr + i_row * stride_out + i_head * (2 * HALF)
        tl.store(p_out + o_half, b_first.to(out_ptr.dtype.element_ty), mask=m_half)
        tl.store(p_out + HALF + o_half, b_second.to(out_ptr.dtype.element_ty), mask=m_half)
    elif b_slot >= 0:
        i_page = b_slot // PAGE_SIZE
        i_offset = b_slot % PAGE_SIZE
        o_page = i_page * stride_page + i_offset * stride_slot + i_kv * stride_head
        o_scale = (
            i_page * stride_scale_page + i_offset * stride_scale_slot + i_kv * stride_scale_head
        )
        if is_value:
            p_page = values_ptr + o_page
            p_scale = value_scales_ptr + o_scale
        else:
            p_page = keys_ptr + o_page
            p_scale = key_scales_ptr + o_scale
        _write_head(b_first, b_second, o_half, m_half, p_page, p_scale, HALF, BLOCK, GROUP, FORMAT)
