"""Repacked weights of the native kernels: the file's own values, in the file's own size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.formats import QuantFormat, QuantizedTensor, dequantize
from tests.chatrt_kernels.test_formats import BLOCK_FORMATS, K_FORMATS, random_rows
from tests.chatrt_kernels.weights_support import PLAIN, random_matrix, same_bits

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

OUT_FEATURES = (1, 15, 16, 17, 63)
K_BYTES = 1.1  # the most that a K-quant may grow by


@pytest.fixture(scope="module")
def executors(native_library: Path) -> list[NativeOps]:
    """The kernels of one path, on one thread and on two."""
    library = NativeLibrary(native_library)
    return [NativeOps(library, 1), NativeOps(library, 2)]


def any_matrix(quant_format: QuantFormat, out: int, num_blocks: int) -> QuantizedTensor:
    """Any bytes that are finite numbers: subnormal, huge and negative scales among them."""
    shape = (out, quant_format.block_size * num_blocks)
    if quant_format in PLAIN:
        return random_matrix(quant_format, shape, seed=out)
    rows = random_rows(quant_format, out, num_blocks, seed=out)
    return QuantizedTensor(quant_format, torch.from_numpy(rows), shape)


def embedded(ops: NativeOps, matrix: QuantizedTensor, token_ids: Tensor) -> Tensor:
    out = torch.full((len(token_ids), matrix.shape[1]), torch.nan)
    ops.embed(ops.prepare(matrix), token_ids, out=out)
    return out


def test_an_id_without_a_row_gets_zeros_and_no_foreign_memory(executors: list[NativeOps]) -> None:
    for quant_format in (QuantFormat.F32, QuantFormat.Q6_K):
        weight = executors[0].prepare(any_matrix(quant_format, 17, 1))
        ids = torch.tensor([17, -1, -(2**40), 2**40, 5])
        out = torch.full((5, weight.shape[1]), torch.nan)
        executors[0].embed(weight, ids, out=out)
        assert (out[:4] == 0).all()
        assert out[4].isfinite().all()


@pytest.mark.parametrize("quant_format", QuantFormat)
def test_every_row_comes_back_as_the_bits_of_its_exact_values(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    for out in OUT_FEATURES:
        for num_blocks in (1, 3, 9):
            matrix = any_matrix(quant_format, out, num_blocks)
            order = torch.randperm(out, generator=torch.Generator().manual_seed(out))
            expected = dequantize(matrix)[order]
            for ops in executors:
                assert same_bits(embedded(ops, matrix, order), expected), matrix.shape


def test_the_same_token_may_come_twice_and_a_wider_buffer_keeps_its_rest(
    executors: list[NativeOps],
) -> None:
    matrix = any_matrix(QuantFormat.Q4_1, 17, 3)
    token_ids, buffer = torch.tensor([16, 0, 16]), torch.full((3, 100), torch.nan)

    executors[1].embed(executors[1].prepare(matrix), token_ids, out=buffer[:, :96])

    assert same_bits(buffer[:, :96], dequantize(matrix)[token_ids])
    assert buffer[:, 96:].isnan().all()


@pytest.mark.parametrize("quant_format", BLOCK_FORMATS)
def test_whole_strips_of_32_groups_take_the_bytes_of_the_file(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    for out in (16, 48, 160):
        matrix = any_matrix(quant_format, out, 5)
        assert executors[0].prepare(matrix).num_bytes == matrix.num_bytes


@pytest.mark.parametrize("quant_format", K_FORMATS)
def test_a_k_quant_grows_by_no_more_than_a_tenth(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    for out in (16, 48, 160):
        matrix = any_matrix(quant_format, out, 3)
        assert executors[0].prepare(matrix).num_bytes <= K_BYTES * matrix.num_bytes


@pytest.mark.parametrize("quant_format", QuantFormat)
def test_any_number_of_threads_repacks_to_the_same_bytes(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    # several tasks of strips, the last of them and its last strip not full
    matrix = any_matrix(quant_format, 999, 2)
    first, second = (ops.prepare(matrix).strips for ops in executors)

    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("dtype", "quant_format"),
    [
        (torch.float64, QuantFormat.F32),
        (torch.float32, QuantFormat.F32),
        (torch.float16, QuantFormat.F16),
        (torch.bfloat16, QuantFormat.BF16),
    ],
)
def test_a_dense_matrix_keeps_its_type_unless_it_is_float64(
    executors: list[NativeOps], dtype: torch.dtype, quant_format: QuantFormat
) -> None:
    generator = torch.Generator().manual_seed(4)
    dense = torch.randn(7, 17, generator=generator, dtype=torch.float64).to(dtype)
    weight = executors[0].prepare(dense)
    out = torch.full((7, 17), torch.nan)

    executors[0].embed(weight, torch.arange(7), out=out)

    assert weight.format is quant_format
    assert weight.shape == (7, 17)
    assert same_bits(out, dense.to(torch.float32))


def test_columns_of_a_wider_matrix_are_a_matrix(executors: list[NativeOps]) -> None:
    wide = torch.randn(20, 30, generator=torch.Generator().manual_seed(5))
    out = torch.full((20, 8), torch.nan)

    executors[0].embed(executors[0].prepare(wide[:, 11:19]), torch.arange(20), out=out)

    assert same_bits(out, wide[:, 11:19])


def test_weights_lie_at_the_start_of_a_cache_line(executors: list[NativeOps]) -> None:
    for out in OUT_FEATURES:
        weight = executors[0].prepare(any_matrix(QuantFormat.Q6_K, out, 1))
        assert weight.strips.data_ptr() % 64 == 0
