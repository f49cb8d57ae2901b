"""Products of activations with weights of 8 or 4 bits, which become numbers in registers.

Knows: packed groups, rows. Does not know: layers. Dense weights are the library's business.
Invariant: a row's products are summed over the inputs in one fixed order, whatever rows there are
beside it and however many: tiles have a fixed size, and nothing is split along the inputs.
Cost: each weight is read once for every `TILE_M` rows; rows short of a tile cost nothing while
memory is the limit.
Source: weight-only products as in Marlin (arXiv 2408.11743), without its layouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from chatrt_kernels.triton.launch import (
    OPTIONS,
    dot_type,
    packed_rows,
    stages_of_shared_loads,
    varying,
)
from chatrt_kernels.triton.weights import GROUP

if TYPE_CHECKING:
    from torch import Tensor

    from chatrt_kernels.triton.weights import GpuWeight

TILE_M = 16  # rows of a product that is held back by memory: decode and verify
PREFILL_TILE_M = 64
_BLOCK_N = 32
_PREFILL_BLOCK_N = 64
_BLOCK_K = 128  # inputs met at once; the last ones are masked


def linear(
    x: Tensor, weight: GpuWeight, bias: Tensor | None, *, out: Tensor, prefill: bool = False
) -> None:
    """out = x @ weight.T + bias, x `[rows, in_features]`; out must not overlap x.

    `prefill` takes larger tiles: their sums may differ from those of decode in the last bits.
    """
    num_rows, (num_outputs, num_inputs) = x.shape[0], weight.shape
    if not num_rows:
        return
    assert weight.scales is not None, "a dense weight"
    tile_m, block_n = (PREFILL_TILE_M, _PREFILL_BLOCK_N) if prefill else (TILE_M, _BLOCK_N)
    _linear[(triton.cdiv(num_outputs, block_n), triton.cdiv(num_rows, tile_m))](
        *(x, weight.codes, weight.scales, out if bias is None else bias, out),
        *(num_rows, num_outputs, num_inputs),
        *(packed_rows(x), weight.codes.stride(0), weight.scales.stride(0), packed_rows(out)),
        BITS=weight.bits,
        HAS_BIAS=bias is not None,
        GROUP=GROUP,
        BLOCK_M=tile_m,
        BLOCK_N=block_n,
        BLOCK_K=_BLOCK_K,
        DOT=dot_type(x.dtype),
        num_warps=4,
        # as many as the smallest shared memory holds
        num_stages=stages_of_shared_loads(2 if prefill else 4),
        **OPTIONS,
    )


@triton.jit(**varying("num_rows"))
def _linear(
    x_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    stride_x,
    stride_codes,
    stride_scales,
    stride_out,
    BITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
):
    o_m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    o_n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    m_m = o_m < num_rows
    m_n = o_n < num_outputs
    p_x = x_ptr + o_m[:, None] * stride_x
    p_scales = scales_ptr + o_n[:, None] * stride_scales
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if BITS == 8:
        GROUPS: tl.constexpr = BLOCK_K // GROUP
        p_codes = codes_ptr + o_n[:, None] * stride_codes
        for start in range(0, num_inputs, BLOCK_K):
            o_k = start + tl.arange(0, BLOCK_K)
            m_k = o_k < num_inputs
            o_g = start // GROUP + tl.arange(0, GROUPS)
            m_block = m_n[:, None] & m_k[None, :]
            b_codes = tl.load(p_codes + o_k[None, :], mask=m_block, other=0)
            m_scales = m_n[:, None] & (o_g < num_inputs // GROUP)[None, :]
            b_scales = tl.load(p_scales + o_g[None, :], mask=m_scales, other=0.0)
            b_grouped = tl.reshape(b_codes.to(tl.float32), (BLOCK_N, GROUPS, GROUP))
            b_w = tl.reshape(b_grouped * b_scales.to(tl.float32)[:, :, None], (BLOCK_N, BLOCK_K))
            b_x = tl.load(p_x + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0.0)
            b_sum = tl.dot(b_x.to(DOT), tl.trans(b_w.to(DOT)), b_sum, input_precision="ieee")
    else:
        # bytes of BLOCK_K inputs: in each chunk of GROUP the low halves, then the high ones
        HALF: tl.constexpr = BLOCK_K // 2
        CHUNKS: tl.constexpr = HALF // GROUP
        p_codes = codes_ptr + o_n[:, None] * stride_codes
        for start in range(0, num_inputs, BLOCK_K):
            o_byte = start // 2 + tl.arange(0, HALF)
            o_low = (o_byte // GROUP) * (2 * GROUP) + o_byte % GROUP
            m_byte = o_byte < num_inputs // 2
            m_block = m_n[:, None] & m_byte[None, :]
            b_codes = tl.load(p_codes + o_byte[None, :], mask=m_block, other=0).to(tl.int32)
            o_chunk = start // (2 * GROUP) + tl.arange(0, CHUNKS)
            m_chunk = m_n[:, None] & (o_chunk < num_inputs // (2 * GROUP))[None, :]
            p_chunk = p_scales + o_chunk[None, :] * 4  # two groups of two numbers
            b_step = tl.load(p_chunk, mask=m_chunk, other=0.0).to(tl.float32)
            b_least = tl.load(p_chunk + 1, mask=m_chunk, other=0.0).to(tl.float32)
            b_low = tl.reshape((b_codes & 0x0F).to(tl.float32), (BLOCK_N, CHUNKS, GROUP))
            b_w = tl.reshape(b_low * b_step[:, :, None] + b_least[:, :, None], (BLOCK_N, HALF))
            m_x = m_m[:, None] & m_byte[None, :]
            b_x = tl.load(p_x + o_low[None, :], mask=m_x, other=0.0)
            b_sum = tl.dot(b_x.to(DOT), tl.trans(b_w.to(DOT)), b_sum, input_precision="ieee")
            b_step = tl.load(p_chunk + 2, mask=m_chunk, other=0.0).to(tl.float32)
            b_least = tl.load(p_chunk + 3, mask=m_chunk, other=0.0).to(tl.float32)
            b_high = tl.reshape((b_codes >> 4).to(tl.float32), (BLOCK_N, CHUNKS, GROUP))
            b_w = tl.reshape(b_high * b_step[:, :, None] + b_least[:, :, None], (BLOCK_N, HALF))
            b_x = tl.load(p_x + (o_low + GROUP)[None, :], mask=m_x, other=0.0)
            b_sum = tl.dot(b_x.to(DOT), tl.trans(b_w.to(DOT)), b_sum, input_precision="ieee")
    if HAS_BIAS:
        b_sum += tl.load(bias_ptr + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    p_out = out_ptr + o_m[:, None] * stride_out + o_n[None, :]
    tl.store(p_out, b_sum.to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])
