"""The network of a trained head on an executor's ops: behind a target's pass, and for a draft.

    # a pass of the target        the features of its rows, and, if it is followed, their keys and
    #                             values; else these are written later (`DeferredRows`)
    # a step, behind all passes   a row for each session that drafts: keys and values, logits

Knows: the head's tensors, the target's embedding, head rows and hidden states, static buffers.
Does not know: sessions, who drafts how deep, tokens' meaning.
Invariant: row j of the head's keys and values comes from the target's feature at j - 1 (or, while
drafting, from the head's own state there) and the token at j; nothing is allocated in a step.
Cost: for a followed pass the bytes of `features`, `embedding`, key and value, 3 to 5 % of the
default model's step, for a shown one a few norms; for a draft the layer and the kept head rows, a
tenth of that step.
Source: EAGLE, arXiv 2401.15077, 2406.16858, 2503.01840.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatrt.batch import BatchBuilder
from chatrt.models.layer import LayerBuffers, LayerCalls, project
from chatrt.models.quantize import quantize_matrix
from chatrt.models.weights import LayerWeights, Projection
from chatrt_drafts.deferred_rows import DeferredRows
from chatrt_kernels.ops import ForwardInputs, RowMeta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt.batch import Batch
    from chatrt.kvcache import KVCache
    from chatrt.models.decoder import Decoder
    from chatrt_drafts.head_file import HeadFile
    from chatrt_kernels.formats import QuantFormat
    from chatrt_kernels.ops import Calls, Ops, Program, Weight


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """A head's weights as an executor keeps them; `kept` are the target's own rows of its tokens.

    `num_bytes` counts the matrices that are the head's alone.
    """

    features: Weight  # [hidden, feature_layers * hidden]
    embedding: Weight  # [hidden, hidden]
    own: Weight  # [hidden, hidden]
    layer: LayerWeights
    final_norm: Tensor
    kept: Weight  # [num kept tokens, hidden]

    @property
    def num_bytes(self) -> int:
        """Bytes of the head's own matrices."""
        matrices = [self.features, self.embedding, self.own]
        matrices += [projection.weight for projection in self.layer.projections()]
        return sum(matrix.num_bytes for matrix in matrices)


def prepare_weights(
    head: HeadFile, decoder: Decoder, ops: Ops, quant_format: QuantFormat | None
) -> HeadWeights:
    """Give a head's matrices to the executor of its target, in a format that suits it."""
    device, dtype = decoder.device, decoder.dtype

    def matrix(name: str, *, sensitive: bool = False) -> Weight:
        dense = head.tensors[f"{name}.weight"]
        quantized = quantize_matrix(dense, quant_format) if quant_format else dense
        return ops.prepare(quantized, sensitive=sensitive)

    def norm(name: str) -> Tensor:
        return head.tensors[f"{name}.weight"].to(device, dtype)

    layer = LayerWeights(
        attention_norm=norm("attention_norm"),
        query=Projection(matrix("query")),
        key=Projection(matrix("key")),
        value=Projection(matrix("value")),
        output=Projection(matrix("output")),
        mlp_norm=norm("mlp_norm"),
        gate=Projection(matrix("gate")),
        up=Projection(matrix("up")),
        down=Projection(matrix("down")),
    )
    return HeadWeights(
        features=matrix("features"),
        embedding=matrix("embedding"),
        own=matrix("hidden", sensitive=True),  # as the head rows are: one product with them
        layer=layer,
        final_norm=norm("final_norm"),
        kept=ops.restrict(decoder.weights.head, head.token_ids.to(device, torch.int64)),
    )


class HeadNetwork:
    """The head over one KV cache: a part of the target's passes, and programs of its own.

    As the decoder's follower it takes the features of every pass, and writes the head's rows in the
    same pass if it is followed; `deferred` writes those of passes that were not. `bases` is what
    rows start from besides their token; whoever runs a pass or a program chooses one for each row.
    The first `num_slots` rows of it belong to the caller (row 0 must stay zero: nothing is known).
    Behind them, in `max_rows` rows, a followed pass leaves what each of its rows gives to the next
    position, and `step` what each drafted row gives to its successor.

    Args:
        weights: The head's.
        layers: The target's layers, 0-based, behind which it takes features.
        decoder: The target's, not followed yet.
        ops: The executor of both.
        kv: The head's own pages.
        num_slots: Rows of `bases` for the caller.
        num_deferred: Rows that can wait to be written.
    """

    def __init__(
        self,
        weights: HeadWeights,
        layers: tuple[int, ...],
        decoder: Decoder,
        ops: Ops,
        kv: KVCache,
        *,
        num_slots: int,
        num_deferred: int = 512,
    ) -> None:
        config, max_rows = decoder.config, decoder.max_rows
        device, dtype, hidden = decoder.device, decoder.dtype, decoder.config.hidden_size
        self.layers = layers
        self.num_slots = num_slots
        self._weights = weights
        self._rope = decoder.rope
        self._embedding = decoder.weights.embedding
        self._eps = config.rms_norm_eps
        self._kv = kv.layer(0)
        self._calls = LayerCalls(config)
        self._buffers = LayerBuffers.allocate(config, max_rows, dtype=dtype, device=device)
        self._ones = torch.ones(hidden, dtype=dtype, device=device)
        self.features = torch.empty(max_rows, len(layers) * hidden, dtype=dtype, device=device)
        # behind the caller's and a pass's: those put by of a step's earlier passes, deferred rows
        self._first_put_by = num_slots + max_rows
        first_deferred = self._first_put_by + (0 if ops.even_rows is None else max_rows)
        num_bases = first_deferred + min(kv.page_size, max_rows)
        self.bases = torch.zeros(num_bases, hidden, dtype=dtype, device=device)
        self._logits = torch.empty(max_rows, weights.kept.shape[0], dtype=dtype, device=device)
        host_rows = torch.zeros(max_rows, dtype=torch.int64)
        self._host_base_rows = host_rows.numpy()
        self._base_rows = host_rows.to(device)  # on a CPU the same memory
        self._no_rows = torch.zeros(0, dtype=torch.int64, device=device)
        num_pages = -(-decoder.rope.shape[0] // kv.page_size)
        largest = self._largest_inputs(max_rows, 0, num_pages)
        self._step = ops.compile(self._describe_step, largest, [self.bases, self._logits])
        self.deferred = DeferredRows(
            self,
            ops,
            self._largest_inputs(num_bases - first_deferred, num_bases - first_deferred, num_pages),
            BatchBuilder(num_bases - first_deferred, 1, num_pages, kv.page_size, device),
            num_places=num_deferred,
            first_base=first_deferred,
        )
        decoder.follow_with(self)

    @property
    def step_program(self) -> Program:
        """A step as a program; its `feature_rows` choose the rows of `bases`."""
        return self._step

    @property
    def logits(self) -> Tensor:
        """Where it leaves its logits, `[max_rows, kept]`."""
        return self._logits

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What is read behind a pass."""
        return (self.bases, self.features)

    def follow_layer(self, ops: Calls, place: int, hidden: Tensor) -> None:
        """Take the hidden states `[rows, hidden]` behind layer `layers[place]`."""
        num_rows, hidden_size = hidden.shape
        part = self.features[:num_rows, place * hidden_size : (place + 1) * hidden_size]
        ops.rms_norm(hidden, self._ones, self._eps, out=part)

    def follow(self, ops: Calls, inputs: ForwardInputs) -> None:
        """Write the head's keys and values of the pass, and what its rows give to their next."""
        num_rows = inputs.meta.token_ids.shape[0]
        following = self.bases[self.num_slots : self.num_slots + num_rows]
        self.write_rows(ops, inputs, self.features[:num_rows], following)

    def write_rows(
        self, ops: Calls, inputs: ForwardInputs, features: Tensor, following: Tensor
    ) -> None:
        """Write keys and values of rows with `features`; what they give goes to `following`.

        Describes it to any executor: `features` `[rows, feature_layers * hidden]`, and `following`
        rows of `bases`, among which `inputs.feature_rows` choose what each row starts from.
        """
        meta, layer = inputs.meta, self._weights.layer
        ops.linear(features, self._weights.features, None, out=following)
        buffers = self._start(ops, inputs)
        ops.rms_norm(buffers.hidden, layer.attention_norm, self._eps, out=buffers.normed)
        project(ops, buffers.normed, layer.key, buffers.k)
        project(ops, buffers.normed, layer.value, buffers.v)
        no_queries = buffers.q[:, :0]
        ops.rope_and_write_kv(
            no_queries, buffers.k, buffers.v, self._rope, meta, self._kv, out=no_queries
        )

    def choose_bases(self, base_rows: Sequence[int]) -> Tensor:
        """The rows of `bases` that rows start from, as a pass or a step reads them.

        Within a pass that is `num_slots + r - 1` for all rows r but each sequence's first.
        """
        num_rows = len(base_rows)
        self._host_base_rows[:num_rows] = base_rows
        chosen = self._base_rows[:num_rows]
        if self._base_rows.device.type != "cpu":
            chosen.copy_(torch.from_numpy(self._host_base_rows[:num_rows]))
        return chosen

    def put_by(self, num_rows: int, num_before: int) -> int:
        """Copy what the last pass left for its rows behind `num_before` that are put by already.

        Returns the row of `bases` where the first is. The next pass of the step takes its place.
        """
        first = self._first_put_by + num_before
        self.bases[first : first + num_rows] = self.bases[
            self.num_slots : self.num_slots + num_rows
        ]
        return first

    def step(self, batch: Batch, base_rows: Sequence[int]) -> Tensor:
        """Logits over the kept tokens `[rows, kept]`, valid until the next step.

        The successor of row i starts from row `num_slots + i` of `bases`.
        """
        chosen = self.choose_bases(base_rows)
        self._step.run(ForwardInputs(batch.meta, self._no_rows, chosen, batch.num_positions))
        return self._logits[: batch.num_rows]

    def _describe_step(self, ops: Calls, inputs: ForwardInputs) -> None:
        num_rows = inputs.meta.token_ids.shape[0]
        weights, rope = self._weights, self._rope
        buffers = self._start(ops, inputs)
        self._calls.describe(ops, weights.layer, rope, buffers, inputs.meta, self._kv)
        ops.rms_norm(buffers.hidden, weights.final_norm, self._eps, out=buffers.normed)
        ops.linear(buffers.normed, weights.kept, None, out=self._logits[:num_rows])
        following = self.bases[self.num_slots : self.num_slots + num_rows]
        ops.linear(buffers.normed, weights.own, None, out=following)

    def _start(self, ops: Calls, inputs: ForwardInputs) -> LayerBuffers:
        """The layer's input in `hidden`: the token's embedding and what the row starts from."""
        token_ids = inputs.meta.token_ids
        buffers = self._buffers.first(token_ids.shape[0])
        ops.gather_rows(self.bases, inputs.feature_rows, out=buffers.hidden)
        ops.embed(self._embedding, token_ids, out=buffers.normed)
        ops.rms_norm(buffers.normed, self._ones, self._eps, out=buffers.normed)
        ops.linear(buffers.normed, self._weights.embedding, None, out=buffers.projected)
        ops.add(buffers.hidden, buffers.projected, out=buffers.hidden)
        return buffers

    def _largest_inputs(self, num_rows: int, num_logits: int, num_pages: int) -> ForwardInputs:
        """Inputs of the largest run, as shapes: their contents are never read."""
        device = self.bases.device
        rows = torch.zeros(5, num_rows, dtype=torch.int64, device=device)
        meta = RowMeta(
            token_ids=rows[0],
            positions=rows[1],
            write_slots=rows[2],
            page_table=torch.zeros(1, num_pages, dtype=torch.int32, device=device),
            q_start=torch.zeros(2, dtype=torch.int32, device=device),
            kv_len=torch.zeros(1, dtype=torch.int32, device=device),
        )
        return ForwardInputs(meta, rows[3, :num_logits], rows[4], self._rope.shape[0])
