"""Attention and what writes its pages, kernel against reference, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from chatrt_kernels.kv_formats import KVFormat
from chatrt_kernels.ops import KVLayer, RowMeta
from chatrt_kernels.reference import ReferenceOps
from chatrt_kernels.triton.tiling import decode_tiling
from tests.chatrt_kernels.ragged import Ragged, Shape, page_tables, ragged, row_meta
from tests.chatrt_kernels.tolerance import assert_agree
from tests.chatrt_kernels.triton_support import KV_DTYPES, poisoned_pages, triton_ops
from tests.chatrt_kernels.weights_support import same_bits

if TYPE_CHECKING:
    from chatrt_kernels.triton.ops import TritonOps

SCALE = 0.25
# decode alone, verify, a prompt, a chunk behind a prefix, page size and its neighbours, none; more
# rows than a tile, positions on both sides of a split
MIXED = [(1, 1), (1, 63), (4, 4), (3, 3), (5, 5), (0, 0), (4, 21), (1, 5), (0, 9), (9, 64)]
DEEP = [(1, 256), (5, 257), (1, 300), (3, 513)]
WIDE = Shape(heads=6, kv_heads=2, head_dim=64, page_size=16, num_pages=128)
PREFILL = 4  # rows from which on large tiles are taken


def attend(ops: TritonOps | ReferenceOps, case: Ragged, kv: KVLayer | None = None) -> Tensor:
    out = torch.full_like(case.q, torch.nan)
    ops.paged_attention(case.q, case.meta, kv or case.kv, SCALE, out=out)
    return out


def expected(case: Ragged) -> Tensor:
    wide = replace(
        case,
        q=case.q.float(),
        kv=KVLayer(case.kv.keys.float(), case.kv.values.float()),
    )
    return attend(ReferenceOps(), wide)


@pytest.mark.parametrize("even_rows", [64, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (8, 1)])
def test_ragged_rows_attend_as_the_reference_says(
    heads: int, kv_heads: int, dtype: torch.dtype, even_rows: int
) -> None:
    case = ragged(MIXED, Shape(heads=heads, kv_heads=kv_heads), dtype)
    assert_agree(attend(triton_ops(dtype, even_rows), case), expected(case))


@pytest.mark.parametrize("even_rows", [64, PREFILL], ids=["decode", "prefill"])
def test_positions_behind_a_split_are_summed_with_those_before_it(even_rows: int) -> None:
    case = ragged(DEEP, WIDE)
    assert_agree(attend(triton_ops(even_rows=even_rows), case), expected(case))


@pytest.mark.parametrize(("page_size", "head_dim"), [(1, 16), (16, 80), (4, 128)])
def test_page_sizes_and_head_sizes_are_free(page_size: int, head_dim: int) -> None:
    shape = Shape(head_dim=head_dim, page_size=page_size)
    case = ragged([(1, 17), (1, 30), (5, 16)], shape)
    assert_agree(attend(triton_ops(), case), expected(case))


def test_a_prompt_attends_as_the_library_does_on_contiguous_keys_and_values() -> None:
    case = ragged([(63, 63)], WIDE)
    queries = case.q.view(63, WIDE.heads, -1).transpose(0, 1)
    keys, values = case.keys[0].transpose(0, 1), case.values[0].transpose(0, 1)
    plain = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=SCALE, enable_gqa=True
    )
    assert_agree(attend(triton_ops(), case), plain.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_verified_and_among_others(dtype: torch.dtype) -> None:
    case = ragged([(8, 300), (1, 40), (3, 64)], WIDE, dtype)
    together = attend(triton_ops(dtype), case)
    for row in range(8):
        alone = replace(
            case.meta,
            positions=case.meta.positions[row : row + 1],
            page_table=case.meta.page_table[:1],
            q_start=torch.tensor([0, 1], dtype=torch.int32),
            kv_len=torch.tensor([293 + row], dtype=torch.int32),
        )
        got = attend(triton_ops(dtype), replace(case, meta=alone, q=case.q[row : row + 1]))
        assert same_bits(got, together[row : row + 1]), row


def test_how_many_splits_are_looked_at_changes_no_bit() -> None:
    case = ragged([(5, 200)], WIDE)
    assert same_bits(
        attend(triton_ops().for_splits(1), case), attend(triton_ops().for_splits(3), case)
    )


def test_splits_are_fixed_by_the_longest_sequence_that_may_come() -> None:
    assert decode_tiling(8192).split == decode_tiling(32_768).split == 256
    assert decode_tiling(32_769).split == 512
    assert decode_tiling(131_072).num_splits(131_072) == 128


class Written:
    """Rows written by both executors, into pages of one format."""

    def __init__(self, dtype: torch.dtype, shape: Shape, *, kv_heads_only: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)
        sequences = [(21, 21), (1, 40), (4, 33)]
        tables = page_tables(sequences, shape, generator)
        self.meta: RowMeta = row_meta(sequences, tables, shape.page_size)
        rows = len(self.meta.positions)
        widths = (0 if kv_heads_only else shape.heads, shape.kv_heads, shape.kv_heads)
        self.q, self.k, self.v = (
            torch.randn(rows, count * shape.head_dim, generator=generator) for count in widths
        )
        angles = torch.rand(64, shape.head_dim // 2, generator=generator) * 6
        self.rope = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.theirs, self.ours = poisoned_pages(shape, dtype), poisoned_pages(shape, dtype)
        self.expected, self.out = torch.empty_like(self.q), torch.empty_like(self.q)
        arguments = (self.q, self.k, self.v, self.rope, self.meta)
        ReferenceOps().rope_and_write_kv(*arguments, self.theirs, out=self.expected)
        triton_ops().rope_and_write_kv(*arguments, self.ours, out=self.out)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96])
def test_rows_are_rotated_and_written_as_the_reference_does(
    dtype: torch.dtype, head_dim: int
) -> None:
    done = Written(dtype, replace(WIDE, head_dim=head_dim))
    assert_agree(done.out, done.expected)
    for ours, theirs in (
        (done.ours.keys, done.theirs.keys),
        (done.ours.values, done.theirs.values),
    ):
        if KVFormat.of(dtype) is KVFormat.FLOAT:
            written = theirs.isnan().logical_not()
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert_agree(ours[written], theirs[written])
        else:
            # a code may differ by one where a rotated number lies between two of them
            codes, others = ours.view(torch.uint8).int(), theirs.view(torch.uint8).int()
            assert (codes != others).float().mean() < 0.01
    for scales, expected_scales in (
        (done.ours.key_scales, done.theirs.key_scales),
        (done.ours.value_scales, done.theirs.value_scales),
    ):
        if scales is not None:
            assert expected_scales is not None
            torch.testing.assert_close(
                scales, expected_scales, rtol=1e-3, atol=1e-3, equal_nan=True
            )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("even_rows", [64, PREFILL], ids=["decode", "prefill"])
def test_pages_of_every_format_are_read_as_the_reference_reads_them(
    dtype: torch.dtype, even_rows: int
) -> None:
    case = ragged([(21, 21), (1, 40), (4, 33)], WIDE)
    done = Written(dtype, WIDE)
    read, filled = replace(case, meta=done.meta), _filled(done.theirs)
    ours = attend(triton_ops(even_rows=even_rows), read, filled)
    assert_agree(ours, attend(ReferenceOps(), read, filled))


def _filled(kv: KVLayer) -> KVLayer:
    """The pages with numbers where nothing was written: any bits may lie behind a sequence."""
    assert kv.key_scales is not None
    assert kv.value_scales is not None
    return replace(
        kv, key_scales=kv.key_scales.nan_to_num(0.01), value_scales=kv.value_scales.nan_to_num(0.01)
    )


def test_who_wants_keys_and_values_only_gives_no_queries() -> None:
    done = Written(torch.float32, WIDE, kv_heads_only=True)
    written = done.theirs.keys.isnan().logical_not()
    assert_agree(done.ours.keys[written], done.theirs.keys[written])


def test_a_row_with_a_negative_slot_is_written_nowhere() -> None:
    done = Written(torch.int8, WIDE)
    before = done.ours.keys.clone(), done.ours.values.clone()
    nowhere = replace(done.meta, write_slots=torch.full_like(done.meta.write_slots, -1))
    triton_ops().rope_and_write_kv(
        done.q * 3, done.k * 3, done.v * 3, done.rope, nowhere, done.ours, out=done.out
    )
    assert torch.equal(done.ours.keys, before[0])
    assert torch.equal(done.ours.values, before[1])
