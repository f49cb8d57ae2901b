"""Rows of a weight in another order: they keep their numbers, and every result its bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.formats import QuantFormat, dequantize
from chatrt_kernels.ops import ForwardInputs
from tests.chatrt_kernels.ragged import row_meta
from tests.chatrt_kernels.weights_support import random_matrix, same_bits

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from chatrt_kernels.cpu.weights import NativeWeight
    from chatrt_kernels.ops import Calls

WIDTH = 256
SIZES = (1, 17, 333)


@pytest.fixture(scope="module")
def executors(native_library: Path) -> list[NativeOps]:
    """The kernels of one path, on one thread and on two."""
    library = NativeLibrary(native_library)
    return [NativeOps(library, 1), NativeOps(library, 2)]


def shuffled(num: int, seed: int = 1) -> Tensor:
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed))


def rows_of(num: int, seed: int = 2) -> Tensor:
    x = torch.randn(num, WIDTH, generator=torch.Generator().manual_seed(seed))
    x[::3, 40] *= 50  # some groups are multiplied with what rounding leaves, too
    return x


def product(ops: NativeOps, x: Tensor, weight: NativeWeight, bias: Tensor | None = None) -> Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan)
    ops.linear(x, weight, bias, out=out)
    return out


def inputs_of(num_rows: int) -> ForwardInputs:
    none = torch.empty(0, dtype=torch.int64)
    meta = row_meta([(num_rows, num_rows)], [[0, 1]], 16)
    return ForwardInputs(meta, none, none.clone())


@pytest.mark.parametrize("quant_format", QuantFormat)
def test_products_and_embedded_rows_are_those_of_the_rows_in_order(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    x = rows_of(9)
    for size in SIZES:
        matrix = random_matrix(quant_format, (size, WIDTH), seed=size)
        bias = torch.randn(size, generator=torch.Generator().manual_seed(3))
        plain = executors[0].prepare(matrix, sensitive=True)
        for num_first in {0, 1, size // 3, size}:
            first_rows = shuffled(size)[:num_first]
            weight = executors[1].prepare(matrix, sensitive=True, first_rows=first_rows)
            assert weight.shape == plain.shape
            for ops, num_rows in zip(executors, (1, 9), strict=True):
                for one in (None, bias):
                    expected = product(ops, x[:num_rows], plain, one)
                    assert same_bits(product(ops, x[:num_rows], weight, one), expected)
            embedded = torch.full((size, WIDTH), torch.nan)
            executors[1].embed(weight, torch.arange(size), out=embedded)
            assert same_bits(embedded, dequantize(matrix))


def test_columns_beside_the_results_stay_and_ids_without_a_row_get_zeros(
    executors: list[NativeOps],
) -> None:
    matrix = random_matrix(QuantFormat.Q4_1, (50, WIDTH), seed=1)
    weight = executors[1].prepare(matrix, first_rows=shuffled(50)[:20])
    x, wide = rows_of(5), torch.full((5, 60), torch.nan)
    executors[1].linear(x, weight, None, out=wide[:, 5:55])
    assert same_bits(wide[:, 5:55], product(executors[0], x, executors[0].prepare(matrix)))
    assert wide[:, :5].isnan().all()
    assert wide[:, 55:].isnan().all()
    out = torch.full((3, WIDTH), torch.nan)
    executors[0].embed(weight, torch.tensor([50, -1, 2**40]), out=out)
    assert (out == 0).all()


@pytest.mark.parametrize("quant_format", QuantFormat)
def test_first_rows_are_a_weight_of_their_own_in_the_same_memory(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    x = rows_of(9)
    matrix = random_matrix(quant_format, (333, WIDTH), seed=7)
    for num_rows in (1, 33, 80):  # whole strips of 16, and parts of one
        chosen = shuffled(333, seed=num_rows)[:num_rows]
        whole = executors[0].prepare(matrix, sensitive=True, first_rows=chosen.sort().values)
        logits = product(executors[0], x, whole)
        for rows in (chosen, chosen.sort().values):
            some = executors[1].restrict(whole, rows)
            assert some.shape == (num_rows, WIDTH)
            assert some.strips.data_ptr() == whole.strips.data_ptr()
            # nothing but the tables of an order of its own
            assert some.num_bytes == (0 if torch.equal(rows, rows.sort().values) else 8 * num_rows)
            for ops in executors:
                assert same_bits(product(ops, x, some), logits[:, rows])
                alone = torch.cat([product(ops, row[None], some) for row in x[2:5]])
                assert same_bits(alone, logits[2:5, rows])
            embedded = torch.full((num_rows, WIDTH), torch.nan)
            executors[0].embed(some, torch.arange(num_rows), out=embedded)
            assert same_bits(embedded, dequantize(matrix)[rows])


def test_rows_in_order_are_shared_without_being_named_first(executors: list[NativeOps]) -> None:
    matrix = random_matrix(QuantFormat.Q8_0, (50, WIDTH), seed=1)
    whole, x = executors[0].prepare(matrix), rows_of(2)
    some = executors[0].restrict(whole, torch.arange(20))
    assert same_bits(product(executors[0], x, some), product(executors[0], x, whole)[:, :20])


def test_a_row_order_counts_its_tables(executors: list[NativeOps]) -> None:
    matrix = random_matrix(QuantFormat.Q8_0, (48, WIDTH), seed=1)
    plain = executors[0].prepare(matrix)
    ordered = executors[0].prepare(matrix, first_rows=shuffled(48)[:16])
    assert ordered.num_bytes == plain.num_bytes + 2 * 4 * 48


def test_rows_that_do_not_lie_first_are_refused_with_both_numbers(
    executors: list[NativeOps],
) -> None:
    matrix = random_matrix(QuantFormat.Q8_0, (50, WIDTH), seed=1)
    first_rows = shuffled(50)[:20]
    ops = executors[0]
    weight = ops.prepare(matrix, first_rows=first_rows)
    with pytest.raises(ValueError, match="20 rows of 50 are asked for that do not lie first"):
        ops.restrict(weight, first_rows + 1)
    with pytest.raises(ValueError, match="19 rows of 50 are asked for that do not lie first"):
        ops.restrict(weight, first_rows.sort(descending=True).values[:19])
    with pytest.raises(ValueError, match="51 rows of 50"):
        ops.restrict(ops.prepare(matrix), torch.arange(51))
    with pytest.raises(ValueError, match="3 first rows, only 2 different ones"):
        ops.prepare(matrix, first_rows=torch.tensor([4, 2, 4]))
    with pytest.raises(ValueError, match="first rows from 4 to 50, the matrix has 50"):
        ops.prepare(matrix, first_rows=torch.tensor([4, 50]))


@pytest.mark.parametrize("quant_format", [QuantFormat.F32, QuantFormat.Q8_0])
def test_ordered_rows_are_added_and_gated_as_rows_in_order_are(
    executors: list[NativeOps], quant_format: QuantFormat
) -> None:
    ops = executors[1]
    matrices = [random_matrix(quant_format, (WIDTH, WIDTH), seed) for seed in range(4)]
    start = rows_of(5)

    def result(order: Tensor | None) -> list[Tensor]:
        gate, up, down, last = (ops.prepare(matrix, first_rows=order) for matrix in matrices)
        x, a, b, c = start.clone(), *torch.full((3, 5, WIDTH), torch.nan)

        def describe(calls: Calls, _: ForwardInputs) -> None:
            calls.linear(x, gate, None, out=a)
            calls.linear(x, up, None, out=b)
            calls.swiglu(a, b, out=c)
            calls.linear(c, down, None, out=a)
            calls.add(x, a, out=x)
            calls.linear(x, last, None, out=b)

        inputs = inputs_of(5)
        ops.compile(describe, inputs, [x, b]).run(inputs)
        return [x, b]

    for found, expected in zip(result(shuffled(WIDTH)[:99]), result(None), strict=True):
        assert same_bits(found, expected)
