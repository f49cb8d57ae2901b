from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from chatrt_kernels.ops import KVLayer, RowMeta
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt_kernels.ragged import (
    Ragged,
    Shape,
    attend_plainly,
    page_tables,
    poisoned_layer,
    ragged,
    row_meta,
)
from tests.chatrt_kernels.tolerance import assert_agree

SCALE = 0.25
DTYPES = [torch.float32, torch.float64]
# decode alone, verify, prefill from nothing, a chunk behind a prefix, page size 4 and 4 ± 1, none
MIXED = [
    (1, 1),
    (1, 63),
    (4, 4),
    (3, 3),
    (5, 5),
    (0, 0),
    (4, 21),
    (1, 5),
    (0, 9),
    (63, 63),
    (7, 64),
]


def attend(case: Ragged) -> Tensor:
    out = torch.full_like(case.q, torch.nan)
    ReferenceOps(case.q.dtype).paged_attention(case.q, case.meta, case.kv, SCALE, out=out)
    return out


def expected_attention(case: Ragged) -> Tensor:
    starts = case.meta.q_start.tolist()
    parts = [
        attend_plainly(
            case.q[start : start + rows].view(rows, case.shape.heads, case.shape.head_dim),
            keys,
            values,
            SCALE,
            first_position=kv_len - rows,
        )
        for (rows, kv_len), keys, values, start in zip(
            case.sequences, case.keys, case.values, starts, strict=False
        )
    ]
    return torch.cat(parts).flatten(1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (8, 1)])
def test_ragged_rows_attend_as_the_formula_says(
    heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    case = ragged(MIXED, Shape(heads=heads, kv_heads=kv_heads), dtype)

    assert_agree(attend(case), expected_attention(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_len", [1, 3, 4, 5, 63])
def test_prefill_equals_causal_attention_on_contiguous_keys_and_values(
    kv_len: int, dtype: torch.dtype
) -> None:
    case = ragged([(kv_len, kv_len)], dtype=dtype)
    queries = case.q.view(kv_len, case.shape.heads, -1).transpose(0, 1)

    expected = functional.scaled_dot_product_attention(
        queries,
        case.keys[0].transpose(0, 1),
        case.values[0].transpose(0, 1),
        is_causal=True,
        scale=SCALE,
        enable_gqa=True,
    )

    assert_agree(attend(case), expected.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("head_dim", [2, 64, 80])
@pytest.mark.parametrize("page_size", [1, 16])
def test_page_sizes_and_head_sizes_are_free(page_size: int, head_dim: int) -> None:
    case = ragged([(1, 17), (1, 30), (5, 16)], Shape(head_dim=head_dim, page_size=page_size))

    assert_agree(attend(case), expected_attention(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_of_decoding_sequences_equals_each_alone(dtype: torch.dtype) -> None:
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 64]
    case = ragged([(1, kv_len) for kv_len in lengths], dtype=dtype)

    together = attend(case)

    for s in range(len(lengths)):
        meta = replace(
            case.meta,
            page_table=case.meta.page_table[s : s + 1],
            q_start=torch.tensor([0, 1], dtype=torch.int32),
            kv_len=case.meta.kv_len[s : s + 1],
        )
        alone = attend(replace(case, meta=meta, q=case.q[s : s + 1]))
        assert_agree(alone, together[s : s + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunk_sizes_do_not_change_a_row(chunk: int, dtype: torch.dtype) -> None:
    whole = ragged([(100, 100)], dtype=dtype)
    expected = attend(whole)
    got = torch.full_like(expected, torch.nan)

    for start in range(0, 100, chunk):
        end = min(start + chunk, 100)
        meta = replace(
            whole.meta,
            q_start=torch.tensor([0, end - start], dtype=torch.int32),
            kv_len=torch.tensor([end], dtype=torch.int32),
        )
        got[start:end] = attend(replace(whole, meta=meta, q=whole.q[start:end]))

    assert_agree(got, expected)


def test_long_decoding_sequences_are_served_beside_short_ones() -> None:
    shape = Shape(page_size=1, num_pages=1200)
    lengths = [150, 3, 70, 64, 65, 128, 127, 129, 150, 90, 4]
    case = ragged([(1, kv_len) for kv_len in lengths], shape)

    assert_agree(attend(case), expected_attention(case))


@pytest.mark.parametrize("order", [[5, 6, 7, 8], [5, 7, 6, 8], [8, 7, 6, 5], [1, 3, 5, 7]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_pages_in_a_row_are_read_like_scattered_ones(order: list[int], dtype: torch.dtype) -> None:
    case = ragged([(2, 14)])
    scattered = case.meta.page_table[0, :4].to(torch.int64)
    kv = poisoned_layer(case.shape, dtype)
    for target, source in ((kv.keys, case.kv.keys), (kv.values, case.kv.values)):
        target[order] = source[scattered].mul(30).round().to(dtype)
    for scales in (kv.key_scales, kv.value_scales):
        if scales is not None:
            scales[order] = 1 / 30
    coarse = KVLayer(case.kv.keys.mul(30).round(), case.kv.values.mul(30).round())
    if dtype is torch.int8:
        coarse = KVLayer(coarse.keys / 30, coarse.values / 30)
    meta = replace(case.meta, page_table=torch.tensor([order], dtype=torch.int32))

    assert_agree(attend(replace(case, kv=kv, meta=meta)), attend(replace(case, kv=coarse)))


def test_what_lies_behind_kv_len_never_reaches_a_result() -> None:
    clean = ragged(MIXED)
    zeroed = replace(
        clean, kv=KVLayer(clean.kv.keys.nan_to_num(0.0), clean.kv.values.nan_to_num(0.0))
    )

    assert clean.kv.keys.isnan().any()
    assert torch.equal(attend(clean), attend(zeroed))


def test_padding_rows_become_zero_and_sequences_without_rows_change_nothing() -> None:
    case = ragged([(2, 6), (1, 3)])
    meta = replace(
        case.meta,
        page_table=torch.cat((case.meta.page_table, torch.zeros(3, 3, dtype=torch.int32))),
        q_start=torch.tensor([0, 2, 3, 3, 3, 3], dtype=torch.int32),
        kv_len=torch.tensor([6, 3, 0, 0, 0], dtype=torch.int32),
    )
    q = torch.cat((case.q, torch.full_like(case.q, torch.nan)))

    padded = attend(replace(case, meta=meta, q=q))

    assert torch.equal(padded[:3], attend(case))
    assert torch.equal(padded[3:], torch.zeros(3, q.shape[1]))


def test_a_batch_without_sequences_writes_zeros_only() -> None:
    case = ragged([])

    out = attend(replace(case, q=torch.ones(2, case.q.shape[1])))

    assert torch.equal(out, torch.zeros_like(out))


def test_a_forward_without_rows_writes_nothing() -> None:
    shape, meta, kv = Shape(), row_meta([], [], 4), poisoned_layer(Shape(), torch.float32)
    q, k = torch.empty(0, shape.heads * shape.head_dim), torch.empty(0, 2 * shape.head_dim)
    rope = rope_table(8, shape.head_dim, torch.float32)

    ReferenceOps().rope_and_write_kv(q, k, k, rope, meta, kv, out=torch.empty_like(q))

    assert kv.keys.isnan().all()


def rope_table(max_positions: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


def turn_as_complex_numbers(x: Tensor, positions: Tensor, head_dim: int) -> Tensor:
    """x `[rows, heads, head_dim]`: dimensions i and i + head_dim / 2 are one complex number."""
    real, imaginary = x.double().chunk(2, dim=-1)
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = positions.double()[:, None, None] * frequencies
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def write_case(kv_dtype: torch.dtype) -> tuple[Shape, RowMeta, KVLayer]:
    shape, sequences = Shape(), [(3, 9), (1, 17), (5, 5)]
    tables = page_tables(sequences, shape, torch.Generator().manual_seed(5))
    return shape, row_meta(sequences, tables, shape.page_size), poisoned_layer(shape, kv_dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_queries_and_keys_turn_like_complex_numbers_and_values_do_not(dtype: torch.dtype) -> None:
    shape, meta, kv = write_case(dtype)
    num_rows, generator = len(meta.positions), torch.Generator().manual_seed(6)
    q, k, v = (
        torch.randn(num_rows, heads, shape.head_dim, generator=generator).to(dtype)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    k_before, out = k.clone(), torch.full_like(q.flatten(1), torch.nan)

    rope = rope_table(32, shape.head_dim, torch.promote_types(dtype, torch.float32))
    ops = ReferenceOps(dtype)
    ops.rope_and_write_kv(q.flatten(1), k.flatten(1), v.flatten(1), rope, meta, kv, out=out)

    written_keys = kv.keys.flatten(0, 1)[meta.write_slots]
    written_values = kv.values.flatten(0, 1)[meta.write_slots]
    assert_agree(out.view_as(q), turn_as_complex_numbers(q, meta.positions, shape.head_dim))
    assert_agree(written_keys, turn_as_complex_numbers(k, meta.positions, shape.head_dim))
    assert torch.equal(written_values, v)
    assert torch.equal(k, k_before)
    # nothing but those slots was written
    assert int(kv.keys.isnan().logical_not().any(-1).any(-1).sum()) == num_rows

    flat_q = q.flatten(1)
    ops.rope_and_write_kv(flat_q, k.flatten(1), v.flatten(1), rope, meta, kv, out=flat_q)
    assert torch.equal(flat_q, out)


def test_an_int8_cache_is_read_back_within_half_a_step_of_each_heads_scale() -> None:
    shape, meta, kv = write_case(torch.int8)
    generator = torch.Generator().manual_seed(7)
    k, v = torch.randn(2, len(meta.positions), shape.kv_heads, shape.head_dim, generator=generator)
    # heads of very different size, one of them zero
    v[:, 1] *= 1e-3
    v[0, 0] = 0.0
    rope = torch.cat((torch.ones(32, 8), torch.zeros(32, 8)), dim=-1)
    q = torch.zeros(len(meta.positions), shape.heads * shape.head_dim)

    ReferenceOps().rope_and_write_kv(
        q, k.flatten(1), v.flatten(1), rope, meta, kv, out=torch.empty_like(q)
    )

    assert kv.key_scales is not None
    assert kv.value_scales is not None
    for rows, data, scales in ((k, kv.keys, kv.key_scales), (v, kv.values, kv.value_scales)):
        read = (data * scales.unsqueeze(-1)).flatten(0, 1)[meta.write_slots]
        step = rows.abs().amax(-1, keepdim=True) / 127
        assert ((read - rows).abs() <= 0.5001 * step).all()


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float16, torch.bfloat16])
def test_attention_through_a_smaller_cache_dtype_stays_near_the_exact_result(
    kv_dtype: torch.dtype,
) -> None:
    shape, sequences = Shape(), [(1, 17), (1, 20), (5, 5), (3, 30)]
    exact = ragged(sequences, shape)
    tables = [
        table[: -(-n // 4)].tolist()
        for table, (_, n) in zip(exact.meta.page_table, sequences, strict=True)
    ]
    kv = poisoned_layer(shape, kv_dtype)
    written = row_meta([(n, n) for _, n in sequences], tables, shape.page_size)
    rope = torch.cat((torch.ones(32, 8), torch.zeros(32, 8)), dim=-1)
    no_q = torch.zeros(len(written.positions), shape.heads * shape.head_dim)
    ReferenceOps().rope_and_write_kv(
        no_q,
        torch.cat(exact.keys).flatten(1),
        torch.cat(exact.values).flatten(1),
        rope,
        written,
        kv,
        out=torch.empty_like(no_q),
    )

    error = (attend(replace(exact, kv=kv)) - attend(exact)).abs().max()

    # a step of int8 is 1/127 of the largest of 16 normal values, of bfloat16 1/256 of each
    assert 0 < error < 0.05
