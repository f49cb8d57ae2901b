"""Fusing: what becomes one node, and what must stay apart so that no result is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.fuse import fuse
from chatrt_kernels.cpu.nodes import (
    AttentionNode,
    EmbedNode,
    GatherNode,
    LinearNode,
    NormNode,
    PairwiseNode,
    QuantiseNode,
    RopeNode,
    overlap,
)
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.cpu.structs import LinearMode
from chatrt_kernels.cpu.trace import Tracer
from chatrt_kernels.formats import QuantFormat
from chatrt_kernels.ops import DirectProgram, ForwardInputs
from tests.chatrt_kernels.miniature import (
    HIDDEN,
    RECIPES,
    Miniature,
    Recipe,
    Sequences,
    largest_inputs,
)
from tests.chatrt_kernels.ragged import row_meta
from tests.chatrt_kernels.weights_support import assert_same_bits, random_matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from chatrt_kernels.cpu.nodes import AnyNode
    from chatrt_kernels.cpu.weights import NativeWeight
    from chatrt_kernels.ops import Calls, Program


@pytest.fixture(scope="module")
def own_library(machine_library: Path) -> NativeLibrary:
    return NativeLibrary(machine_library)


def traced(recipe: Recipe, ops: NativeOps) -> tuple[list[AnyNode], list[Tensor]]:
    model, inputs = Miniature(ops, recipe), largest_inputs()
    tracer = Tracer(inputs)
    model.on(model.cache())(tracer, inputs)
    return tracer.nodes, model.outputs


def test_a_layer_becomes_eight_nodes(own_library: NativeLibrary) -> None:
    nodes, outputs = traced(Recipe(), NativeOps(own_library, 1))
    layer = [
        NormNode,
        LinearNode,
        RopeNode,
        AttentionNode,
        LinearNode,
        NormNode,
        LinearNode,
        LinearNode,
    ]

    fused = fuse(nodes, outputs)

    assert [type(node) for node in fused] == [
        EmbedNode,
        *layer,
        GatherNode,
        *layer,
        GatherNode,
        NormNode,
        LinearNode,
    ]
    linears = [node for node in fused if isinstance(node, LinearNode)]
    per_layer = [(3, LinearMode.STORE), (1, LinearMode.ADD_TO), (2, LinearMode.GATED)]
    per_layer.append((1, LinearMode.ADD_TO))
    assert [(len(node.weights), node.mode) for node in linears] == [
        *per_layer,
        *per_layer,
        (1, LinearMode.STORE),
    ]
    assert not any(node.needs_floats for node in fused if node.quantised is not None)


def test_plain_weights_need_no_activations_in_8_bits(own_library: NativeLibrary) -> None:
    nodes, outputs = traced(RECIPES["plain"], NativeOps(own_library, 1))

    assert all(node.quantised is None for node in fuse(nodes, outputs))


# What follows are small forwards of which a fusion would change the result. Each is described over
# buffers x, a, b, c of 17 rows; what it leaves in them must be what its calls one by one leave.

NUM_ROWS = 17
Buffers = dict[str, torch.Tensor]


class Squares:
    """Square weights of one format, and buffers of their size."""

    def __init__(self, ops: NativeOps, quant_format: QuantFormat) -> None:
        self._weights = [
            ops.prepare(random_matrix(quant_format, (HIDDEN, HIDDEN), seed)) for seed in range(4)
        ]
        wide_matrix = random_matrix(quant_format, (HIDDEN, 2 * HIDDEN), 5)
        self.wide_weight = ops.prepare(wide_matrix)
        self.norm = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(1)) + 0.5
        generator = torch.Generator().manual_seed(2)
        self.start = torch.randn(4, NUM_ROWS, HIDDEN, generator=generator) / 16

    def weight(self, index: int) -> NativeWeight:
        return self._weights[index]


def residual_read_again(ops: Calls, b: Buffers, w: Squares) -> None:
    """The product is used once more behind its sum with the residual."""
    ops.linear(b["x"], w.weight(0), None, out=b["a"])
    ops.add(b["c"], b["a"], out=b["c"])
    ops.linear(b["a"], w.weight(1), None, out=b["b"])


def residual_into_another_buffer(ops: Calls, b: Buffers, w: Squares) -> None:
    ops.linear(b["x"], w.weight(0), None, out=b["a"])
    ops.add(b["c"], b["a"], out=b["b"])


def residual_of_the_input_itself(ops: Calls, b: Buffers, w: Squares) -> None:
    """x += W x: the product reads what it would add to."""
    ops.linear(b["x"], w.weight(0), None, out=b["a"])
    ops.add(b["x"], b["a"], out=b["x"])


def gate_read_again(ops: Calls, b: Buffers, w: Squares) -> None:
    ops.linear(b["x"], w.weight(0), None, out=b["a"])
    ops.linear(b["x"], w.weight(1), None, out=b["b"])
    ops.swiglu(b["a"], b["b"], out=b["c"])
    ops.linear(b["a"], w.weight(2), None, out=b["x"])


def gate_into_the_input(ops: Calls, b: Buffers, w: Squares) -> None:
    """The gate replaces the rows that both products read."""
    ops.linear(b["x"], w.weight(0), None, out=b["a"])
    ops.linear(b["x"], w.weight(1), None, out=b["b"])
    ops.swiglu(b["a"], b["b"], out=b["x"])


def gates_the_other_way_round(ops: Calls, b: Buffers, w: Squares) -> None:
    ops.linear(b["x"], w.weight(0), None, out=b["a"])
    ops.linear(b["x"], w.weight(1), None, out=b["b"])
    ops.swiglu(b["b"], b["a"], out=b["c"])


def gated_result_read_twice(ops: Calls, b: Buffers, w: Squares) -> None:
    """In 8 bits by one product, as floats by a sum."""
    ops.linear(b["x"], w.weight(0), None, out=b["a"])
    ops.linear(b["x"], w.weight(1), None, out=b["b"])
    ops.swiglu(b["a"], b["b"], out=b["c"])
    ops.linear(b["c"], w.weight(2), None, out=b["a"])
    ops.swiglu(b["c"], b["a"], out=b["b"])


def normed_result_read_twice(ops: Calls, b: Buffers, w: Squares) -> None:
    ops.rms_norm(b["x"], w.norm, 1e-5, out=b["a"])
    ops.linear(b["a"], w.weight(0), None, out=b["b"])
    ops.add(b["a"], b["b"], out=b["c"])


def chain_of_products(ops: Calls, b: Buffers, w: Squares) -> None:
    """Each product reads the one before: none of them are one matrix."""
    ops.linear(b["x"], w.weight(0), None, out=b["a"])
    ops.linear(b["a"], w.weight(1), None, out=b["b"])
    ops.linear(b["b"], w.weight(2), None, out=b["c"])


def four_products_of_one_input(ops: Calls, b: Buffers, w: Squares) -> None:
    ops.rms_norm(b["x"], w.norm, 1e-5, out=b["x"])
    for index, name in enumerate("abc"):
        ops.linear(b["x"], w.weight(index), None, out=b[name])
    ops.linear(b["x"], w.weight(3), None, out=b["d"])


HAZARDS = [
    residual_read_again,
    residual_into_another_buffer,
    residual_of_the_input_itself,
    gate_read_again,
    gate_into_the_input,
    gates_the_other_way_round,
    gated_result_read_twice,
    normed_result_read_twice,
    chain_of_products,
    four_products_of_one_input,
]


def row_inputs() -> ForwardInputs:
    none = torch.empty(0, dtype=torch.int64)
    return ForwardInputs(row_meta([(NUM_ROWS, NUM_ROWS)], [[0, 1]], 16), none, none.clone())


def left_in(squares: Squares, make: Callable[[Buffers], Program], names: str) -> list[Tensor]:
    buffers = dict(zip("xabc", squares.start.clone(), strict=True))
    buffers["d"] = torch.full((NUM_ROWS, HIDDEN), torch.nan)
    make(buffers).run(row_inputs())
    return [buffers[name] for name in names]


@pytest.mark.parametrize("quant_format", [QuantFormat.F32, QuantFormat.Q8_0])
@pytest.mark.parametrize("describe", HAZARDS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("names", ["xabcd", "a", "b", "c", "x"])
def test_no_fusion_loses_a_buffer_that_is_read_later_or_is_an_output(
    own_library: NativeLibrary,
    describe: Callable[[Calls, Buffers, Squares], None],
    quant_format: QuantFormat,
    names: str,
) -> None:
    ops = NativeOps(own_library, 2)
    squares = Squares(ops, quant_format)

    def direct(buffers: Buffers) -> Program:
        return DirectProgram(lambda calls, _: describe(calls, buffers, squares), ops)

    def compiled(buffers: Buffers) -> Program:
        outputs = [buffers[name] for name in names]
        return ops.compile(
            lambda calls, _: describe(calls, buffers, squares), row_inputs(), outputs
        )

    assert_same_bits(left_in(squares, compiled, names), left_in(squares, direct, names))


def normed_into_columns(ops: Calls, wide: Tensor, out: Tensor, w: Squares) -> None:
    """The product reads both norms, of which the last starts where it does."""
    ops.rms_norm(wide[:, HIDDEN:], w.norm, 1e-5, out=wide[:, HIDDEN:])
    ops.rms_norm(wide[:, :HIDDEN], w.norm, 1e-5, out=wide[:, :HIDDEN])
    ops.linear(wide, w.wide_weight, None, out=out)


def columns_read_alone_and_together(ops: Calls, wide: Tensor, out: Tensor, w: Squares) -> None:
    """What the first product reads in 8 bits, the second reads as part of the wide rows."""
    ops.rms_norm(wide[:, :HIDDEN], w.norm, 1e-5, out=wide[:, :HIDDEN])
    ops.rms_norm(wide[:, HIDDEN:], w.norm, 1e-5, out=wide[:, HIDDEN:])
    ops.linear(wide[:, HIDDEN:], w.weight(0), None, out=out)
    ops.add(out, wide[:, :HIDDEN], out=wide[:, :HIDDEN])
    ops.linear(wide, w.wide_weight, None, out=out)


def product_into_columns_of_the_input(ops: Calls, wide: Tensor, out: Tensor, w: Squares) -> None:
    """The second product reads rows that the first has written columns of."""
    ops.linear(wide[:, :HIDDEN], w.weight(0), None, out=wide[:, HIDDEN:])
    ops.linear(wide, w.wide_weight, None, out=out)


@pytest.mark.parametrize("quant_format", [QuantFormat.F32, QuantFormat.Q8_0])
@pytest.mark.parametrize(
    "describe",
    [
        normed_into_columns,
        columns_read_alone_and_together,
        product_into_columns_of_the_input,
    ],
    ids=lambda one: one.__name__,
)
def test_columns_of_a_buffer_are_read_by_whoever_reads_all_of_it(
    own_library: NativeLibrary,
    describe: Callable[[Calls, Tensor, Tensor, Squares], None],
    quant_format: QuantFormat,
) -> None:
    ops = NativeOps(own_library, 2)
    squares = Squares(ops, quant_format)
    results = []
    for compiled in (True, False):
        wide = torch.cat(tuple(squares.start[:2]), dim=1)
        out = torch.full((NUM_ROWS, HIDDEN), torch.nan)

        def call(calls: Calls, _: object, wide: Tensor = wide, out: Tensor = out) -> None:
            describe(calls, wide, out, squares)

        program: Program = DirectProgram(call, ops)
        if compiled:
            program = ops.compile(call, row_inputs(), [out])
        program.run(row_inputs())
        results.append(out)
    assert not results[0].isnan().any()
    assert_same_bits(results[:1], results[1:])


def test_views_overlap_where_they_share_a_number() -> None:
    wide = torch.empty(5, 30)
    columns = [wide[:, start : start + 10] for start in (0, 10, 20)]
    for index, one in enumerate(columns):
        assert overlap(one, wide)
        assert overlap(wide[2:], one)
        assert [overlap(one, other) for other in columns] == [index == i for i in range(3)]
        assert not overlap(one[:2], one[2:])
        assert not overlap(one, one[:, :0])
    assert overlap(wide[:, 5:15], columns[0])
    assert overlap(wide[:, 5:15], columns[1])
    assert not overlap(wide[:, 5:15], columns[2])
    assert not overlap(wide[:2], wide[2:])
    assert overlap(wide.view(15, 10), columns[1])  # rows of another width may share any of them


def test_attention_that_is_read_as_floats_too_is_not_left_in_8_bits_only(
    own_library: NativeLibrary,
) -> None:
    ops = NativeOps(own_library, 1)
    results = []
    for compiled in (True, False):
        model = Miniature(ops, Recipe())
        describe, outputs = model.on(model.cache()), [*model.outputs, model.attended]
        program: Program = DirectProgram(describe, ops)
        if compiled:
            program = ops.compile(describe, largest_inputs(), outputs)
        program.run(Sequences(1).step([20], [19]))
        results.append(model.attended[:20])
    assert_same_bits(results[:1], results[1:])


def nodes_of(describe: Callable[[Calls], None], outputs: Sequence[Tensor]) -> list[AnyNode]:
    tracer = Tracer(row_inputs())
    describe(tracer)
    return fuse(tracer.nodes, outputs)


def test_a_sum_stays_a_node_where_its_product_is_an_output(own_library: NativeLibrary) -> None:
    squares = Squares(NativeOps(own_library, 1), QuantFormat.F32)
    buffers = dict(zip("xabc", squares.start, strict=True))

    def describe(calls: Calls) -> None:
        calls.linear(buffers["x"], squares.weight(0), None, out=buffers["a"])
        calls.add(buffers["c"], buffers["a"], out=buffers["c"])

    assert [type(n) for n in nodes_of(describe, [buffers["c"]])] == [LinearNode]
    apart = nodes_of(describe, [buffers["c"], buffers["a"]])
    assert [type(n) for n in apart] == [LinearNode, PairwiseNode]


def test_a_product_of_a_sum_quantises_it_in_a_node_of_its_own(own_library: NativeLibrary) -> None:
    squares = Squares(NativeOps(own_library, 1), QuantFormat.Q8_0)
    buffers = dict(zip("xabc", squares.start, strict=True))

    def describe(calls: Calls) -> None:
        calls.add(buffers["x"], buffers["a"], out=buffers["b"])
        calls.linear(buffers["b"], squares.weight(0), None, out=buffers["c"])

    found = nodes_of(describe, [buffers["c"]])
    assert [type(n) for n in found] == [PairwiseNode, QuantiseNode, LinearNode]
