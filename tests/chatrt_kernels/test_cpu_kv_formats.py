"""Pages of 8 and 4 bits on the native kernels: written and read as the reference does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.kv_formats import KVFormat
from chatrt_kernels.ops import KVLayer
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt_kernels.ragged import Shape, page_tables, ragged, row_meta
from tests.chatrt_kernels.tolerance import assert_agree
from tests.chatrt_kernels.weights_support import same_bits

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from chatrt_kernels.ops import RowMeta

SCALE = 0.2
FORMATS = [torch.int8, torch.uint8]
# decode and verify around a page and a split of 128 keys, a prompt, and none
SEQUENCES = [(1, 1), (21, 21), (1, 15), (5, 17), (0, 40), (1, 128), (4, 129), (3, 300)]
SHAPES = [Shape(heads=9, kv_heads=3, head_dim=64, page_size=16, num_pages=64)]
SHAPES.append(Shape(heads=4, kv_heads=1, head_dim=128, page_size=32, num_pages=40))


@pytest.fixture(scope="module")
def executors(native_library: Path) -> list[NativeOps]:
    """The kernels of one path on one and two threads; on two, splits are tasks."""
    library = NativeLibrary(native_library)
    return [NativeOps(library, num_threads) for num_threads in (1, 2)]


def pages(shape: Shape, dtype: torch.dtype) -> KVLayer:
    """Unwritten pages head by head: any code, and scales that are no numbers."""
    kind = KVFormat.of(dtype)
    width = kind.stored_width(shape.head_dim)
    heads = (shape.num_pages, shape.kv_heads)
    keys = torch.full((*heads, width, shape.page_size), 0x7F, dtype=torch.uint8).view(dtype)
    values = torch.full((*heads, shape.page_size, width), 0x7F, dtype=torch.uint8).view(dtype)
    inside = kind.scale_shape(shape.head_dim) or ()
    scales = [
        torch.full((*heads, *inside, shape.page_size), torch.nan, dtype=kind.scale_dtype)
        for _ in range(2)
    ]
    return KVLayer(
        keys.permute(0, 3, 1, 2),
        values.permute(0, 2, 1, 3),
        *(one.movedim(-1, 1) for one in scales),
    )


class Filled:
    """Sequences whose keys and values have all been written, by the executor at hand."""

    def __init__(self, ops: NativeOps | ReferenceOps, shape: Shape, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)
        self.shape, self.kv = shape, pages(shape, dtype)
        self.tables = page_tables(SEQUENCES, shape, generator)
        whole = [(kv_len, kv_len) for _, kv_len in SEQUENCES]
        meta = row_meta(whole, self.tables, shape.page_size)
        rows = len(meta.positions)
        k, v = torch.randn(2, rows, shape.kv_heads * shape.head_dim, generator=generator)
        k[5] = 0
        v[6] *= 1000
        angles = torch.rand(300, shape.head_dim // 2, generator=generator)
        rope = torch.cat((angles.cos(), angles.sin()), dim=1)
        none = torch.empty(rows, 0)
        ops.rope_and_write_kv(none, k, v, rope, meta, self.kv, out=none.clone())

    def meta(self) -> RowMeta:
        return row_meta(SEQUENCES, self.tables, self.shape.page_size)


def attend(ops: NativeOps | ReferenceOps, q: Tensor, meta: RowMeta, kv: KVLayer) -> Tensor:
    out = torch.full_like(q, torch.nan)
    ops.paged_attention(q, meta, kv, SCALE, out=out)
    return out


def queries(shape: Shape, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(rows, shape.heads * shape.head_dim, generator=generator)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.head_dim}")
def test_pages_are_written_as_the_reference_writes_them(
    executors: list[NativeOps], shape: Shape, dtype: torch.dtype
) -> None:
    ours, theirs = Filled(executors[0], shape, dtype).kv, Filled(ReferenceOps(), shape, dtype).kv
    for got, expected in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        # a code may differ by one where a rotated number lies between two of them
        different = got.view(torch.uint8) != expected.view(torch.uint8)
        assert different.float().mean() < 0.005
    for scales, expected_scales in (
        (ours.key_scales, theirs.key_scales),
        (ours.value_scales, theirs.value_scales),
    ):
        assert scales is not None
        assert expected_scales is not None
        torch.testing.assert_close(scales, expected_scales, rtol=2e-3, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_queries_are_turned_as_the_keys_they_meet_are(
    executors: list[NativeOps], dtype: torch.dtype, head_dim: int
) -> None:
    shape = replace(SHAPES[0], head_dim=head_dim)
    tables = page_tables(SEQUENCES, shape, torch.Generator().manual_seed(2))
    meta = row_meta(SEQUENCES, tables, shape.page_size)
    rows = len(meta.positions)
    q, k = queries(shape, rows), torch.ones(rows, shape.kv_heads * head_dim)
    angles = torch.rand(300, head_dim // 2, generator=torch.Generator().manual_seed(4))
    rope = torch.cat((angles.cos(), angles.sin()), dim=1)
    ours, theirs = torch.empty_like(q), torch.empty_like(q)
    for ops, out in ((executors[0], ours), (ReferenceOps(), theirs)):
        ops.rope_and_write_kv(q, k, k, rope, meta, pages(shape, dtype), out=out)
    assert_agree(ours, theirs)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.head_dim}")
def test_pages_are_read_as_the_reference_reads_them(
    executors: list[NativeOps], shape: Shape, dtype: torch.dtype
) -> None:
    filled = Filled(executors[0], shape, dtype)
    meta = filled.meta()
    q = queries(shape, len(meta.positions))
    expected = attend(ReferenceOps(), q, meta, filled.kv)
    for ops in executors:
        # numbers of the one large value are of order 1000
        assert_agree(attend(ops, q, meta, filled.kv) / 100, expected / 100)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_row_has_the_same_bits_alone_verified_and_on_any_threads(
    executors: list[NativeOps], dtype: torch.dtype
) -> None:
    shape = SHAPES[0]
    filled = Filled(executors[0], shape, dtype)
    meta = filled.meta()
    q = queries(shape, len(meta.positions))
    together = attend(executors[0], q, meta, filled.kv)
    assert same_bits(attend(executors[1], q, meta, filled.kv), together)
    starts = meta.q_start.tolist()
    for sequence, (rows, kv_len) in enumerate(SEQUENCES):
        for row in range(rows):
            at = starts[sequence] + row
            alone = replace(
                meta,
                token_ids=meta.token_ids[at : at + 1],
                positions=meta.positions[at : at + 1],
                write_slots=meta.write_slots[at : at + 1],
                page_table=meta.page_table[sequence : sequence + 1],
                q_start=torch.tensor([0, 1], dtype=torch.int32),
                kv_len=torch.tensor([kv_len - rows + row + 1], dtype=torch.int32),
            )
            for ops in executors:
                got = attend(ops, q[at : at + 1], alone, filled.kv)
                assert same_bits(got, together[at : at + 1])


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_path_writes_and_reads_the_same_bits(
    executors: list[NativeOps], machine_library: Path, dtype: torch.dtype
) -> None:
    own = NativeOps(NativeLibrary(machine_library), 1)
    if "portable" in executors[0].kernels.instruction_path:
        pytest.skip("without fused products sums are rounded otherwise; the reference holds it")
    for shape in SHAPES:
        ours, theirs = Filled(executors[0], shape, dtype), Filled(own, shape, dtype)
        assert same_bits(ours.kv.values, theirs.kv.values)
        meta = ours.meta()
        q = queries(shape, len(meta.positions))
        read = [attend(ops, q, meta, theirs.kv) for ops in (executors[0], own)]
        assert same_bits(*read)


def test_infinite_keys_and_values_become_finite_codes(executors: list[NativeOps]) -> None:
    shape = SHAPES[0]
    for dtype in FORMATS:
        filled = Filled(executors[0], shape, dtype)
        meta = row_meta([(1, 1)], filled.tables[:1], shape.page_size)
        width = shape.kv_heads * shape.head_dim
        k = torch.full((1, width), torch.inf)
        rope = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1)
        none = torch.empty(1, 0)
        executors[0].rope_and_write_kv(none, k, -k, rope, meta, filled.kv, out=none.clone())
        out = attend(executors[0], queries(shape, 1), meta, filled.kv)
        assert out.isfinite().all()


def test_pages_that_lie_otherwise_are_refused(executors: list[NativeOps]) -> None:
    case = ragged([(1, 4)], SHAPES[0], torch.int8)
    rows = KVLayer(case.kv.keys, case.kv.values, case.kv.key_scales, case.kv.value_scales)
    with pytest.raises(ValueError, match="cannot read such pages"):
        attend(executors[0], case.q.float(), case.meta, rows)
