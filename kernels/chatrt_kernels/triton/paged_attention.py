"""Causal attention of ragged rows over their sequences' pages.

    tiles   rows of one sequence × the query heads that share a KV head   (GQA packed)
    splits  fixed ranges of positions: [0, SPLIT), [SPLIT, 2 SPLIT), …    (flash-decoding)

    grid (tiles, KV heads, splits) ──▶ partial sums ──▶ grid (rows, heads): summed in order

Knows: rows, pages, page formats. Does not know: layers, which rows are drafts.
Invariant: a row meets its positions in the same blocks, in the same order, whatever rows share its
tile and whatever lies behind it: blocks that it may not see change nothing of its sums, bit for
bit. So decode and verify, which take the same tiles, agree exactly.
Cost: each KV byte is read once for each tile; partial sums are `splits · rows · heads · head_dim`
float32. Chunks of a prefill take large tiles and no splits.
Source: FlashAttention-2 (arXiv 2307.08691), Flash-Decoding (Dao et al., 2023), PagedAttention
(arXiv 2309.06180).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from chatrt_kernels.kv_formats import INT4_GROUP, KVFormat
from chatrt_kernels.triton.launch import OPTIONS, dot_type, packed_rows, power_of_two, varying
from chatrt_kernels.triton.rope_and_write_kv import FORMAT_NUMBERS, as_elements

if TYPE_CHECKING:
    from torch import Tensor

    from chatrt_kernels.ops import KVLayer, RowMeta
    from chatrt_kernels.triton.tiling import Partials, Tiling

_LOG2_E = 1.4426950408889634
_LEAST_DOT = 16  # rows that `tl.dot` takes at least


def paged_attention(
    q: Tensor,
    meta: RowMeta,
    kv: KVLayer,
    scale: float,
    tiling: Tiling,
    *,
    out: Tensor,
    num_splits: int = 1,
    partials: Partials | None = None,
) -> None:
    """Attention of q `[rows, heads * head_dim]` into `out`, which must not overlap it.

    Where the tiling splits, no sequence has more than `num_splits` splits, and `partials` holds at
    least so many of them and so many rows.
    """
    assert (tiling.split is None) == (partials is None), "scratch for sums that are split"
    if not q.shape[0]:
        return
    _launch_tiles(q, meta, kv, scale, tiling, out=out, num_splits=num_splits, partials=partials)
    if tiling.split is not None:
        assert partials is not None
        _launch_sums(meta, partials, tiling.split, out=out, num_splits=num_splits)


def _launch_tiles(
    q: Tensor,
    meta: RowMeta,
    kv: KVLayer,
    scale: float,
    tiling: Tiling,
    *,
    out: Tensor,
    num_splits: int,
    partials: Partials | None,
) -> None:
    kind = KVFormat.of(kv.keys.dtype)
    kv_heads, head_dim = kv.kv_heads, kv.head_dim
    sums, stats = (out, out) if partials is None else (partials.sums, partials.stats)
    num_sequences = meta.kv_len.shape[0]
    keys, values = as_elements(kv.keys), as_elements(kv.values)
    key_scales = keys if kv.key_scales is None else kv.key_scales
    value_scales = values if kv.value_scales is None else kv.value_scales
    group = q.shape[1] // head_dim // kv_heads
    _attend[(tiling.num_tiles(q.shape[0], num_sequences), kv_heads, num_splits)](
        *(q, keys, values, key_scales, value_scales),
        *(meta.page_table, meta.q_start, meta.kv_len, out, sums, stats),
        *(num_sequences, scale * _LOG2_E),
        *(packed_rows(q), packed_rows(out), meta.page_table.stride(0)),
        *keys.stride()[:3],
        *key_scales.stride()[:3],
        *(sums.stride()[:3] if partials is not None else (0, 0, 0)),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=power_of_two(head_dim),
        PAGE_SIZE=keys.shape[1],
        TILE_ROWS=tiling.tile_rows,
        BLOCK_M=max(_LEAST_DOT, power_of_two(tiling.tile_rows * group)),
        # taking codes apart needs registers: blocks are shorter then, or fewer are on their way
        BLOCK_N=tiling.block // (2 if kind is KVFormat.INT4 else 1),
        SPLIT=tiling.split or 0,
        FORMAT=FORMAT_NUMBERS[kind],
        SCALE_GROUP=INT4_GROUP,
        DOT=dot_type(q.dtype),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages if kind is KVFormat.FLOAT else 2,
        **OPTIONS,
    )


def _launch_sums(
    meta: RowMeta, partials: Partials, split: int, *, out: Tensor, num_splits: int
) -> None:
    sums = partials.sums
    num_heads, head_dim = sums.shape[1], sums.shape[3]
    _sum_splits[(out.shape[0], num_heads)](
        *(sums, partials.stats, meta.positions, meta.q_start, out),
        *(*sums.stride()[:3], packed_rows(out)),
        *(num_splits, meta.kv_len.shape[0]),
        HEAD_DIM=head_dim,
        BLOCK_D=power_of_two(head_dim),
        SPLIT=split,
        num_warps=1 if head_dim <= 128 else 4,
        **OPTIONS,
    )


@triton.jit
def _sequence_of(q_start_ptr, i_tile, num_sequences, TILE_ROWS: tl.constexpr):
    """The sequence of a tile: s has those from q_start[s] // TILE_ROWS + s on."""
    left = 0
    right = num_sequences
    while left < right:
        middle = (left + right) // 2
        if tl.load(q_start_ptr + middle) // TILE_ROWS + middle <= i_tile:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def _numbers(
    pages_ptr,
    scales_ptr,
    o_page,
    o_scale,
    o_dim,
    m_position,
    HEAD_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Stored numbers of a block of positions `[block, head_dim]`, and their scales `[block]`."""
    m_block = m_position[:, None] & (o_dim < HEAD_DIM)[None, :]
    b_scale = tl.full((o_page.shape[0],), 1.0, tl.float32)
    if FORMAT == 3:
        HALF: tl.constexpr = HEAD_DIM // 2
        p_codes = pages_ptr + o_page[:, None] + (o_dim % HALF)[None, :]
        b_codes = tl.load(p_codes, mask=m_block, other=0).to(tl.int32)
        b_codes = (b_codes >> ((o_dim // HALF) * 4)[None, :]) & 0x0F
        p_pair = scales_ptr + o_scale[:, None] + ((o_dim // SCALE_GROUP) * 2)[None, :]
        b_step = tl.load(p_pair, mask=m_block, other=0.0).to(tl.float32)
        b_least = tl.load(p_pair + 1, mask=m_block, other=0.0).to(tl.float32)
        b_numbers = (b_codes.to(tl.float32) * b_step + b_least).to(DOT)
    else:
        b_stored = tl.load(pages_ptr + o_page[:, None] + o_dim[None, :], mask=m_block, other=0)
        if FORMAT == 2:
            # the bits of e4m3 are those of float16 / 256, seven places lower
            b_bits = b_stored.to(tl.int32)
            b_bits = ((b_bits & 0x80) << 8) | ((b_bits & 0x7F) << 7)
            b_half = b_bits.to(tl.int16).to(tl.float16, bitcast=True)
            b_numbers = b_half.to(tl.float32).to(DOT)
            b_scale = 256.0 * tl.load(scales_ptr + o_scale, mask=m_position, other=0.0)
        elif FORMAT == 1:
            b_numbers = b_stored.to(tl.float32).to(DOT)
            b_scale = tl.load(scales_ptr + o_scale, mask=m_position, other=0.0)
        else:
            b_numbers = b_stored.to(DOT)
    return b_numbers, b_scale


@triton.jit
def _meet(
    b_q,
    b_most,
    b_weight,
    b_sum,
    scale,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    o_page,
    o_scale,
    o_dim,
    m_n,
    m_seen,
    HEAD_DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    DOT: tl.constexpr,
):
    """What rows know of their positions so far, with one more block of them.

    For each row: its largest score, the sum of its weights, the weighted sum of values.
    """
    b_keys, b_key_scale = _numbers(
        keys_ptr, key_scales_ptr, o_page, o_scale, o_dim, m_n, HEAD_DIM, FORMAT, SCALE_GROUP, DOT
    )
    b_scores = tl.dot(b_q, tl.trans(b_keys), input_precision="ieee") * scale
    b_scores = tl.where(m_seen, b_scores * b_key_scale[None, :], float("-inf"))
    b_new = tl.maximum(b_most, tl.max(b_scores, axis=1))
    # a row that has seen nothing yet keeps weight 0, and no infinity is subtracted from one
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_kept = tl.exp2(b_most - b_base)
    b_p = tl.exp2(b_scores - b_base[:, None])
    b_weight = b_weight * b_kept + tl.sum(b_p, axis=1)
    b_values, b_scale = _numbers(
        values_ptr,
        value_scales_ptr,
        o_page,
        o_scale,
        o_dim,
        m_n,
        HEAD_DIM,
        FORMAT,
        SCALE_GROUP,
        DOT,
    )
    b_p = (b_p * b_scale[None, :]).to(DOT)
    b_sum = b_sum * b_kept[:, None] + tl.dot(b_p, b_values, input_precision="ieee")
    return b_new, b_weight, b_sum


@triton.jit(**varying("num_sequences"))
def _attend(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    page_table_ptr,
    q_start_ptr,
    kv_len_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    num_sequences,
    scale,
    stride_q,
    stride_out,
    stride_table,
    stride_page,
    stride_slot,
    stride_head,
    stride_scale_page,
    stride_scale_slot,
    stride_scale_head,
    stride_sums_row,
    stride_sums_head,
    stride_sums_split,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
    DOT: tl.constexpr,
):
    i_tile = tl.program_id(0)
    i_kv = tl.program_id(1)
    i_split = tl.program_id(2)
    i_sequence = _sequence_of(q_start_ptr, i_tile, num_sequences, TILE_ROWS)
    first = tl.load(q_start_ptr + i_sequence)
    num_rows = tl.load(q_start_ptr + i_sequence + 1) - first
    i_row = (i_tile - (first // TILE_ROWS + i_sequence)) * TILE_ROWS
    if i_row >= num_rows:
        return
    kv_len = tl.load(kv_len_ptr + i_sequence)
    # the tile's last row sees positions [0, end)
    end = kv_len - num_rows + tl.minimum(i_row + TILE_ROWS, num_rows)
    start = 0
    if SPLIT > 0:
        start = i_split * SPLIT
        end = tl.minimum(end, start + SPLIT)
    if start >= end:
        return
    o_m = tl.arange(0, BLOCK_M)
    o_row = i_row + o_m // GROUP
    i_head = i_kv * GROUP + o_m % GROUP
    m_row = (o_m < TILE_ROWS * GROUP) & (o_row < num_rows)
    b_position = kv_len - num_rows + o_row
    o_dim = tl.arange(0, BLOCK_D)
    m_dim = o_dim < HEAD_DIM
    o_global = (first + o_row).to(tl.int64)
    p_q = q_ptr + (o_global * stride_q + i_head * HEAD_DIM)[:, None] + o_dim[None, :]
    b_q = tl.load(p_q, mask=m_row[:, None] & m_dim[None, :], other=0.0).to(DOT)
    b_most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_weight = tl.zeros((BLOCK_M,), tl.float32)
    b_sum = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for block_start in range(start, end, BLOCK_N):
        o_n = block_start + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        p_table = page_table_ptr + i_sequence * stride_table + o_n // PAGE_SIZE
        i_page = tl.load(p_table, mask=m_n, other=0).to(tl.int64)
        i_slot = o_n % PAGE_SIZE
        o_page = i_page * stride_page + i_slot * stride_slot + i_kv * stride_head
        o_scale = i_page * stride_scale_page + i_slot * stride_scale_slot + i_kv * stride_scale_head
        m_seen = m_n[None, :] & (o_n[None, :] <= b_position[:, None])
        b_most, b_weight, b_sum = _meet(
            b_q, b_most, b_weight, b_sum, scale,
            keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
            o_page, o_scale, o_dim, m_n, m_seen,
            HEAD_DIM, FORMAT, SCALE_GROUP, DOT,
        )  # fmt: skip
    if SPLIT > 0:
        o_partial = (
            o_global * stride_sums_row + i_head * stride_sums_head + i_split * stride_sums_split
        )
        p_sum = sums_ptr + o_partial[:, None] + o_dim[None, :]
        tl.store(p_sum, b_sum, mask=m_row[:, None] & m_dim[None, :])
        # stats lie as the sums do, with two numbers where those have HEAD_DIM
        p_stats = stats_ptr + (o_partial // HEAD_DIM) * 2
        tl.store(p_stats, b_most, mask=m_row)
        tl.store(p_stats + 1, b_weight, mask=m_row)
    else:
        b_out = b_sum / b_weight[:, None]
        p_out = out_ptr + (o_global * stride_out + i_head * HEAD_DIM)[:, None] + o_dim[None, :]
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_row[:, None] & m_dim[None, :])


@triton.jit(**varying("num_sequences"))
def _sum_splits(
    sums_ptr,
    stats_ptr,
    positions_ptr,
    q_start_ptr,
    out_ptr,
    stride_row,
    stride_head,
    stride_split,
    stride_out,
    most_splits,
    num_sequences,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1)
    o_dim = tl.arange(0, BLOCK_D)
    m_dim = o_dim < HEAD_DIM
    p_out = out_ptr + i_row * stride_out + i_head * HEAD_DIM + o_dim
    if i_row >= tl.load(q_start_ptr + num_sequences):
        # padding: nothing was summed for it
        tl.store(p_out, tl.zeros((BLOCK_D,), out_ptr.dtype.element_ty), mask=m_dim)
        return
    num_splits = tl.minimum(tl.load(positions_ptr + i_row) // SPLIT + 1, most_splits)
    b_most = float("-inf")
    b_weight = 0.0
    b_sum = tl.zeros((BLOCK_D,), tl.float32)
    for i_split in range(num_splits):
        o_partial = i_row * stride_row + i_head * stride_head + i_split * stride_split
        p_stats = stats_ptr + (o_partial // HEAD_DIM) * 2
        b_its_most = tl.load(p_stats)
        b_its_weight = tl.load(p_stats + 1)
        b_its_sum = tl.load(sums_ptr + o_partial + o_dim, mask=m_dim, other=0.0)
        b_new = tl.maximum(b_most, b_its_most)
        b_kept = tl.exp2(b_most - b_new)
        b_added = tl.exp2(b_its_most - b_new)
        b_sum = b_sum * b_kept + b_its_sum * b_added
        b_weight = b_weight * b_kept + b_its_weight * b_added
        b_most = b_new
    tl.store(p_out, (b_sum / b_weight).to(out_ptr.dtype.element_ty), mask=m_dim)
