"""Norms, gates and products, kernel against reference, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from chatrt_kernels.formats import QuantFormat, dequantize
from chatrt_kernels.reference import ReferenceOps
from chatrt_kernels.triton import rms_norm as rms_norm_module
from chatrt_kernels.triton import swiglu as swiglu_module
from chatrt_kernels.triton.rms_norm import rms_norm
from chatrt_kernels.triton.weights import GpuWeight
from tests.chatrt_kernels.tolerance import assert_agree
from tests.chatrt_kernels.triton_support import triton_ops
from tests.chatrt_kernels.weights_support import random_matrix, same_bits

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 63, 64, 65, 576]
GROUPED = [QuantFormat.Q8_0, QuantFormat.Q4_0, QuantFormat.Q4_1]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", SIZES)
def test_rows_are_normed_as_the_formula_says(columns: int, dtype: torch.dtype) -> None:
    x, weight = randn(5, columns, dtype=dtype), randn(columns, seed=1)
    out = torch.full_like(x, torch.nan)
    triton_ops(dtype).rms_norm(x, weight, 1e-5, out=out)
    assert_agree(out, rms_norm_module.reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_summed_and_normed_as_it_is_stored(dtype: torch.dtype) -> None:
    x, residual, weight = randn(3, 96, dtype=dtype), randn(3, 96, dtype=dtype, seed=2), randn(96)
    stream, out = residual.clone(), torch.empty_like(x)
    rms_norm(x, weight, 1e-5, out=out, residual=stream)
    assert_agree(stream, x.float() + residual.float())
    assert_agree(out, rms_norm_module.reference(x, weight, 1e-5, residual))
    alone = torch.empty_like(x)
    rms_norm(stream, weight, 1e-5, out=alone)
    assert same_bits(out, alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 63, 1025])
def test_gates_open_as_the_formula_says(columns: int, dtype: torch.dtype) -> None:
    both = randn(4, 2 * columns, dtype=dtype)
    gate, up = both[:, :columns], both[:, columns:]
    out = torch.empty(4, columns, dtype=dtype)
    triton_ops(dtype).swiglu(gate, up, out=out)
    assert_agree(out, swiglu_module.reference(gate, up))


@pytest.mark.parametrize("even_rows", [64, 1], ids=["decode", "prefill"])
@pytest.mark.parametrize("rows", [1, 17, 63])
@pytest.mark.parametrize("name", GROUPED)
def test_products_with_grouped_weights_are_those_with_their_values(
    name: QuantFormat, rows: int, even_rows: int
) -> None:
    ops, matrix = triton_ops(even_rows=even_rows), random_matrix(name, (65, 192), seed=1)
    x, bias = randn(rows, 192), randn(65, seed=2)
    for one in (None, bias):
        out = torch.full((rows, 65), torch.nan)
        ops.linear(x, ops.prepare(matrix), one, out=out)
        product = x.double() @ dequantize(matrix).double().T
        assert_agree(out / 16, (product + (0 if one is None else one)) / 16)


@pytest.mark.parametrize("name", GROUPED)
def test_a_row_of_a_product_has_the_same_bits_for_any_number_of_rows(name: QuantFormat) -> None:
    ops, matrix = triton_ops(torch.bfloat16), random_matrix(name, (64, 128), seed=1)
    x, weight = randn(17, 128, dtype=torch.bfloat16), ops.prepare(matrix)
    whole = torch.empty(17, 64, dtype=torch.bfloat16)
    ops.linear(x, weight, None, out=whole)
    for rows in (1, 2, 5, 8, 16):
        part = torch.empty(rows, 64, dtype=torch.bfloat16)
        ops.linear(x[:rows], weight, None, out=part)
        assert same_bits(part, whole[:rows])


@pytest.mark.parametrize("name", [*GROUPED, QuantFormat.Q4_K, QuantFormat.Q6_K, QuantFormat.F16])
def test_rows_of_an_embedding_are_its_values(name: QuantFormat) -> None:
    ops, matrix = triton_ops(), random_matrix(name, (33, 512), seed=3)
    weight, ids = ops.prepare(matrix), torch.tensor([32, 0, 7, 7])
    out = torch.empty(4, 512)
    ops.embed(weight, ids, out=out)
    values = dequantize(matrix)[ids]
    exact = name in GROUPED or name is QuantFormat.F16
    # k-quants become groups of their own: their steps are halves of the values' range
    slack = 0.0 if exact else float(values.abs().max()) / (15 if name is QuantFormat.Q4_K else 127)
    assert (out - values).abs().max() <= slack
    restricted = torch.empty(4, 512)
    ops.embed(ops.restrict(weight, ids), torch.arange(4), out=restricted)
    assert torch.equal(restricted, out)


@pytest.mark.parametrize(
    ("name", "bits"),
    [(QuantFormat.Q8_0, 8.5), (QuantFormat.Q4_1, 5.0), (QuantFormat.Q6_K, 8.5)],
)
def test_grouped_weights_take_the_bytes_that_they_should(name: QuantFormat, bits: float) -> None:
    weight = triton_ops().prepare(random_matrix(name, (64, 256), seed=1))
    assert weight.num_bytes * 8 / (64 * 256) == bits


def test_stacked_weights_are_each_their_own_columns() -> None:
    ops = triton_ops()
    weights = [
        ops.prepare(random_matrix(QuantFormat.Q4_1, (rows, 128), seed=rows)) for rows in (64, 32)
    ]
    stacked = GpuWeight.stacked(weights)
    assert weights[1].codes.untyped_storage().data_ptr() == stacked.codes.data_ptr()
    again = GpuWeight.stacked(weights)  # they lie in a row now: nothing is copied
    assert again.codes.data_ptr() == stacked.codes.data_ptr()
    x, wide = randn(3, 128), torch.empty(3, 96)
    ops.linear(x, stacked, None, out=wide)
    for weight, columns in zip(weights, (wide[:, :64], wide[:, 64:]), strict=True):
        alone = torch.empty(3, weight.shape[0])
        ops.linear(x, weight, None, out=alone)
        assert same_bits(alone, columns.contiguous())


def test_dense_products_are_the_librarys() -> None:
    ops, reference = triton_ops(), ReferenceOps()
    x, matrix, bias = randn(5, 48), randn(20, 48, seed=1), randn(20, seed=2)
    out, theirs = torch.empty(5, 20), torch.empty(5, 20)
    ops.linear(x, ops.prepare(matrix), bias, out=out)
    reference.linear(x, reference.prepare(matrix), bias, out=theirs)
    assert_agree(out, theirs)
