"""One ragged forward of a decoder of the Llama family, written once against the op interface.

Knows: the order of ops in a layer, static buffers, which rows' logits are wanted.
Does not know: sessions, sampling, how an op is executed, where weights came from.
Invariant: no tensor is allocated after the first forward with a given number of rows, and every
call writes into `out=`; the result is valid until the next forward.
Cost: per row about `11 · hidden + 4 · intermediate + vocab` numbers of scratch memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatrt.models.rope import identity_rope_table, rope_table

if TYPE_CHECKING:
    from chatrt.batch import Batch
    from chatrt.kvcache import KVCache
    from chatrt.models.config import ModelConfig
    from chatrt.models.weights import DecoderWeights, LayerWeights, Projection
    from chatrt_kernels.ops import KVLayer, Ops, RowMeta


@dataclass(frozen=True, slots=True)
class Logits:
    """What one forward hands out; views of static buffers, valid until the next forward.

    `values`: `[num_logit_rows, vocab]`. `features`: `[num_feature_rows, num_feature_layers,
    hidden]`, the residual stream behind each feature layer before any norm, or None where the
    decoder was made without feature layers.
    """

    values: torch.Tensor
    features: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Scratch for a given number of rows: slices of the decoder's largest buffers."""

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

    def first(self, num_rows: int) -> _Buffers:
        return _Buffers(*(getattr(self, name)[:num_rows] for name in self.__slots__))


class Decoder:
    """Describes the layer once; construct one for each model and executor.

    `max_rows` bounds a batch, `max_positions` a sequence. `feature_layers` are the 0-based layers
    behind which hidden states can be taken. Norm weights and buffers have `dtype`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        ops: Ops,
        *,
        max_rows: int,
        max_positions: int,
        device: torch.device,
        dtype: torch.dtype,
        feature_layers: tuple[int, ...] = (),
    ) -> None:
        self.config = config
        self.weights = weights
        self.max_rows = max_rows
        self.feature_layers = feature_layers
        self._ops = ops
        self._scale = config.head_dim**-0.5
        self._rope = rope_table(
            config,
            num_positions=max_positions,
            divisors=weights.rope_divisors,
            dtype=torch.promote_types(dtype, torch.float32),
            device=device,
        )
        self._no_rope = identity_rope_table(self._rope) if config.no_rope_layers else self._rope
        self._buffers = _allocate(config, max_rows, dtype=dtype, device=device)
        self._buffers_by_rows: dict[int, _Buffers] = {}
        self._logits = torch.empty(max_rows, config.vocab_size, dtype=dtype, device=device)
        self._all_rows = torch.arange(max_rows, device=device)
        self._features = torch.empty(
            len(feature_layers), max_rows, config.hidden_size, dtype=dtype, device=device
        )

    def forward(
        self, batch: Batch, kv: KVCache, *, feature_rows: torch.Tensor | None = None
    ) -> Logits:
        """Compute all rows, write their keys and values into `kv`, and hand out logits.

        Logits are those of `batch.logit_rows`, in that order. `feature_rows` int64 `[n]` chooses
        the rows of the features; None means all rows.
        """
        buffers = self._buffers_for(batch.num_rows)
        meta = batch.meta
        if feature_rows is None:
            feature_rows = self._all_rows[: batch.num_rows]
        self._ops.embed(self.weights.embedding, meta.token_ids, out=buffers.hidden)
        for index, layer in enumerate(self.weights.layers):
            rope = self._no_rope if index in self.config.no_rope_layers else self._rope
            self._attention(layer, rope, buffers, meta, kv.layer(index))
            self._mlp(layer, buffers)
            if index in self.feature_layers:
                kept = self._features[self.feature_layers.index(index), : feature_rows.shape[0]]
                self._ops.gather_rows(buffers.hidden, feature_rows, out=kept)
        return Logits(
            self._head(batch.logit_rows, buffers), self._kept_features(feature_rows.shape[0])
        )

    def _attention(
        self,
        layer: LayerWeights,
        rope: torch.Tensor,
        buffers: _Buffers,
        meta: RowMeta,
        kv: KVLayer,
    ) -> None:
        ops = self._ops
        self._normalize(buffers.hidden, layer.attention_norm, buffers.normed)
        self._project(buffers.normed, layer.query, buffers.q)
        self._project(buffers.normed, layer.key, buffers.k)
        self._project(buffers.normed, layer.value, buffers.v)
        q = self._normalize_heads(buffers.q, layer.query_norm, buffers.q_normed)
        k = self._normalize_heads(buffers.k, layer.key_norm, buffers.k_normed)
        ops.rope_and_write_kv(q, k, buffers.v, rope, meta, kv, out=buffers.q_rotated)
        ops.paged_attention(buffers.q_rotated, meta, kv, self._scale, out=buffers.attended)
        self._project(buffers.attended, layer.output, buffers.projected)
        ops.add(buffers.hidden, buffers.projected, out=buffers.hidden)

    def _mlp(self, layer: LayerWeights, buffers: _Buffers) -> None:
        self._normalize(buffers.hidden, layer.mlp_norm, buffers.normed)
        self._project(buffers.normed, layer.gate, buffers.gate)
        self._project(buffers.normed, layer.up, buffers.up)
        self._ops.swiglu(buffers.gate, buffers.up, out=buffers.activated)
        self._project(buffers.activated, layer.down, buffers.projected)
        self._ops.add(buffers.hidden, buffers.projected, out=buffers.hidden)

    def _head(self, logit_rows: torch.Tensor, buffers: _Buffers) -> torch.Tensor:
        num_logits = logit_rows.shape[0]
        logits = self._logits[:num_logits]
        if num_logits:
            # the layers are done with these two buffers
            wanted, normed = self._buffers.projected[:num_logits], self._buffers.normed[:num_logits]
            self._ops.gather_rows(buffers.hidden, logit_rows, out=wanted)
            self._normalize(wanted, self.weights.final_norm, normed)
            self._ops.linear(normed, self.weights.head, None, out=logits)
        return logits

    def _normalize(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        self._ops.rms_norm(x, weight, self.config.rms_norm_eps, out=out)

    def _normalize_heads(
        self, x: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        if weight is None:
            return x
        heads = (-1, self.config.head_dim)
        self._normalize(x.view(heads), weight, out.view(heads))
        return out

    def _project(self, x: torch.Tensor, projection: Projection, out: torch.Tensor) -> None:
        self._ops.linear(x, projection.weight, projection.bias, out=out)

    def _kept_features(self, num_rows: int) -> torch.Tensor | None:
        return self._features[:, :num_rows].transpose(0, 1) if self.feature_layers else None

    def _buffers_for(self, num_rows: int) -> _Buffers:
        assert num_rows <= self.max_rows, (num_rows, self.max_rows)
        buffers = self._buffers_by_rows.get(num_rows)
        if buffers is None:
            buffers = self._buffers_by_rows[num_rows] = self._buffers.first(num_rows)
        return buffers


def _allocate(
    config: ModelConfig, max_rows: int, *, dtype: torch.dtype, device: torch.device
) -> _Buffers:
    def rows(width: int) -> torch.Tensor:
        return torch.empty(max_rows, width, dtype=dtype, device=device)

    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    return _Buffers(
        hidden=rows(config.hidden_size),
        normed=rows(config.hidden_size),
        projected=rows(config.hidden_size),
        q=rows(q_width),
        q_rotated=rows(q_width),
        attended=rows(q_width),
        k=rows(kv_width),
        v=rows(kv_width),
        q_normed=rows(q_width if config.qk_norm else 0),
        k_normed=rows(kv_width if config.qk_norm else 0),
        gate=rows(config.intermediate_size),
        up=rows(config.intermediate_size),
        activated=rows(config.intermediate_size),
    )
