"""A decoder in miniature that uses every op on static buffers, for tests of recorded forwards.

Its sizes suit every storage format; what a real decoder may have (q/k norms, biases, features taken
in the middle, formats that differ from matrix to matrix) is chosen by a `Recipe`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from chatrt_kernels.formats import QuantFormat
from chatrt_kernels.ops import ForwardInputs, KVLayer, RowMeta
from tests.chatrt_kernels.ragged import Shape, page_tables, poisoned_layer, row_meta
from tests.chatrt_kernels.weights_support import random_matrix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from chatrt_kernels.ops import Calls, Describe, Ops, Weight

SHAPE = Shape(heads=8, kv_heads=2, head_dim=32, page_size=16, num_pages=96)
HIDDEN, WIDE, VOCAB = 256, 512, 50
FEATURES, KV_FEATURES = SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
NUM_LAYERS = 2
MAX_ROWS = 48
MAX_POSITIONS = 304
MATRICES = {
    "q": (FEATURES, HIDDEN),
    "k": (KV_FEATURES, HIDDEN),
    "v": (KV_FEATURES, HIDDEN),
    "output": (HIDDEN, FEATURES),
    "gate": (WIDE, HIDDEN),
    "up": (WIDE, HIDDEN),
    "down": (HIDDEN, WIDE),
}


@dataclass(frozen=True)
class Recipe:
    """What a miniature is made of; `formats` overrides `default` for single matrices."""

    default: QuantFormat = QuantFormat.Q4_1
    formats: Mapping[str, QuantFormat] = field(default_factory=dict)
    head_norms: bool = False
    biases: bool = False
    kv_dtype: torch.dtype = torch.float16


RECIPES = {
    "q4_1": Recipe(),
    "q8_0": Recipe(QuantFormat.Q8_0, kv_dtype=torch.float32),
    "head norms": Recipe(head_norms=True),
    "biases": Recipe(QuantFormat.Q4_0, biases=True),
    "mixed k-quants": Recipe(
        QuantFormat.Q4_K,
        {"v": QuantFormat.Q6_K, "down": QuantFormat.Q6_K, "gate": QuantFormat.Q5_K},
        head_norms=True,
        biases=True,
    ),
    "plain": Recipe(QuantFormat.F32),
    "plain among quantised": Recipe(
        QuantFormat.Q8_0,
        {"k": QuantFormat.BF16, "output": QuantFormat.F16, "up": QuantFormat.F32},
    ),
    "quantised among plain": Recipe(
        QuantFormat.BF16, {"q": QuantFormat.Q4_K, "embedding": QuantFormat.Q6_K}
    ),
}


class Miniature:
    """Weights and static buffers, poisoned with NaN; results are `logits` and `features`."""

    def __init__(self, ops: Ops, recipe: Recipe) -> None:
        self._recipe = recipe
        self._generator = torch.Generator().manual_seed(11)
        self.embedding = self._weight(ops, "embedding", (VOCAB, HIDDEN))
        self.layers = [
            {name: self._weight(ops, name, shape) for name, shape in MATRICES.items()}
            for _ in range(NUM_LAYERS)
        ]
        self.biases = {name: self._vector(out) for name, (out, _) in MATRICES.items()}
        self.norm, self.head_norm = self._vector(HIDDEN) + 1, self._vector(SHAPE.head_dim) + 1
        self.rope = torch.rand(MAX_POSITIONS, SHAPE.head_dim, generator=self._generator)
        self.x, self.normed, self.projected = torch.full((3, MAX_ROWS, HIDDEN), torch.nan)
        self.q, self.turned, self.attended = torch.full((3, MAX_ROWS, FEATURES), torch.nan)
        self.k, self.v = torch.full((2, MAX_ROWS, KV_FEATURES), torch.nan)
        self.gate, self.up, self.activated = torch.full((3, MAX_ROWS, WIDE), torch.nan)
        self.logits = torch.full((MAX_ROWS, VOCAB), torch.nan)
        self.features = torch.full((MAX_ROWS, HIDDEN), torch.nan)
        self.wanted, self.wanted_normed = torch.full((2, MAX_ROWS, HIDDEN), torch.nan)

    @property
    def outputs(self) -> list[Tensor]:
        """What is read behind a run."""
        return [self.logits, self.features]

    def on(self, kv: Sequence[KVLayer]) -> Describe:
        """The description of a forward over the pages of one cache."""
        return partial(self._describe, kv=kv)

    def cache(self) -> list[KVLayer]:
        """Unwritten pages, poisoned with NaN, as the native kernels want them to lie."""
        layers = [poisoned_layer(SHAPE, self._recipe.kv_dtype) for _ in range(NUM_LAYERS)]
        return [
            KVLayer(
                layer.keys.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
                layer.values.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
            )
            for layer in layers
        ]

    def _describe(self, ops: Calls, inputs: ForwardInputs, *, kv: Sequence[KVLayer]) -> None:
        num_rows = inputs.meta.token_ids.shape[0]
        x = self.x[:num_rows]
        ops.embed(self.embedding, inputs.meta.token_ids, out=x)
        for index, (weights, layer_kv) in enumerate(zip(self.layers, kv, strict=True)):
            self._layer(ops, weights, inputs.meta, layer_kv, num_rows)
            if index == 0:
                kept = self.features[: inputs.feature_rows.shape[0]]
                ops.gather_rows(x, inputs.feature_rows, out=kept)
        num_logits = inputs.logit_rows.shape[0]
        wanted, normed = self.wanted[:num_logits], self.wanted_normed[:num_logits]
        ops.gather_rows(x, inputs.logit_rows, out=wanted)
        ops.rms_norm(wanted, self.norm, 1e-5, out=normed)
        ops.linear(normed, self.embedding, None, out=self.logits[:num_logits])

    def _layer(
        self,
        ops: Calls,
        weights: Mapping[str, Weight],
        meta: RowMeta,
        kv: KVLayer,
        num_rows: int,
    ) -> None:
        x, normed, projected = (b[:num_rows] for b in (self.x, self.normed, self.projected))
        q, turned, attended = (b[:num_rows] for b in (self.q, self.turned, self.attended))
        k, v = self.k[:num_rows], self.v[:num_rows]
        gate, up, activated = (b[:num_rows] for b in (self.gate, self.up, self.activated))

        def project(name: str, source: Tensor, out: Tensor) -> None:
            bias = self.biases[name] if self._recipe.biases else None
            ops.linear(source, weights[name], bias, out=out)

        ops.rms_norm(x, self.norm, 1e-5, out=normed)
        project("q", normed, q)
        project("k", normed, k)
        project("v", normed, v)
        if self._recipe.head_norms:
            for heads in (q.view(-1, SHAPE.head_dim), k.view(-1, SHAPE.head_dim)):
                ops.rms_norm(heads, self.head_norm, 1e-6, out=heads)
        ops.rope_and_write_kv(q, k, v, self.rope, meta, kv, out=turned)
        ops.paged_attention(turned, meta, kv, SHAPE.head_dim**-0.5, out=attended)
        project("output", attended, projected)
        ops.add(x, projected, out=x)
        ops.rms_norm(x, self.norm, 1e-5, out=normed)
        project("gate", normed, gate)
        project("up", normed, up)
        ops.swiglu(gate, up, out=activated)
        project("down", activated, projected)
        ops.add(x, projected, out=x)

    def _weight(self, ops: Ops, name: str, shape: tuple[int, int]) -> Weight:
        quant_format = self._recipe.formats.get(name, self._recipe.default)
        seed = int(torch.randint(0, 1 << 30, (), generator=self._generator))
        return ops.prepare(random_matrix(quant_format, shape, seed))

    def _vector(self, size: int) -> Tensor:
        return torch.randn(size, generator=self._generator) / 4


class Sequences:
    """Sequences that grow from step to step, each on pages of its own."""

    def __init__(self, num_sequences: int) -> None:
        self._generator = torch.Generator().manual_seed(21)
        longest = [(0, MAX_POSITIONS - 16)] * num_sequences
        self._tables = page_tables(longest, SHAPE, self._generator)
        self._lengths = [0] * num_sequences

    def step(
        self, counts: Sequence[int], logit_rows: Sequence[int], feature_rows: Sequence[int] = ()
    ) -> ForwardInputs:
        """The next `counts[s]` random tokens of each sequence s."""
        for sequence, count in enumerate(counts):
            self._lengths[sequence] += count
        rows = list(zip(counts, self._lengths, strict=True))
        meta = row_meta(rows, self._tables, SHAPE.page_size)
        meta.token_ids.random_(0, VOCAB, generator=self._generator)
        return ForwardInputs(
            meta,
            torch.tensor(logit_rows, dtype=torch.int64),
            torch.tensor(feature_rows, dtype=torch.int64),
        )


def largest_inputs() -> ForwardInputs:
    """As many rows of each sort as any step may have."""
    meta = row_meta([(MAX_ROWS, MAX_POSITIONS - 16)], [range(MAX_POSITIONS // 16)], 16)
    return ForwardInputs(meta, torch.arange(MAX_ROWS), torch.arange(MAX_ROWS))
