"""One layer of a decoder of the Llama family, written once against the op interface.

Knows: the order of ops in a layer, the scratch that they work in. Does not know: how many layers
there are, whose they are, how an op is executed.
Invariant: every call writes into `out=`; what a layer leaves is in `hidden`.
Cost: per row about `11 · hidden + 4 · intermediate` numbers of scratch memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from chatrt.models.config import ModelConfig
    from chatrt.models.weights import LayerWeights, Projection
    from chatrt_kernels.ops import Calls, KVLayer, RowMeta


@dataclass(frozen=True, slots=True)
class LayerBuffers:
    """Scratch for a given number of rows; `first` gives the same memory for fewer."""

    hidden: torch.Tensor  # [rows, hidden], the residual stream
    normed: torch.Tensor  # [rows, hidden]
    projected: torch.Tensor  # [rows, hidden]
    q: torch.Tensor  # [rows, heads * head_dim]
    q_rotated: torch.Tensor
    attended: torch.Tensor
    k: torch.Tensor  # [rows, kv_heads * head_dim]
    v: torch.Tensor
    q_normed: torch.Tensor
    k_normed: torch.Tensor
    gate: torch.Tensor  # [rows, intermediate]
    up: torch.Tensor
    activated: torch.Tensor

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        max_rows: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        wide: bool = False,
    ) -> LayerBuffers:
        """Unwritten scratch for up to `max_rows` rows.

        `wide`: q, k and v are columns of one buffer, gate and up of another. Heads that are normed
        on their own have theirs apart, since their rows must be one run of numbers.
        """

        def rows(width: int) -> torch.Tensor:
            return torch.empty(max_rows, width, dtype=dtype, device=device)

        q_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        q, k, v = rows(q_width), rows(kv_width), rows(kv_width)
        gate, up = rows(config.intermediate_size), rows(config.intermediate_size)
        if wide:
            gate, up = rows(2 * config.intermediate_size).chunk(2, dim=1)
        if wide and not config.qk_norm:
            q, k, v = torch.split(rows(q_width + 2 * kv_width), [q_width, kv_width, kv_width], 1)
        return cls(
            hidden=rows(config.hidden_size),
            normed=rows(config.hidden_size),
            projected=rows(config.hidden_size),
            q=q,
            q_rotated=rows(q_width),
            attended=rows(q_width),
            k=k,
            v=v,
            q_normed=rows(q_width if config.qk_norm else 0),
            k_normed=rows(kv_width if config.qk_norm else 0),
            gate=gate,
            up=up,
            activated=rows(config.intermediate_size),
        )

    def first(self, num_rows: int) -> LayerBuffers:
        """The first rows of each buffer."""
        return LayerBuffers(*(getattr(self, name)[:num_rows] for name in self.__slots__))


class LayerCalls:
    """Describes the layers of one configuration."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._scale = config.head_dim**-0.5

    def describe(
        self,
        ops: Calls,
        layer: LayerWeights,
        rope: torch.Tensor,
        buffers: LayerBuffers,
        meta: RowMeta,
        kv: KVLayer,
    ) -> None:
        """One layer over `buffers.hidden`, in place; keys and values go to `kv`."""
        self._attention(ops, layer, rope, buffers, meta, kv)
        self._mlp(ops, layer, buffers)

    def _attention(
        self,
        ops: Calls,
        layer: LayerWeights,
        rope: torch.Tensor,
        buffers: LayerBuffers,
        meta: RowMeta,
        kv: KVLayer,
    ) -> None:
        self._normalize(ops, buffers.hidden, layer.attention_norm, buffers.normed)
        project(ops, buffers.normed, layer.query, buffers.q)
        project(ops, buffers.normed, layer.key, buffers.k)
        project(ops, buffers.normed, layer.value, buffers.v)
        q = self._normalize_heads(ops, buffers.q, layer.query_norm, buffers.q_normed)
        k = self._normalize_heads(ops, buffers.k, layer.key_norm, buffers.k_normed)
        ops.rope_and_write_kv(q, k, buffers.v, rope, meta, kv, out=buffers.q_rotated)
        ops.paged_attention(buffers.q_rotated, meta, kv, self._scale, out=buffers.attended)
        project(ops, buffers.attended, layer.output, buffers.projected)
        ops.add(buffers.hidden, buffers.projected, out=buffers.hidden)

    def _mlp(self, ops: Calls, layer: LayerWeights, buffers: LayerBuffers) -> None:
        self._normalize(ops, buffers.hidden, layer.mlp_norm, buffers.normed)
        project(ops, buffers.normed, layer.gate, buffers.gate)
        project(ops, buffers.normed, layer.up, buffers.up)
        ops.swiglu(buffers.gate, buffers.up, out=buffers.activated)
        project(ops, buffers.activated, layer.down, buffers.projected)
        ops.add(buffers.hidden, buffers.projected, out=buffers.hidden)

    def _normalize(
        self, ops: Calls, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
    ) -> None:
        ops.rms_norm(x, weight, self._config.rms_norm_eps, out=out)

    def _normalize_heads(
        self, ops: Calls, x: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        if weight is None:
            return x
        heads = (-1, self._config.head_dim)
        self._normalize(ops, x.view(heads), weight, out.view(heads))
        return out


def project(ops: Calls, x: torch.Tensor, projection: Projection, out: torch.Tensor) -> None:
    """out = x @ weight.T + bias."""
    ops.linear(x, projection.weight, projection.bias, out=out)
