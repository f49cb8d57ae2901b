from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from chatrt_kernels.formats import QuantFormat, QuantizedTensor, dequantize
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt_kernels.tolerance import assert_agree

DTYPES = [torch.float32, torch.float64]
SIZES = [1, 63, 64, 65]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def q8_0_rows(out_features: int, num_blocks: int) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (out_features, num_blocks, 32), generator=generator)
    scales = torch.full((out_features, num_blocks, 1), 0.01, dtype=torch.float16)
    blocks = torch.cat((scales.view(torch.uint8), codes.to(torch.int8).view(torch.uint8)), dim=-1)
    return QuantizedTensor(QuantFormat.Q8_0, blocks.flatten(1), (out_features, 32 * num_blocks))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 63])
@pytest.mark.parametrize("features", SIZES)
def test_linear_is_the_product_with_the_transposed_weight(
    rows: int, features: int, dtype: torch.dtype
) -> None:
    ops = ReferenceOps(dtype)
    x, weight, bias = (
        randn(rows, features, dtype=dtype),
        randn(33, features, dtype=dtype, seed=1) / math.sqrt(features),
        randn(33, dtype=dtype, seed=2),
    )
    product = torch.einsum("rf,of->ro", x.double(), weight.double())
    out = poisoned(rows, 33, dtype=dtype)

    ops.linear(x, ops.prepare(weight), None, out=out)
    assert_agree(out, product)
    ops.linear(x, ops.prepare(weight), bias, out=out)
    assert_agree(out, product + bias)


def test_a_quantised_weight_multiplies_like_its_dequantised_values() -> None:
    ops = ReferenceOps(torch.float64)
    tensor, x, out = q8_0_rows(7, 3), randn(2, 96, dtype=torch.float64), torch.empty(2, 7).double()

    ops.linear(x, ops.prepare(tensor), None, out=out)

    assert_agree(out, x @ dequantize(tensor).double().t())


def test_a_prepared_weight_knows_its_shape_and_resident_bytes() -> None:
    weight = ReferenceOps(torch.float32).prepare(q8_0_rows(7, 3))

    assert weight.shape == (7, 96)
    assert weight.num_bytes == 7 * 96 * 4


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_embed_takes_the_rows_of_the_token_ids(dtype: torch.dtype) -> None:
    ops = ReferenceOps(dtype)
    table = randn(9, 12, dtype=dtype)
    token_ids = torch.tensor([8, 0, 8, 3])
    out = poisoned(4, 12, dtype=dtype)

    ops.embed(ops.prepare(table), token_ids, out=out)

    assert torch.equal(out, table[token_ids])


def test_gather_rows_takes_the_rows_asked_for() -> None:
    x, out = randn(5, 7), poisoned(3, 7)

    ReferenceOps().gather_rows(x, torch.tensor([4, 1, 4]), out=out)

    assert torch.equal(out, x[[4, 1, 4]])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("features", SIZES)
def test_rms_norm_is_the_formula_and_may_write_in_place(features: int, dtype: torch.dtype) -> None:
    x, weight = randn(3, features, dtype=dtype), randn(features, dtype=dtype, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    out = poisoned(3, features, dtype=dtype)

    ReferenceOps(dtype).rms_norm(x, weight, 1e-5, out=out)
    assert_agree(out, expected)
    ReferenceOps(dtype).rms_norm(x, weight, 1e-5, out=x)
    assert torch.equal(x, out)


def test_rms_norm_of_single_heads_norms_each_head() -> None:
    x, weight = randn(3, 4, 16), randn(16, seed=1)
    out, one = poisoned(3, 4, 16), poisoned(1, 16)

    ReferenceOps().rms_norm(x, weight, 1e-6, out=out)
    ReferenceOps().rms_norm(x[1, 2:3], weight, 1e-6, out=one)

    assert_agree(out[1, 2], one[0])


def test_rms_norm_in_half_precision_squares_in_float32() -> None:
    x = torch.full((1, 64), 300.0, dtype=torch.float16)
    out = poisoned(1, 64, dtype=torch.float16)

    ReferenceOps(torch.float16).rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5, out=out)

    # 300² is beyond float16
    assert_agree(out, torch.ones(1, 64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_and_swiglu_are_their_formulas_and_may_write_in_place(dtype: torch.dtype) -> None:
    ops = ReferenceOps(dtype)
    x, y = randn(3, 63, dtype=dtype), randn(3, 63, dtype=dtype, seed=1)
    total, product = x + y, x / (1 + torch.exp(-x)) * y
    out = poisoned(3, 63, dtype=dtype)

    ops.swiglu(x, y, out=out)
    assert_agree(out, product)
    ops.swiglu(x, y, out=y)
    assert torch.equal(y, out)
    ops.add(x, total - x, out=x)
    assert_agree(x, total)


def test_ops_accept_column_slices_of_a_wider_buffer() -> None:
    ops = ReferenceOps()
    wide = randn(4, 3 * 63)
    gate, up, out = wide[:, :63], wide[:, 63:126], wide[:, 126:]
    expected = functional.silu(gate) * up

    ops.swiglu(gate, up, out=out)

    assert_agree(out, expected)


def test_norms_and_gathered_rows_may_fill_columns_of_a_wider_buffer() -> None:
    ops, wide, x = ReferenceOps(), poisoned(4, 3 * 63), randn(9, 63)
    rows, ones = torch.tensor([8, 0, 8, 3]), torch.ones(63)
    normed = poisoned(4, 63)

    ops.gather_rows(x, rows, out=wide[:, 63:126])
    ops.rms_norm(wide[:, 63:126], ones, 1e-5, out=wide[:, 126:])
    ops.rms_norm(x[rows], ones, 1e-5, out=normed)

    assert torch.equal(wide[:, 63:126], x[rows])
    assert_agree(wide[:, 126:], normed)
    assert wide[:, :63].isnan().all()


def test_a_restricted_weight_has_the_rows_asked_for_in_their_order() -> None:
    ops, rows, x = ReferenceOps(), torch.tensor([5, 0, 6]), randn(2, 96)
    matrix = q8_0_rows(7, 3)
    whole = ops.prepare(matrix, first_rows=torch.tensor([6, 5]))
    some, out = ops.restrict(whole, rows), poisoned(2, 3)

    ops.linear(x, some, None, out=out)

    assert whole.shape == (7, 96)
    assert some.shape == (3, 96)
    assert some.num_bytes == 3 * 96 * 4
    assert_agree(out, x @ dequantize(matrix)[rows].t())


def test_another_executors_weight_is_our_bug() -> None:
    class Foreign:
        shape = (2, 2)
        num_bytes = 0

    with pytest.raises(AssertionError, match="Foreign"):
        ReferenceOps().linear(randn(1, 2), Foreign(), None, out=torch.empty(1, 2))
