"""Products of the native kernels: every format, path, number of rows and odd size.

How near they must be. Plain weights: n fused multiply-adds (two roundings each where the machine
has none) and the bias leave at most `2 (n + 2) 2^-24` of the sum of |weight · activation|.
Others multiply activations in 8 bits: a group of 32 has the scale peak / 127, so each of them is
off by at most half of that, and a result by the sum of |weight| · peak / 254. To this come float
roundings: six per group (of scales, products and sums, twice where there is a minimum), of terms
that are at most four times the largest |weight| of the group times the sum of its |activation|.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.formats import QuantFormat, QuantizedTensor, dequantize
from tests.chatrt_kernels.weights_support import PLAIN, random_matrix, same_bits

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from chatrt_kernels.cpu.weights import NativeWeight

GROUP = 32
MAX_ROWS = 17
OUT_FEATURES = (1, 15, 16, 17, 33, 63)
EPSILON = 2.0**-24
UNDERFLOW = 2.0**-149 * GROUP * 127 * 255  # a scale below the normal numbers, times the largest dot
NEGLIGIBLE = 1e-36  # a group below has no scale whose inverse is finite, and counts as zeros
PADDING = 5  # numbers between the rows of a buffer, which nobody may write


def in_features(quant_format: QuantFormat) -> tuple[int, ...]:
    if quant_format in PLAIN:
        return (1, 7, 32, 33, 512)
    return (32, 64, 96, 256, 512) if quant_format.block_size == GROUP else (256, 512, 768)


@dataclass(frozen=True)
class Case:
    """A matrix, its exact values, and rows to multiply."""

    matrix: QuantizedTensor
    values: Tensor  # float64 [out, in]
    x: Tensor  # [MAX_ROWS, in]
    bias: Tensor

    @property
    def exact(self) -> Tensor:
        return self.x.double() @ self.values.t()


@cache
def case(quant_format: QuantFormat, out: int, width: int) -> Case:
    seed = 1000 * out + width
    generator = torch.Generator().manual_seed(seed)
    matrix = random_matrix(quant_format, (out, width), seed)
    x = torch.randn(MAX_ROWS, width, generator=generator)
    # rows with and without outliers, small and large ones, stand beside each other
    x[::3, width // 2] *= 60
    x[5] *= 1e-4
    x[6] *= 1e4
    x[7] = 0
    return Case(matrix, dequantize(matrix).double(), x, torch.randn(out, generator=generator))


def cases(quant_format: QuantFormat) -> list[Case]:
    return [case(quant_format, o, i) for o in OUT_FEATURES for i in in_features(quant_format)]


def grouped(x: Tensor) -> Tensor:
    """`[rows, groups, GROUP]`."""
    return x.view(x.shape[0], -1, GROUP)


def error_bound(one: Case, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """What a product may be off by, `[rows, out]`; see the head of this file."""
    if one.matrix.format in PLAIN:
        return rounding_bound(one, x, bias)
    x_peaks = grouped(x.double().abs()).amax(-1)
    w_sums = grouped(one.values.abs()).sum(-1)
    # the scale and the quotient are rounded to float32 too
    half_steps = x_peaks * (1 + 1e-4) / 254 + NEGLIGIBLE
    return half_steps @ w_sums.t() + rounding_bound(one, x, bias)


def rounding_bound(one: Case, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The part of it that float32 sums are to blame for."""
    x, weights = x.double().abs(), one.values.abs()
    if one.matrix.format in PLAIN:
        num_roundings, sums = 2 * x.shape[1] + 4, x @ weights.t()
    else:
        x_sums = grouped(x).sum(-1)
        w_peaks = grouped(weights).amax(-1)
        num_roundings, sums = 6 * x_sums.shape[1] + 2, 4 * x_sums @ w_peaks.t()
    if bias is not None:
        sums += bias.abs()
    return num_roundings * (EPSILON * sums + UNDERFLOW)


@pytest.fixture(scope="module")
def executors(native_library: Path) -> list[NativeOps]:
    """The kernels of one path, on one thread and on two."""
    library = NativeLibrary(native_library)
    return [NativeOps(library, 1), NativeOps(library, 2)]


def product(ops: NativeOps, x: Tensor, weight: NativeWeight, bias: Tensor | None = None) -> Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan)
    ops.linear(x, weight, bias, out=out)
    return out


@pytest.mark.parametrize("quant_format", QuantFormat)
def test_a_product_is_that_of_the_exact_values_but_for_what_8_bits_lose(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    for one in cases(quant_format):
        weight = executors[0].prepare(one.matrix)
        for bias in (None, one.bias):
            found = product(executors[0], one.x, weight, bias)
            expected = one.exact if bias is None else one.exact + bias
            bound = error_bound(one, one.x, bias)
            assert ((found - expected).abs() <= bound).all(), one.matrix.shape


@pytest.mark.parametrize("quant_format", QuantFormat)
def test_a_row_has_the_same_bits_alone_in_company_and_on_two_threads(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    for one in cases(quant_format):
        weight = executors[0].prepare(one.matrix)
        alone = torch.cat([product(executors[0], row[None], weight, one.bias) for row in one.x])
        assert not alone.isnan().any()
        for num_rows in range(1, MAX_ROWS + 1):
            ops = executors[num_rows % 2]
            together = product(ops, one.x[:num_rows], weight, one.bias)
            assert same_bits(together, alone[:num_rows]), (one.matrix.shape, num_rows)


@pytest.mark.parametrize("quant_format", [f for f in QuantFormat if f not in PLAIN])
def test_a_row_has_the_same_bits_among_512_rows_in_any_order(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    one = case(quant_format, 33, 512)
    weight = executors[0].prepare(one.matrix)
    alone = product(executors[0], one.x, weight)
    order = torch.randint(0, MAX_ROWS, (512,), generator=torch.Generator().manual_seed(1))
    for ops in executors:
        assert same_bits(product(ops, one.x[order], weight), alone[order])


@pytest.mark.parametrize("quant_format", QuantFormat)
def test_activations_that_fit_8_bits_lose_nothing(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    generator = torch.Generator().manual_seed(2)
    for width in (w for w in in_features(quant_format) if w % GROUP == 0):
        one = case(quant_format, 33, width)
        # small integers times a power of two, the largest of each group 127 of either sign
        codes = torch.randint(-127, 128, (4, width // GROUP, GROUP), generator=generator).float()
        codes[..., 5] = 127
        codes[1::2, ..., 5] = -127
        powers = torch.randint(-8, 9, (4, width // GROUP, 1), generator=generator)
        x = (codes * 2.0**powers).flatten(1)

        found = product(executors[0], x, executors[0].prepare(one.matrix))

        error = (found - x.double() @ one.values.t()).abs()
        assert (error <= rounding_bound(one, x)).all(), width


@pytest.mark.parametrize("quant_format", QuantFormat)
def test_rows_of_zeros_give_the_bias_and_nothing_else(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    one = case(quant_format, 33, 512)
    weight, zeros = executors[0].prepare(one.matrix), torch.zeros(3, 512)

    assert torch.equal(product(executors[0], zeros, weight), torch.zeros(3, 33))
    assert torch.equal(product(executors[0], -zeros, weight, one.bias), one.bias.expand(3, 33))


@pytest.mark.parametrize("quant_format", QuantFormat)
def test_huge_and_tiny_rows_and_single_outliers_keep_to_the_same_bound(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    one = case(quant_format, 33, 512)
    weight = executors[0].prepare(one.matrix)
    for factor in (1e-42, 1e-37, 1e-30, 1e-10, 1e10, 1e30):
        x = one.x[:6] * factor
        error = (product(executors[0], x, weight) - x.double() @ one.values.t()).abs()
        assert (error <= error_bound(one, x)).all(), factor
    for position in (0, 31, 32, 255, 511):
        x = torch.randn(2, 512, generator=torch.Generator().manual_seed(position))
        x[:, position] = torch.tensor([1e6, -3e4])
        error = (product(executors[0], x, weight) - x.double() @ one.values.t()).abs()
        assert (error <= error_bound(one, x)).all(), position


@pytest.mark.parametrize("quant_format", [f for f in QuantFormat if f not in PLAIN])
def test_a_group_far_above_the_others_of_its_row_loses_no_more_than_they_do(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    one = case(quant_format, 33, 512)
    weight = executors[0].prepare(one.matrix)
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(3))
    level = error_bound(one, x)
    for group in (0, 7, 15):
        outlying = x.clone()
        outlying[:, GROUP * group : GROUP * (group + 1)] *= 100
        found = product(executors[0], outlying, weight)
        error = (found - outlying.double() @ one.values.t()).abs()
        assert (error <= level + rounding_bound(one, outlying)).all(), group


@pytest.mark.parametrize("quant_format", [f for f in QuantFormat if f not in PLAIN])
def test_sensitive_weights_lose_less_and_their_rows_too_are_the_same_alone(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    one = case(quant_format, 63, 512)
    x = torch.randn(MAX_ROWS, 512, generator=torch.Generator().manual_seed(4))
    exact = x.double() @ one.values.t()
    common = product(executors[0], x, executors[0].prepare(one.matrix))
    weight = executors[0].prepare(one.matrix, sensitive=True)
    found = product(executors[0], x, weight)
    assert (found - exact).norm() < 0.9 * (common - exact).norm()
    for row in range(MAX_ROWS):
        assert same_bits(found[row : row + 1], product(executors[1], x[row : row + 1], weight))


@pytest.mark.parametrize("quant_format", QuantFormat)
def test_rows_may_be_part_of_a_wider_buffer_and_nothing_beside_them_is_touched(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    width = 512
    for out in (1, 17, 63):
        one = case(quant_format, out, width)
        weight = executors[1].prepare(one.matrix)
        x = torch.full((MAX_ROWS, width + PADDING), torch.nan)
        x[:, :width] = one.x
        buffer = torch.full((MAX_ROWS + 2, out + PADDING), torch.nan)
        executors[1].linear(x[:, :width], weight, one.bias, out=buffer[1:-1, :out])
        expected = product(executors[1], one.x, weight, one.bias)
        assert same_bits(buffer[1:-1, :out], expected)
        assert buffer[1:-1, out:].isnan().all()
        assert buffer[[0, -1]].isnan().all()


def test_no_rows_write_nothing(executors: list[NativeOps]) -> None:
    for quant_format in (QuantFormat.F32, QuantFormat.Q4_K):
        weight = executors[1].prepare(case(quant_format, 17, 512).matrix)
        assert product(executors[1], torch.empty(0, 512), weight).shape == (0, 17)
