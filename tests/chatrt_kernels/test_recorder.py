from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chatrt_kernels.recorder import Recorder
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt_kernels.ragged import Shape, page_tables, poisoned_layer, row_meta

if TYPE_CHECKING:
    from chatrt_kernels.ops import KVLayer, Ops, RowMeta, Weight

SHAPE = Shape(heads=4, kv_heads=2, head_dim=8, page_size=4, num_pages=32)
HIDDEN, FEATURES, VOCAB = 24, SHAPE.heads * SHAPE.head_dim, 50
KV_FEATURES = SHAPE.kv_heads * SHAPE.head_dim


@dataclass
class Layer:
    q: Weight
    k: Weight
    v: Weight
    output: Weight
    up: Weight
    down: Weight
    norm: Tensor


class TwoLayers:
    """A decoder in miniature that uses every op on static buffers."""

    def __init__(self, ops: Ops) -> None:
        generator = torch.Generator().manual_seed(11)

        def weight(out_features: int, in_features: int) -> Weight:
            matrix = torch.randn(out_features, in_features, generator=generator)
            return ops.prepare(matrix / in_features**0.5)

        self.embedding = weight(VOCAB, HIDDEN)
        self.layers = [
            Layer(
                q=weight(FEATURES, HIDDEN),
                k=weight(KV_FEATURES, HIDDEN),
                v=weight(KV_FEATURES, HIDDEN),
                output=weight(HIDDEN, FEATURES),
                up=weight(2 * HIDDEN, HIDDEN),
                down=weight(HIDDEN, 2 * HIDDEN),
                norm=torch.rand(HIDDEN, generator=generator) + 0.5,
            )
            for _ in range(2)
        ]
        self.rope = torch.rand(64, SHAPE.head_dim, generator=generator)
        self.bias = torch.randn(FEATURES, generator=generator)

    def forward(
        self, ops: Ops, meta: RowMeta, rows: Tensor, kv: list[KVLayer], logits: Tensor
    ) -> None:
        num_rows = meta.token_ids.shape[0]
        x, normed, projected = torch.full((3, num_rows, HIDDEN), torch.nan)
        q, turned, attended = torch.full((3, num_rows, FEATURES), torch.nan)
        k, v = torch.full((2, num_rows, KV_FEATURES), torch.nan)
        gate, up = torch.full((2, num_rows, 2 * HIDDEN), torch.nan)
        ops.embed(self.embedding, meta.token_ids, out=x)
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            ops.rms_norm(x, layer.norm, 1e-5, out=normed)
            ops.linear(normed, layer.q, self.bias, out=q)
            ops.linear(normed, layer.k, None, out=k)
            ops.linear(normed, layer.v, None, out=v)
            ops.rope_and_write_kv(q, k, v, self.rope, meta, layer_kv, out=turned)
            ops.paged_attention(turned, meta, layer_kv, 0.3, out=attended)
            ops.linear(attended, layer.output, None, out=projected)
            ops.add(x, projected, out=x)
            ops.linear(x, layer.up, None, out=gate)
            ops.linear(x, layer.up, None, out=up)
            ops.swiglu(gate, up, out=up)
            ops.linear(up, layer.down, None, out=projected)
            ops.add(x, projected, out=x)
        wanted = torch.full((rows.shape[0], HIDDEN), torch.nan)
        ops.gather_rows(x, rows, out=wanted)
        ops.linear(wanted, self.embedding, None, out=logits)


def inputs(sequences: list[tuple[int, int]], seed: int) -> tuple[RowMeta, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    meta = row_meta(sequences, page_tables(sequences, SHAPE, generator), SHAPE.page_size)
    meta.token_ids.random_(0, VOCAB, generator=generator)
    return meta, torch.randint(0, len(meta.token_ids), (3,), generator=generator)


def overwrite(static: RowMeta, new: RowMeta) -> None:
    for name in ("token_ids", "positions", "write_slots", "q_start", "kv_len"):
        getattr(static, name).copy_(getattr(new, name))
    static.page_table.zero_()
    static.page_table[:, : new.page_table.shape[1]].copy_(new.page_table)


def empty_cache() -> list[KVLayer]:
    return [poisoned_layer(SHAPE, torch.float32) for _ in range(2)]


def test_a_replay_on_new_contents_equals_an_eager_run() -> None:
    ops = ReferenceOps()
    model, recorder, recorded_kv = TwoLayers(ops), Recorder(ops), empty_cache()
    # the same number of rows, shared out otherwise: 9 rows over three sequences
    static, static_rows = inputs([(7, 7), (1, 1), (1, 1)], seed=1)
    logits = torch.full((3, VOCAB), torch.nan)
    model.forward(recorder, static, static_rows, recorded_kv, logits)
    recording = recorder.recording()

    for seed, sequences in enumerate([[(2, 2), (3, 3), (4, 4)], [(0, 0), (1, 1), (8, 8)]], start=2):
        meta, rows = inputs(sequences, seed)
        eager = torch.full((3, VOCAB), torch.nan)
        model.forward(ops, meta, rows, empty_cache(), eager)
        overwrite(static, meta)
        static_rows.copy_(rows)
        logits.fill_(torch.nan)

        recording.replay()

        assert not eager.isnan().any()
        assert torch.equal(logits, eager)


def test_recording_a_forward_computes_it_too() -> None:
    ops = ReferenceOps()
    meta, rows = inputs([(5, 5), (1, 1)], seed=4)
    eager, recorded = torch.full((2, 3, VOCAB), torch.nan)

    TwoLayers(ops).forward(ops, meta, rows, empty_cache(), eager)
    TwoLayers(ops).forward(Recorder(ops), meta, rows, empty_cache(), recorded)

    assert torch.equal(recorded, eager)


def test_a_recording_keeps_every_call_once_and_grows_no_more() -> None:
    recorder = Recorder(ReferenceOps())
    x, out = torch.ones(1, 4), torch.empty(1, 4)
    recorder.prepare(torch.ones(4, 4))
    recorder.add(x, x, out=out)
    recording = recorder.recording()

    recorder.swiglu(x, x, out=out)
    recording.replay()

    assert len(recording.calls) == 1
    assert len(recorder.recording().calls) == 2
    assert torch.equal(out, torch.full((1, 4), 2.0))


def test_a_recorder_can_stand_wherever_ops_are_asked_for() -> None:
    ops: Ops = Recorder(ReferenceOps())

    assert ops.name == "reference"
