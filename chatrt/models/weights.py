"""A decoder's weights as its executor keeps them.

Knows: the parts of a layer of the Llama family. Does not know: files, names of tensors, formats.
Invariant: matrices are the executor's own `Weight`; vectors are dense tensors of the decoder's
dtype on its device. A tied head is the very same object as the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from chatrt_kernels.ops import Weight


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix `[out_features, in_features]` and its bias `[out_features]`, if it has one."""

    weight: Weight
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; the q/k norms are `[head_dim]`, the other norms `[hidden]`."""

    attention_norm: Tensor
    query: Projection
    key: Projection
    value: Projection
    output: Projection
    mlp_norm: Tensor
    gate: Projection
    up: Projection
    down: Projection
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None

    def projections(self) -> tuple[Projection, ...]:
        """The seven matrices, in the order in which a forward uses them."""
        return (self.query, self.key, self.value, self.output, self.gate, self.up, self.down)


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder; `rope_divisors` `[head_dim / 2]` divide the rotation frequencies."""

    embedding: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Weight
    rope_divisors: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes resident in matrices, a tied head counted once (vectors are negligible)."""
        ends = {id(w): w.num_bytes for w in (self.embedding, self.head)}
        layers = sum(p.weight.num_bytes for layer in self.layers for p in layer.projections())
        return sum(ends.values()) + layers
