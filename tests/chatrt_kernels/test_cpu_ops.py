"""The native ops besides products: against the reference, and bit for bit against themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.ops import KVLayer
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt_kernels.ragged import Ragged, Shape, poisoned_layer, ragged, row_meta
from tests.chatrt_kernels.tolerance import assert_agree
from tests.chatrt_kernels.weights_support import same_bits

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from chatrt_kernels.ops import RowMeta

SCALE = 0.3
WIDTHS = (1, 7, 15, 16, 17, 33, 64, 100)
# contexts around a page of 16, a split of 128 keys, and several splits; decode, verify, prefill
MIXED = [(1, 1), (1, 15), (2, 16), (5, 17), (0, 40), (1, 127), (9, 128), (1, 129), (3, 300)]
LONG = [*MIXED, (1, 700)]
# head_dim with heads and KV heads: ratios 1, 3, 4 and 8
HEADS = [(8, 2, 2), (16, 6, 2), (24, 4, 1), (64, 9, 3), (80, 8, 1), (128, 4, 4), (64, 8, 2)]


@pytest.fixture(scope="module")
def executors(native_library: Path) -> list[NativeOps]:
    """The kernels of one path on one, two and three threads; from two on, splits are tasks."""
    library = NativeLibrary(native_library)
    return [NativeOps(library, num_threads) for num_threads in (1, 2, 3)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


def row_tensors(meta: RowMeta, rows: range) -> dict[str, Tensor]:
    """What a batch of only those rows has for each of its rows."""
    names = ("token_ids", "positions", "write_slots")
    return {name: getattr(meta, name)[rows.start : rows.stop] for name in names}


def by_heads(kv: KVLayer) -> KVLayer:
    """The same pages as the native kernels want them: see `KVLayout.HEADS`."""
    keys, values = kv.keys.permute(0, 2, 3, 1), kv.values.permute(0, 2, 1, 3)
    whole = torch.contiguous_format  # also where a dimension of size 1 leaves strides open
    return KVLayer(
        keys.clone(memory_format=whole).permute(0, 3, 1, 2),
        values.clone(memory_format=whole).permute(0, 2, 1, 3),
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_is_the_references_and_may_write_in_place(
    executors: list[NativeOps], width: int
) -> None:
    x, weight = randn(17, width), randn(width, seed=1)
    x[3] *= 1e4
    x[4] = 0
    expected, out = poisoned(17, width), poisoned(17, width)
    ReferenceOps().rms_norm(x, weight, 1e-5, out=expected)

    executors[0].rms_norm(x, weight, 1e-5, out=out)
    assert_agree(out, expected)
    for row in range(17):
        alone = poisoned(1, width)
        executors[1].rms_norm(x[row : row + 1], weight, 1e-5, out=alone)
        assert same_bits(alone[0], out[row])
    executors[2].rms_norm(x, weight, 1e-5, out=x)
    assert same_bits(x, out)


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_and_gates_are_the_references_and_may_write_in_place(
    executors: list[NativeOps], width: int
) -> None:
    x, y = randn(17, width) * 5, randn(17, width, seed=1)
    gated, out = poisoned(17, width), poisoned(17, width)
    ReferenceOps().swiglu(x, y, out=gated)

    executors[0].add(x, y, out=out)
    assert same_bits(out, x + y)
    executors[0].swiglu(x, y, out=out)
    assert_agree(out, gated)
    for row in range(17):
        alone = poisoned(1, width)
        executors[1].swiglu(x[row : row + 1], y[row : row + 1], out=alone)
        assert same_bits(alone[0], out[row])
    total = x + y
    executors[2].swiglu(x, y, out=y)
    assert same_bits(y, out)
    executors[2].add(x, total - x, out=x)
    assert_agree(x, total)


def test_a_gate_far_from_zero_neither_overflows_nor_turns_to_nan(
    executors: list[NativeOps],
) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0, 1e30]])
    expected, out = torch.empty_like(gate), poisoned(1, 9)
    ReferenceOps().swiglu(gate, torch.ones(1, 9), out=expected)

    executors[0].swiglu(gate, torch.ones(1, 9), out=out)

    assert out.isfinite().all()
    # so far below zero the exact value is nothing; exp is kept from overflowing instead
    torch.testing.assert_close(out[:, 1:], expected[:, 1:], rtol=2e-5, atol=1e-30)


def test_columns_of_wider_buffers_are_rows_too_and_the_rest_stays(
    executors: list[NativeOps],
) -> None:
    wide = poisoned(7, 200)
    x, y, out = wide[:, :33], wide[:, 50:83], wide[:, 100:133]
    x.copy_(randn(7, 33))
    y.copy_(randn(7, 33, seed=1))
    executors[1].add(x, y, out=out)
    assert same_bits(out, x + y)
    rows = torch.tensor([3, 0, 3, 6])
    out.fill_(torch.nan)
    executors[1].gather_rows(x, rows, out=out[:4])
    assert same_bits(out[:4], x[rows])
    assert out[4:].isnan().all()
    normed, weight = poisoned(7, 33), randn(33, seed=2)
    executors[0].rms_norm(x.contiguous(), weight, 1e-5, out=normed)
    executors[0].rms_norm(x, weight, 1e-5, out=out)
    assert same_bits(out, normed)
    assert wide[:, 33:50].isnan().all()
    assert wide[:, 83:100].isnan().all()
    assert wide[:, 133:].isnan().all()


def test_gathering_no_rows_writes_nothing(executors: list[NativeOps]) -> None:
    executors[1].gather_rows(
        randn(3, 16), torch.empty(0, dtype=torch.int64), out=torch.empty(0, 16)
    )


def rope_table(max_positions: int, head_dim: int) -> Tensor:
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def written(
    ops: NativeOps | ReferenceOps, case: Ragged, rows: tuple[Tensor, Tensor, Tensor], kv: KVLayer
) -> Tensor:
    q, k, v = rows
    out = torch.full_like(q, torch.nan)
    rope = rope_table(704, case.shape.head_dim)
    ops.rope_and_write_kv(q, k, v, rope, case.meta, kv, out=out)
    return out


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), HEADS)
def test_rotated_queries_keys_and_values_are_the_references_and_land_in_their_slots(
    executors: list[NativeOps], head_dim: int, heads: int, kv_heads: int, page_size: int
) -> None:
    shape = Shape(heads, kv_heads, head_dim, page_size)
    case = mixed(shape, torch.float32)
    num_rows = len(case.meta.positions)
    k, v = randn(2, num_rows, kv_heads * head_dim, seed=3)
    before = k.clone()
    expected_kv = poisoned_layer(shape, torch.float32)
    expected = written(ReferenceOps(), case, (case.q, k, v), expected_kv)
    layers = [by_heads(poisoned_layer(shape, dtype)) for dtype in (torch.float32, torch.float16)]

    for ops, kv in zip(executors, layers, strict=False):
        assert_agree(written(ops, case, (case.q, k, v), kv), expected)
    single, half = layers
    slots = case.meta.write_slots
    assert_agree(single.keys.flatten(0, 1)[slots], expected_kv.keys.flatten(0, 1)[slots])
    assert same_bits(single.values.flatten(0, 1)[slots], v.view(num_rows, kv_heads, head_dim))
    # half precision is what single precision rounds to, and nothing but the slots is written
    for found, wanted in ((half.keys, single.keys), (half.values, single.values)):
        unwritten = wanted.isnan()
        assert torch.equal(found.isnan(), unwritten)
        assert torch.equal(found[~unwritten], wanted[~unwritten].half())
        assert int((~unwritten).all(-1).all(-1).sum()) == num_rows
    assert torch.equal(k, before)


def test_rotation_may_write_in_place_and_a_row_does_not_see_the_others(
    executors: list[NativeOps],
) -> None:
    shape = Shape(heads=9, kv_heads=3, head_dim=64, page_size=16)
    case = mixed(shape, torch.float32)
    num_rows = len(case.meta.positions)
    k, v = randn(2, num_rows, 3 * 64, seed=4)
    together_kv, alone_kv = (by_heads(poisoned_layer(shape, torch.float16)) for _ in range(2))
    together = written(executors[2], case, (case.q, k, v), together_kv)
    for row in range(num_rows):
        one = replace(case.meta, **row_tensors(case.meta, range(row, row + 1)))
        q = case.q[row : row + 1].clone()
        rows = (k[row : row + 1], v[row : row + 1])
        executors[0].rope_and_write_kv(q, *rows, rope_table(704, 64), one, alone_kv, out=q)
        assert same_bits(q[0], together[row])
    assert same_bits(alone_kv.keys, together_kv.keys)
    assert same_bits(alone_kv.values, together_kv.values)


def test_keys_and_values_are_written_without_any_queries(executors: list[NativeOps]) -> None:
    shape = Shape(heads=9, kv_heads=3, head_dim=64, page_size=16)
    case = mixed(shape, torch.float32)
    k, v = randn(2, len(case.meta.positions), 3 * 64, seed=6)
    layers = [poisoned_layer(shape, torch.float32) for _ in range(3)]
    native = [by_heads(layer) for layer in layers]
    written(executors[1], case, (case.q, k, v), native[0])
    written(executors[2], case, (case.q[:, :0], k, v), native[1])
    assert same_bits(native[1].keys, native[0].keys)
    assert same_bits(native[1].values, native[0].values)
    written(ReferenceOps(), case, (case.q, k, v), layers[0])
    written(ReferenceOps(), case, (case.q[:, :0], k, v), layers[1])
    assert same_bits(layers[1].keys, layers[0].keys)
    assert same_bits(layers[1].values, layers[0].values)


def test_a_value_beyond_half_precision_is_the_largest_one_and_spoils_no_earlier_row(
    executors: list[NativeOps],
) -> None:
    shape = Shape(heads=3, kv_heads=3, head_dim=64, page_size=16)
    case = mixed(shape, torch.float32)
    k, v = randn(2, len(case.meta.positions), 3 * 64, seed=5)
    last = int(case.meta.q_start[1]) - 1
    v[last, 0], k[last, 1], v[last, 2] = 1e9, -1e9, torch.nan
    kv = by_heads(poisoned_layer(shape, torch.float16))
    written(executors[0], case, (case.q, k, v), kv)
    slots = case.meta.write_slots
    assert kv.values.flatten(0, 1)[slots[last], 0, 0] == torch.finfo(torch.float16).max
    assert kv.values.flatten(0, 1)[slots].isfinite().all()
    assert kv.keys.flatten(0, 1)[slots].isfinite().all()


@cache
def mixed(shape: Shape, dtype: torch.dtype) -> Ragged:
    case = ragged(LONG, shape, dtype)
    return replace(case, q=case.q.float())


def attend(ops: NativeOps | ReferenceOps, case: Ragged, meta: RowMeta | None = None) -> Tensor:
    """Rows of `meta` (default: all); the first of them is the first of `case.q`."""
    meta = meta or case.meta
    out = torch.full_like(case.q, torch.nan)
    ops.paged_attention(case.q, meta, case.kv, SCALE, out=out)
    return out


def native_case(case: Ragged) -> Ragged:
    return replace(case, kv=by_heads(case.kv))


def part(case: Ragged, sequence: int, rows: range) -> Ragged:
    """Some rows of one sequence as a batch of their own, on the same pages."""
    first = int(case.meta.q_start[sequence])
    num_rows, kv_len = case.sequences[sequence]
    chosen = range(first + rows.start, first + rows.stop)
    meta = replace(
        case.meta,
        **row_tensors(case.meta, chosen),
        page_table=case.meta.page_table[sequence : sequence + 1],
        q_start=torch.tensor([0, len(rows)], dtype=torch.int32),
        kv_len=torch.tensor([kv_len - num_rows + rows.stop], dtype=torch.int32),
    )
    return replace(case, meta=meta, q=case.q[chosen.start : chosen.stop])


@pytest.mark.parametrize(
    ("page_size", "dtype"), [(16, torch.float16), (32, torch.float16), (16, torch.float32)]
)
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), HEADS)
def test_ragged_attention_is_the_references_on_any_number_of_threads(
    executors: list[NativeOps],
    head_dim: int,
    heads: int,
    kv_heads: int,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    case = mixed(Shape(heads, kv_heads, head_dim, page_size), dtype)
    native = native_case(case)

    found = [attend(ops, native) for ops in executors]

    assert_agree(found[0], attend(ReferenceOps(), case))
    assert same_bits(found[1], found[0])
    assert same_bits(found[2], found[0])


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), HEADS)
def test_a_row_has_the_same_bits_alone_and_beside_short_and_long_sequences(
    executors: list[NativeOps], head_dim: int, heads: int, kv_heads: int
) -> None:
    case = native_case(mixed(Shape(heads, kv_heads, head_dim, 16), torch.float16))
    together = attend(executors[0], case)
    for sequence, (num_rows, _) in enumerate(case.sequences):
        first = int(case.meta.q_start[sequence])
        for row in range(num_rows):
            for ops in executors:
                alone = attend(ops, part(case, sequence, range(row, row + 1)))
                assert same_bits(alone[0], together[first + row]), (sequence, row)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(16, 6, 2), (64, 9, 3), (24, 8, 1)])
def test_chunks_give_the_bits_of_one_prefill(
    executors: list[NativeOps], head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    case = ragged([(300, 300)], Shape(heads, kv_heads, head_dim, 16), dtype)
    case = native_case(replace(case, q=case.q.float()))
    whole = attend(executors[0], case)
    assert not whole.isnan().any()
    for chunk in (1, 7, 16, 64, 129, 300):
        ops = executors[chunk % 3]
        parts = [
            attend(ops, part(case, 0, range(start, min(start + chunk, 300))))
            for start in range(0, 300, chunk)
        ]
        assert same_bits(torch.cat(parts), whole), chunk


def test_what_lies_behind_kv_len_never_reaches_a_result(executors: list[NativeOps]) -> None:
    clean = mixed(Shape(9, 3, 64, 16), torch.float16)
    kv = KVLayer(clean.kv.keys.nan_to_num(0.0), clean.kv.values.nan_to_num(0.0))

    assert clean.kv.keys.isnan().any()
    for ops in executors:
        zeroed = attend(ops, native_case(replace(clean, kv=kv)))
        assert same_bits(attend(ops, native_case(clean)), zeroed)


def test_padding_rows_stay_as_they_are_and_sequences_without_rows_change_nothing(
    executors: list[NativeOps],
) -> None:
    case = native_case(ragged([(2, 6), (1, 3)], Shape(page_size=16)))
    table = torch.zeros(3, case.meta.page_table.shape[1], dtype=torch.int32)
    meta = replace(
        case.meta,
        token_ids=torch.zeros(6, dtype=torch.int64),
        page_table=torch.cat((case.meta.page_table, table)),
        q_start=torch.tensor([0, 2, 3, 3, 3, 3], dtype=torch.int32),
        kv_len=torch.tensor([6, 3, 0, 0, 0], dtype=torch.int32),
    )
    padded = replace(case, q=torch.cat((case.q, poisoned(*case.q.shape))))
    for ops in executors:
        found = attend(ops, padded, meta)
        assert same_bits(found[:3], attend(ops, case))
        assert found[3:].isnan().all()


def test_very_unequal_scores_leave_the_largest_alone(executors: list[NativeOps]) -> None:
    case = ragged([(1, 300)], Shape(heads=2, kv_heads=1, head_dim=16, page_size=16))
    # one key in the second split outweighs the rest by e^1000
    slot = int(case.meta.page_table[0, 200 // 16]), 200 % 16
    case.kv.keys[slot] = case.q[0, :16] * 1000
    case.q[0, 16:] = case.q[0, :16]
    for ops in executors:
        found = attend(ops, native_case(case))
        assert_agree(found.view(2, 16), case.kv.values[slot].expand(2, 16))


def test_a_forward_without_rows_writes_nothing(executors: list[NativeOps]) -> None:
    shape, meta = Shape(page_size=16), row_meta([], [], 16)
    kv = by_heads(poisoned_layer(shape, torch.float16))
    q, k = torch.empty(0, shape.heads * shape.head_dim), torch.empty(0, 2 * shape.head_dim)
    for ops in executors:
        out = torch.empty_like(q)
        ops.rope_and_write_kv(q, k, k, rope_table(8, shape.head_dim), meta, kv, out=out)
        ops.paged_attention(q, meta, kv, SCALE, out=out)
    assert kv.keys.isnan().all()
