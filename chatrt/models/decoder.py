"""One ragged forward of a decoder of the Llama family, written once against the op interface.

Knows: the order of layers, static buffers, which rows' logits are wanted.
Does not know: sessions, sampling, how an op is executed, where weights came from.
Invariant: the description becomes a program once for each KV cache, twice where passes are followed
or only shown; no tensor is allocated after the first forward with a given number of rows, and every
call writes into `out=`. The result is valid until the next forward.
Cost: per row about `11 · hidden + 4 · intermediate + vocab` numbers of scratch memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from chatrt.models.layer import LayerBuffers, LayerCalls
from chatrt.models.rope import identity_rope_table, rope_table
from chatrt_kernels.ops import ForwardInputs, RowMeta

if TYPE_CHECKING:
    from chatrt.batch import Batch
    from chatrt.kvcache import KVCache
    from chatrt.models.config import ModelConfig
    from chatrt.models.weights import DecoderWeights
    from chatrt_kernels.ops import Calls, Ops, Program


@dataclass(frozen=True, slots=True)
class Logits:
    """What one forward hands out; views of static buffers, valid until the next forward.

    `values`: `[num_logit_rows, vocab]`. `features`: `[num_feature_rows, num_feature_layers,
    hidden]`, the residual stream behind each feature layer before any norm, or None where the
    decoder was made without feature layers.
    """

    values: torch.Tensor
    features: torch.Tensor | None = None


class Follower(Protocol):
    """Takes hidden states of every pass, and computes on them in the same program.

    It computes behind the decoder's own ops, in passes that have `feature_rows`, which are its to
    use; passes without are only shown to it. A decoder that has one hands out no features itself.
    """

    @property
    def layers(self) -> tuple[int, ...]:
        """The 0-based layers behind which it takes the residual stream."""
        ...

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Buffers that are read behind a pass."""
        ...

    def follow_layer(self, ops: Calls, place: int, hidden: torch.Tensor) -> None:
        """The residual stream `[rows, hidden]` behind `layers[place]`, in the midst of the pass."""
        ...

    def follow(self, ops: Calls, inputs: ForwardInputs) -> None:
        """What is computed when the last layer is done, in passes that have feature rows."""
        ...


class Decoder:
    """Describes the layer once; construct one for each model and executor.

    `max_rows` bounds a batch, `max_positions` a sequence. `feature_layers` are the 0-based layers
    behind which hidden states can be taken. `rope` is the rotation table of `max_positions`
    positions. Norm weights and buffers have `dtype`.
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
        self._layer = LayerCalls(config)
        self.rope = rope_table(
            config,
            num_positions=max_positions,
            divisors=weights.rope_divisors,
            dtype=torch.promote_types(dtype, torch.float32),
            device=device,
        )
        self._no_rope = identity_rope_table(self.rope) if config.no_rope_layers else self.rope
        self._buffers = LayerBuffers.allocate(
            config, max_rows, dtype=dtype, device=device, wide=ops.wide_buffers
        )
        self._buffers_by_rows: dict[int, LayerBuffers] = {}
        self._logits = torch.empty(max_rows, config.vocab_size, dtype=dtype, device=device)
        self._all_rows = torch.arange(max_rows, device=device)
        self._first_rows: dict[int, torch.Tensor] = {}
        self._features = torch.empty(
            len(feature_layers), max_rows, config.hidden_size, dtype=dtype, device=device
        )
        self._max_positions = max_positions
        self._programs: dict[tuple[KVCache, bool], Program] = {}
        self._follower: Follower | None = None

    @property
    def device(self) -> torch.device:
        """Where buffers lie."""
        return self._logits.device

    @property
    def dtype(self) -> torch.dtype:
        """Of norm weights and buffers."""
        return self._logits.dtype

    @property
    def even_rows(self) -> int | None:
        """Rows up to which a pass gives each the same bits; None: no pass need be cut for that."""
        return self._ops.even_rows

    def follow_with(self, follower: Follower) -> None:
        """From now on every pass is shown to `follower`, or ends with what it computes of it."""
        assert not self.feature_layers, "features are handed out or followed, not both"
        self._follower = follower
        self._programs.clear()

    def forward(
        self, batch: Batch, kv: KVCache, *, feature_rows: torch.Tensor | None = None
    ) -> Logits:
        """Compute all rows, write their keys and values into `kv`, and hand out logits.

        Logits are those of `batch.logit_rows`, in that order. `feature_rows` int64 `[n]` chooses
        the rows of the features, None all of them. Where there is a follower they are what it makes
        of them, and with None it computes nothing.
        """
        assert batch.num_rows <= self.max_rows, (batch.num_rows, self.max_rows)
        inputs = self._inputs(batch, feature_rows)
        self._program(kv, follows=feature_rows is not None).run(inputs)
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
        return ForwardInputs(batch.meta, batch.logit_rows, feature_rows, batch.num_positions)

    def _program(self, kv: KVCache, *, follows: bool = False) -> Program:
        """The program over a KV cache; `follows` is for those that have a follower compute."""
        key = (kv, follows and self._follower is not None)
        program = self._programs.get(key)
        if program is None:
            outputs = [self._logits, *self._features]
            if self._follower is not None:
                outputs += self._follower.outputs
            describe = partial(self._describe, kv=kv, follows=key[1])
            program = self._ops.compile(describe, self._largest_inputs(kv.page_size), outputs)
            self._programs[key] = program
        return program

    def _describe(self, ops: Calls, inputs: ForwardInputs, *, kv: KVCache, follows: bool) -> None:
        """The whole forward, written down as calls of `ops`; at its end, perhaps, the follower."""
        meta, feature_rows, follower = inputs.meta, inputs.feature_rows, self._follower
        buffers = self._buffers_for(meta.token_ids.shape[0])
        ops.embed(self.weights.embedding, meta.token_ids, out=buffers.hidden)
        for index, layer in enumerate(self.weights.layers):
            rope = self._no_rope if index in self.config.no_rope_layers else self.rope
            self._layer.describe(ops, layer, rope, buffers, meta, kv.layer(index))
            if index in self.feature_layers:
                kept = self._features[self.feature_layers.index(index), : feature_rows.shape[0]]
                ops.gather_rows(buffers.hidden, feature_rows, out=kept)
            if follower is not None and index in follower.layers:
                follower.follow_layer(ops, follower.layers.index(index), buffers.hidden)
        self._head(ops, inputs.logit_rows, buffers)
        if follower is not None and follows:
            follower.follow(ops, inputs)

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
        return ForwardInputs(meta, rows[3], rows[4], self._max_positions)

    def _head(self, ops: Calls, logit_rows: torch.Tensor, buffers: LayerBuffers) -> None:
        num_logits = logit_rows.shape[0]
        if num_logits:
            # the layers are done with these two buffers
            wanted, normed = self._buffers.projected[:num_logits], self._buffers.normed[:num_logits]
            ops.gather_rows(buffers.hidden, logit_rows, out=wanted)
            ops.rms_norm(wanted, self.weights.final_norm, self.config.rms_norm_eps, out=normed)
            ops.linear(normed, self.weights.head, None, out=self._logits[:num_logits])

    def _kept_features(self, num_rows: int) -> torch.Tensor | None:
        return self._features[:, :num_rows].transpose(0, 1) if self.feature_layers else None

    def _buffers_for(self, num_rows: int) -> LayerBuffers:
        buffers = self._buffers_by_rows.get(num_rows)
        if buffers is None:
            buffers = self._buffers_by_rows[num_rows] = self._buffers.first(num_rows)
        return buffers
