"""From nodes to the C structs of their calls.

Knows: which field of a struct is which buffer of a node. Does not know: what was fused, and why.
Invariant: `Lowered` holds all memory that its structs point to.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from chatrt_kernels.cpu.nodes import (
    AttentionNode,
    EmbedNode,
    GatherNode,
    LinearNode,
    NormNode,
    PairwiseNode,
    QuantiseNode,
    RopeNode,
    width,
)
from chatrt_kernels.cpu.structs import (
    AttentionStruct,
    CallStruct,
    EmbedStruct,
    GatherStruct,
    Kind,
    KVLayerStruct,
    LinearMode,
    LinearStruct,
    NormStruct,
    PairwiseStruct,
    QuantisedStruct,
    QuantiseStruct,
    RopeStruct,
    TermStruct,
    address,
)
from chatrt_kernels.kv_formats import KVFormat, why_not

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt_kernels.cpu.nodes import AnyNode
    from chatrt_kernels.ops import KVLayer

_GROUP = 32
_HALF_GROUP = 16
# The numbers of formats that `calls.h` names.
_KV_FORMATS = {torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.uint8: 3}
_SPLIT_KEYS = 128  # kSplit in attention.cpp
_BLOCK_ROWS = 6  # kMaxBlockRows there
_MAX_SPLIT_BLOCKS = 16
_MAX_PARTIALS = 1 << 26  # numbers, 256 MiB
MAX_HEAD_DIM = 1024


@dataclass(slots=True)
class Lowered:
    """Calls ready to run, and the memory behind them."""

    kinds: list[Kind] = field(default_factory=list)
    calls: ctypes.Array[CallStruct] | None = None
    kept: list[object] = field(default_factory=list)


def lower(nodes: Sequence[AnyNode], *, max_positions: int) -> Lowered:
    """The calls of `nodes`, for as many rows as the nodes' buffers have.

    `max_positions` bounds the keys of a row: attention gets memory to split them among threads.
    """
    lowering = _Lowering(nodes, max_positions)
    return lowering.run()


class _Lowering:
    def __init__(self, nodes: Sequence[AnyNode], max_positions: int) -> None:
        self._nodes = nodes
        self._lowered = Lowered(kept=list(nodes))
        self._quantised = {
            index: self._allocate_quantised(index)
            for index in {node.quantised for node in nodes if node.quantised is not None}
        }
        self._partials = self._allocate_partials(max_positions)

    def run(self) -> Lowered:
        calls = [self._call(node) for node in self._nodes]
        self._lowered.calls = (CallStruct * len(calls))(*calls)
        return self._lowered

    def _call(self, node: AnyNode) -> CallStruct:
        kind, arguments = self._arguments(node)
        self._lowered.kinds.append(kind)
        self._lowered.kept.append(arguments)
        return CallStruct(kind, node.rows.of, node.rows.per, 0, ctypes.addressof(arguments))

    def _arguments(self, node: AnyNode) -> tuple[Kind, ctypes.Structure]:
        if isinstance(node, EmbedNode):
            weight = node.weight.struct()
            return Kind.EMBED, EmbedStruct(weight, address(node.out), node.out.stride(0))
        if isinstance(node, NormNode):
            return Kind.NORM, self._norm(node)
        if isinstance(node, QuantiseNode):
            x = node.out
            quantised = self._quantised_struct(node)
            return Kind.QUANTISE, QuantiseStruct(address(x), x.stride(0), width(x), quantised)
        if isinstance(node, LinearNode):
            return Kind.LINEAR, self._linear(node)
        if isinstance(node, RopeNode):
            return Kind.ROPE, _rope(node)
        if isinstance(node, AttentionNode):
            return Kind.ATTENTION, self._attention(node)
        if isinstance(node, PairwiseNode):
            return Kind.SWIGLU if node.gated else Kind.ADD, _pairwise(node)
        return Kind.GATHER, _gather(node)

    def _norm(self, node: NormNode) -> NormStruct:
        return NormStruct(
            address(node.x),
            node.x.stride(0),
            address(node.weight),
            width(node.x),
            node.eps,
            address(node.out) if node.needs_floats else None,
            node.out.stride(0),
            self._quantised_struct(node),
        )

    def _linear(self, node: LinearNode) -> LinearStruct:
        struct = LinearStruct(mode=node.mode, num_weights=len(node.weights))
        for index, (weight, bias) in enumerate(zip(node.weights, node.biases, strict=True)):
            struct.weights[index] = weight.struct()
            struct.bias[index] = address(bias)
        for index, out in enumerate(node.outs):
            struct.out[index], struct.out_stride[index] = address(out), out.stride(0)
        struct.x, struct.x_stride = address(node.x), node.x.stride(0)
        if node.source is not None:
            struct.quantised = self._quantised[node.source]
        if node.mode is LinearMode.GATED:
            struct.activated = self._quantised_struct(node)
        return struct

    def _attention(self, node: AttentionNode) -> AttentionStruct:
        kv = kv_struct(node.kv)
        return AttentionStruct(
            address(node.q),
            node.q.stride(0),
            address(node.out),
            node.out.stride(0),
            self._quantised_struct(node),
            width(node.q) // kv.head_dim,
            node.scale,
            kv,
            address(self._partials),
            self._partials.numel(),
        )

    def _quantised_struct(self, node: AnyNode) -> QuantisedStruct:
        if node.quantised is None:
            return QuantisedStruct()
        return self._quantised[node.quantised]

    def _allocate_quantised(self, index: int) -> QuantisedStruct:
        """8-bit memory for the largest of the nodes that fill the buffer."""
        num_values = max(node.out.numel() for node in self._nodes if node.quantised == index)
        terms = []
        for _ in range(2):
            parts = (
                torch.empty(num_values, dtype=torch.int8),
                torch.empty(num_values // _GROUP, dtype=torch.float32),
                torch.empty(num_values // _GROUP, dtype=torch.float32),
                torch.empty(num_values // _HALF_GROUP, dtype=torch.int32),
            )
            self._lowered.kept.extend(parts)
            terms.append(TermStruct(*(address(part) for part in parts)))
        return QuantisedStruct(*terms)

    def _allocate_partials(self, max_positions: int) -> Tensor:
        """Memory for splits that are computed apart; untouched where no step needs it."""
        attentions = [node for node in self._nodes if isinstance(node, AttentionNode)]
        size = 0
        for node in attentions:
            head_dim = node.kv.head_dim
            blocks = min(_MAX_SPLIT_BLOCKS, node.q.shape[0])
            heads = blocks * _BLOCK_ROWS * (width(node.q) // head_dim)
            size = max(size, heads * -(-max_positions // _SPLIT_KEYS) * (head_dim + 2))
        # without enough of it a thread takes all splits of a row, one after the other
        partials = torch.empty(min(size, _MAX_PARTIALS), dtype=torch.float32)
        self._lowered.kept.append(partials)
        return partials


def kv_struct(kv: KVLayer) -> KVLayerStruct:
    """The pages of a layer, which must lie head by head: see `KVLayout.HEADS`.

    Raises:
        ValueError: They lie otherwise, or the kernels cannot take their sizes.
    """
    num_pages, page_size, kv_heads, stored = kv.keys.shape
    head_size, page_stride = page_size * stored, kv.keys.stride(0)
    _require(kv.keys.stride() == (page_stride, 1, head_size, page_size), kv.keys.stride())
    _require(kv.values.stride() == (page_stride, stored, head_size, 1), kv.values.stride())
    _require(kv.keys.dtype in _KV_FORMATS, kv.keys.dtype)
    _require(num_pages > 0, num_pages)
    _require(page_size % _HALF_GROUP == 0, page_size)
    _require(kv.head_dim <= MAX_HEAD_DIM, kv.head_dim)
    _require(why_not(kv.head_dim, kv.keys.dtype) is None, kv.head_dim)
    return KVLayerStruct(
        *(address(kv.keys), address(kv.values), *_scales(kv)),
        *(page_stride, 0 if kv.key_scales is None else kv.key_scales.stride(0)),
        *(_KV_FORMATS[kv.keys.dtype], page_size, kv_heads, kv.head_dim),
    )


def _scales(kv: KVLayer) -> tuple[int | None, int | None]:
    """Addresses of the scales, which lie as the numbers do: token by token for each head."""
    kind = KVFormat.of(kv.keys.dtype)
    _require((kv.key_scales is None) == (kind is KVFormat.FLOAT), "scales")
    if kv.key_scales is None or kv.value_scales is None:
        return None, None
    page_size, inside = kv.keys.shape[1], kv.key_scales.shape[3:]
    strides, size = [1], page_size
    for count in reversed(inside):
        strides.insert(1, size)
        size *= count
    expected = (1, size, *strides[1:])
    for scales in (kv.key_scales, kv.value_scales):
        _require(scales.dtype == kind.scale_dtype, scales.dtype)
        _require(scales.stride()[1:] == expected, scales.stride())
    return address(kv.key_scales), address(kv.value_scales)


def _require(holds: bool, found: object) -> None:
    """What the kernels rely on, checked also where assertions are off."""
    if not holds:
        raise ValueError(f"the native kernels cannot read such pages: {found}")


def _rope(node: RopeNode) -> RopeStruct:
    kv = kv_struct(node.kv)
    return RopeStruct(
        address(node.q),
        address(node.k),
        address(node.v),
        node.q.stride(0),
        node.k.stride(0),
        node.v.stride(0),
        address(node.table),
        address(node.out),
        node.out.stride(0),
        width(node.q) // kv.head_dim,
        0,
        kv,
    )


def _pairwise(node: PairwiseNode) -> PairwiseStruct:
    x, y, out = node.x, node.y, node.out
    strides = (x.stride(0), y.stride(0), out.stride(0))
    return PairwiseStruct(address(x), address(y), address(out), *strides, width(x))


def _gather(node: GatherNode) -> GatherStruct:
    x, out = node.x, node.out
    return GatherStruct(address(x), address(out), x.stride(0), out.stride(0), width(x))
