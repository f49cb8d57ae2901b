"""Fewer nodes with the same results, bit for bit: every node that is gone is a wait less per step.

Knows: which neighbours can be one node, who reads what. Does not know: kernels, addresses.
Invariant: each number is still made by the same operations in the same order.

    linear q, linear k, linear v         → one linear over three matrices
    linear gate, linear up, swiglu       → one gated linear
    linear, add to the residual          → one linear that adds
    norm, attention or gated linear, then a linear with 8-bit activations
                                         → the former leaves its result in 8 bits
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt_kernels.cpu.nodes import (
    AttentionNode,
    LinearNode,
    NormNode,
    PairwiseNode,
    QuantiseNode,
    overlap,
    same,
    width,
)
from chatrt_kernels.cpu.structs import MAX_FUSED_WEIGHTS, LinearMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt_kernels.cpu.nodes import AnyNode

_GROUP = 32  # activations that share a scale
# 8-bit buffers: a gated linear reads the first while it fills the second.
INPUT, ACTIVATED = 0, 1


def fuse(nodes: Sequence[AnyNode], outputs: Sequence[Tensor]) -> list[AnyNode]:
    """The nodes of a whole forward, fused; `outputs` are read when it has ended."""
    fused = _merge_linears(nodes)
    fused = _merge_gates(fused, outputs)
    fused = _merge_sums(fused, outputs)
    return quantise_inputs(fused, outputs)


def quantise_inputs(nodes: Sequence[AnyNode], outputs: Sequence[Tensor]) -> list[AnyNode]:
    """Give every linear its input in 8 bits where its weights want it: by its maker if it can."""
    result: list[AnyNode] = []
    for index, node in enumerate(nodes):
        if isinstance(node, LinearNode) and node.wants_quantised:
            maker = result[-1] if result else None
            # only a norm can leave floats besides
            floats = node.wants_floats or _is_read(node.x, nodes, index + 1, outputs)
            if maker is not None and _can_quantise(maker, node, keeps_floats=floats):
                maker.quantised = ACTIVATED if isinstance(maker, LinearNode) else INPUT
                node.source = maker.quantised
            else:
                result.append(QuantiseNode(node.rows, node.x, quantised=INPUT))
                node.source = INPUT
        result.append(node)
    for index, node in enumerate(result):
        if node.quantised is not None and not isinstance(node, QuantiseNode):
            node.needs_floats = _is_read(node.out, result, index + 1, outputs)
    return result


def _can_quantise(maker: AnyNode, reader: LinearNode, *, keeps_floats: bool) -> bool:
    if keeps_floats and not isinstance(maker, NormNode):
        return False
    is_input = same(maker.out, reader.x) and width(maker.out) == width(reader.x)
    if not is_input or maker.rows != reader.rows or width(maker.out) % _GROUP:
        return False
    if isinstance(maker, AttentionNode):
        return maker.kv.head_dim % _GROUP == 0
    gated = isinstance(maker, LinearNode) and maker.mode is LinearMode.GATED
    return isinstance(maker, NormNode) or gated


def _is_read(
    buffer: Tensor, nodes: Sequence[AnyNode], start: int, outputs: Sequence[Tensor]
) -> bool:
    """Whether the floats in `buffer` are read from node `start` on, before they are replaced."""
    for node in nodes[start:]:
        # a linear whose source is not decided yet will have its floats quantised: that is a read
        only_8_bits = (
            isinstance(node, LinearNode)
            and node.source is not None
            and not node.wants_floats
            and same(node.x, buffer)
        )
        if not only_8_bits and any(overlap(buffer, read) for read in node.reads):
            return True
        if any(same(buffer, new) and width(new) >= width(buffer) for new in node.writes):
            return False
    return any(overlap(buffer, output) for output in outputs)


def _merge_linears(nodes: Sequence[AnyNode]) -> list[AnyNode]:
    result: list[AnyNode] = []
    for node in nodes:
        last = result[-1] if result else None
        if isinstance(node, LinearNode) and isinstance(last, LinearNode) and _mergeable(last, node):
            last.weights += node.weights
            last.biases += node.biases
            last.outs += node.outs
        else:
            result.append(node)
    return result


def _mergeable(first: LinearNode, second: LinearNode) -> bool:
    stores = first.mode is second.mode is LinearMode.STORE
    alike = first.weights[0].sensitive == second.weights[0].sensitive
    fits = len(first.weights) + len(second.weights) <= MAX_FUSED_WEIGHTS
    independent = not any(overlap(out, second.x) for out in first.outs)
    return (
        stores
        and alike
        and fits
        and independent
        and same(first.x, second.x)
        and first.rows == second.rows
    )


def _merge_gates(nodes: Sequence[AnyNode], outputs: Sequence[Tensor]) -> list[AnyNode]:
    result: list[AnyNode] = []
    for index, node in enumerate(nodes):
        linear = _gated_linear(result, node)
        others = () if linear is None else [out for out in linear.outs if not same(out, node.out)]
        if linear is None or any(_is_read(out, nodes, index + 1, outputs) for out in others):
            result.append(node)
        else:
            linear.mode, linear.out, linear.outs = LinearMode.GATED, node.out, (node.out,)
    return result


def _gated_linear(before: Sequence[AnyNode], node: AnyNode) -> LinearNode | None:
    """The linear of gate and up that `node` joins, if it is the last one before."""
    linear = before[-1] if before else None
    if not isinstance(linear, LinearNode) or not isinstance(node, PairwiseNode) or not node.gated:
        return None
    if linear.mode is not LinearMode.STORE or len(linear.outs) != 2:
        return None
    gate, up = linear.outs
    fits = same(gate, node.x) and same(up, node.y) and gate.shape == up.shape
    # outputs of gate and up meet strip by strip
    fits = fits and not any(weight.order for weight in linear.weights)
    # strips of one task would read what another has replaced
    return linear if fits and not overlap(linear.x, node.out) else None


def _merge_sums(nodes: Sequence[AnyNode], outputs: Sequence[Tensor]) -> list[AnyNode]:
    result: list[AnyNode] = []
    for index, node in enumerate(nodes):
        linear = _added_linear(result, node)
        if linear is None or _is_read(linear.out, nodes, index + 1, outputs):
            result.append(node)
        else:
            linear.mode, linear.out, linear.outs = LinearMode.ADD_TO, node.out, (node.out,)
    return result


def _added_linear(before: Sequence[AnyNode], node: AnyNode) -> LinearNode | None:
    """The linear whose result `node` adds in place to another buffer, if it is the last before."""
    linear = before[-1] if before else None
    if not isinstance(linear, LinearNode) or not isinstance(node, PairwiseNode) or node.gated:
        return None
    if linear.mode is not LinearMode.STORE or len(linear.outs) != 1:
        return None
    in_place = same(node.x, node.out) and same(node.y, linear.out)
    # the product must not read what it adds to: strips of one task would see another's sums
    return linear if in_place and not overlap(linear.x, node.out) else None
