"""One ragged forward of a decoder of the Llama family, written once against the op interface.

Knows: the order of ops in a layer, static buffers, which rows' logits are wanted.
Does not know: sessions, sampling, how an op is executed, where weights came from.
Invariant: the description becomes a program once for each KV cache; no tensor is allocated after
the first forward with a given number of rows, and every call writes into `out=`. The result is
valid until the next forward.
Cost: per row about `11 · hidden + 4 · intermediate + vocab` numbers of scratch memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from chatrt.models.rope import identity_rope_table, rope_table
from chatrt_kernels.ops import ForwardInputs, RowMeta

if TYPE_CHECKING:
    from chatrt.batch import Batch
    from chatrt.kvcache import KVCache
    from chatrt.models.config import ModelConfig
    from chatrt.models.weights import DecoderWeights, LayerWeights, Projection
    from chatrt_kernels.ops import Calls, KVLayer, Ops, Program


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
        self._first_rows: dict[int, torch.Tensor] = {}
        self._features = torch.empty(
            len(feature_layers), max_rows, config.hidden_size, dtype=dtype, device=device
        )
        self._max_positions = max_positions
        self._programs: dict[KVCache, Program] = {}

    def forward(
        self, batch: Batch, kv: KVCache, *, feature_rows: torch.Tensor | None = None
    ) -> Logits:
        """Compute all rows, write their keys and values into `kv`, and hand out logits.

        Logits are those of `batch.logit_rows`, in that order. `feature_rows` int64 `[n]` chooses
        the rows of the features; None means all rows.
        """
        assert batch.num_rows <= self.max_rows, (batch.num_rows, self.max_rows)
        inputs = self._inputs(batch, feature_rows)
        self._program(kv).run(inputs)
        values = self._logits[: inputs.logit_rows.shape[0]]
        return Logits(values, self._kept_features(inputs.feature_rows.shape[0]))

    def profile(self, batch: Batch, kv: KVCache) -> dict[str, float] | None:
        """One forward's milliseconds by family of ops; None where the executor cannot tell."""
        return self._program(kv).profile(self._inputs(batch, None))

    def _inputs(self, batch: Batch, feature_rows: torch.Tensor | None) -> ForwardInputs:
        if feature_rows is None:
            feature_rows = self._first_rows.get(batch.num_rows)
            if feature_rows is None:
                feature_rows = self._all_rows[: batch.num_rows]
                self._first_rows[batch.num_rows] = feature_rows
        return ForwardInputs(batch.meta, batch.logit_rows, feature_rows)

    def _program(self, kv: KVCache) -> Program:
        program = self._programs.get(kv)
        if program is None:
            outputs = [self._logits, *self._features]
            program = self._ops.compile(
                partial(self._describe, kv=kv), self._largest_inputs(kv.page_size), outputs
            )
            self._programs[kv] = program
        return program

    def _describe(self, ops: Calls, inputs: ForwardInputs, *, kv: KVCache) -> None:
        """The whole forward, written down as calls of `ops`."""
        meta, feature_rows = inputs.meta, inputs.feature_rows
        buffers = self._buffers_for(meta.token_ids.shape[0])
        ops.embed(self.weights.embedding, meta.token_ids, out=buffers.hidden)
        for index, layer in enumerate(self.weights.layers):
            rope = self._no_rope if index in self.config.no_rope_layers else self._rope
            self._attention(ops, layer, rope, buffers, meta, kv.layer(index))
            self._mlp(ops, layer, buffers)
            if index in self.feature_layers:
                kept = self._features[self.feature_layers.index(index), : feature_rows.shape[0]]
                ops.gather_rows(buffers.hidden, feature_rows, out=kept)
        self._head(ops, inputs.logit_rows, buffers)

    def _largest_inputs(self, page_size: int) -> ForwardInputs:
        """Inputs of the largest forward, as shapes: their contents are never read."""
        device = self._logits.device
        rows = torch.zeros(5, self.max_rows, dtype=torch.int64, device=device)
        num_pages = -(-self._max_positions // page_size)
        meta = RowMeta(
            token_ids=rows[0],
            positions=rows[1],
            write_slots=rows[2],
            page_table=torch.zeros(1, num_pages, dtype=torch.int32, device=device),
            q_start=torch.zeros(2, dtype=torch.int32, device=device),
            kv_len=torch.zeros(1, dtype=torch.int32, device=device),
        )
        return ForwardInputs(meta, rows[3], rows[4])

    def _attention(
        self,
        ops: Calls,
        layer: LayerWeights,
        rope: torch.Tensor,
        buffers: _Buffers,
        meta: RowMeta,
        kv: KVLayer,
    ) -> None:
        self._normalize(ops, buffers.hidden, layer.attention_norm, buffers.normed)
        _project(ops, buffers.normed, layer.query, buffers.q)
        _project(ops, buffers.normed, layer.key, buffers.k)
        _project(ops, buffers.normed, layer.value, buffers.v)
        q = self._normalize_heads(ops, buffers.q, layer.query_norm, buffers.q_normed)
        k = self._normalize_heads(ops, buffers.k, layer.key_norm, buffers.k_normed)
        ops.rope_and_write_kv(q, k, buffers.v, rope, meta, kv, out=buffers.q_rotated)
        ops.paged_attention(buffers.q_rotated, meta, kv, self._scale, out=buffers.attended)
        _project(ops, buffers.attended, layer.output, buffers.projected)
        ops.add(buffers.hidden, buffers.projected, out=buffers.hidden)

    def _mlp(self, ops: Calls, layer: LayerWeights, buffers: _Buffers) -> None:
        self._normalize(ops, buffers.hidden, layer.mlp_norm, buffers.normed)
        _project(ops, buffers.normed, layer.gate, buffers.gate)
        _project(ops, buffers.normed, layer.up, buffers.up)
        ops.swiglu(buffers.gate, buffers.up, out=buffers.activated)
        _project(ops, buffers.activated, layer.down, buffers.projected)
        ops.add(buffers.hidden, buffers.projected, out=buffers.hidden)

    def _head(self, ops: Calls, logit_rows: torch.Tensor, buffers: _Buffers) -> None:
        num_logits = logit_rows.shape[0]
        if num_logits:
            # the layers are done with these two buffers
            wanted, normed = self._buffers.projected[:num_logits], self._buffers.normed[:num_logits]
            ops.gather_rows(buffers.hidden, logit_rows, out=wanted)
            self._normalize(ops, wanted, self.weights.final_norm, normed)
            ops.linear(normed, self.weights.head, None, out=self._logits[:num_logits])

    def _normalize(
        self, ops: Calls, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
    ) -> None:
        ops.rms_norm(x, weight, self.config.rms_norm_eps, out=out)

    def _normalize_heads(
        self, ops: Calls, x: torch.Tensor, weight: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        if weight is None:
            return x
        heads = (-1, self.config.head_dim)
        self._normalize(ops, x.view(heads), weight, out.view(heads))
        return out

    def _kept_features(self, num_rows: int) -> torch.Tensor | None:
        return self._features[:, :num_rows].transpose(0, 1) if self.feature_layers else None

    def _buffers_for(self, num_rows: int) -> _Buffers:
        buffers = self._buffers_by_rows.get(num_rows)
        if buffers is None:
            buffers = self._buffers_by_rows[num_rows] = self._buffers.first(num_rows)
        return buffers


def _project(ops: Calls, x: torch.Tensor, projection: Projection, out: torch.Tensor) -> None:
    ops.linear(x, projection.weight, projection.bias, out=out)


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
