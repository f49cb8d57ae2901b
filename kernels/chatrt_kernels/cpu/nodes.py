"""A forward as a list of nodes: what was called, before it becomes calls of the kernels.

Knows: which buffers a node reads and writes, whose rows it works on.
Does not know: how a node is computed. Invariant: a node changes nothing but what `writes` names.

A buffer is known by the address of its first element: the views that a decoder makes of one buffer
all start there, unless it gives columns of a wide one to several ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from chatrt_kernels.cpu.structs import LinearMode, RowsOf

if TYPE_CHECKING:
    from torch import Tensor

    from chatrt_kernels.cpu.weights import NativeWeight
    from chatrt_kernels.ops import KVLayer


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows a node has: `per` for each of the step's rows of one sort."""

    of: RowsOf = RowsOf.ALL
    per: int = 1


@dataclass(slots=True)
class Node:
    """What all nodes have; `quantised` names the 8-bit buffer that a node fills besides `out`."""

    rows: Rows
    out: Tensor
    quantised: int | None = None
    needs_floats: bool = True  # whether anybody reads `out` itself

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """Float buffers that it reads."""
        return ()

    @property
    def writes(self) -> tuple[Tensor, ...]:
        """Float buffers that it changes."""
        return (self.out,)


@dataclass(slots=True, kw_only=True)
class EmbedNode(Node):
    """out[r] = weight[token_ids[r]]."""

    weight: NativeWeight


@dataclass(slots=True, kw_only=True)
class NormNode(Node):
    """out = x / rms(x) * weight."""

    x: Tensor
    weight: Tensor
    eps: float

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """The rows to norm."""
        return (self.x,)


@dataclass(slots=True, kw_only=True)
class QuantiseNode(Node):
    """The 8-bit form of x; `out` is x itself, unchanged."""

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """What is quantised."""
        return (self.out,)

    @property
    def writes(self) -> tuple[Tensor, ...]:
        """Nothing but the 8-bit buffer."""
        return ()


@dataclass(slots=True, kw_only=True)
class LinearNode(Node):
    """Matrices over one input; `outs` are theirs, `out` the first of them.

    `source` names the 8-bit buffer in which the input lies, for weights that are not plain.
    """

    x: Tensor
    weights: tuple[NativeWeight, ...]
    biases: tuple[Tensor | None, ...]
    outs: tuple[Tensor, ...]
    mode: LinearMode = LinearMode.STORE
    source: int | None = None

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """The input, and what is added to."""
        return (self.x, self.out) if self.mode is LinearMode.ADD_TO else (self.x,)

    @property
    def writes(self) -> tuple[Tensor, ...]:
        """Every matrix's result; one for gate and up together."""
        return self.outs

    @property
    def wants_quantised(self) -> bool:
        """Whether any of its weights multiplies 8-bit activations."""
        return any(not weight.is_plain for weight in self.weights)

    @property
    def wants_floats(self) -> bool:
        """Whether any of its weights multiplies float activations."""
        return any(weight.is_plain for weight in self.weights)


@dataclass(slots=True, kw_only=True)
class RopeNode(Node):
    """out = rotated q; k and v go to the cache."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    kv: KVLayer

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """The three projections."""
        return (self.q, self.k, self.v)


@dataclass(slots=True, kw_only=True)
class AttentionNode(Node):
    """Causal attention over the cache."""

    q: Tensor
    kv: KVLayer
    scale: float

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """The queries."""
        return (self.q,)


@dataclass(slots=True, kw_only=True)
class PairwiseNode(Node):
    """x + y, or silu(x) * y."""

    x: Tensor
    y: Tensor
    gated: bool

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """Both operands."""
        return (self.x, self.y)


@dataclass(slots=True, kw_only=True)
class GatherNode(Node):
    """out[i] = x[rows[i]]; `rows.of` says which rows of the step they are."""

    x: Tensor

    @property
    def reads(self) -> tuple[Tensor, ...]:
        """Where rows are taken from."""
        return (self.x,)


AnyNode: TypeAlias = (
    EmbedNode
    | NormNode
    | QuantiseNode
    | LinearNode
    | RopeNode
    | AttentionNode
    | PairwiseNode
    | GatherNode
)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two views start at the same element."""
    return a.data_ptr() == b.data_ptr()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views of rows have an element in common; columns of one buffer may have none."""
    if not a.numel() or not b.numel():
        return False
    if a.data_ptr() > b.data_ptr():
        a, b = b, a
    distance = (b.data_ptr() - a.data_ptr()) // a.element_size()
    if distance >= (a.shape[0] - 1) * a.stride(0) + width(a):
        return False
    column = distance % a.stride(0)
    is_beside = column >= width(a) and column + width(b) <= a.stride(0)
    return not (is_beside and a.stride(0) == b.stride(0))


def width(x: Tensor) -> int:
    """Numbers of a row."""
    return x.shape[-1]
