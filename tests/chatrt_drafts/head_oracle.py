"""A head by its definition, row after row in plain PyTorch: what the drafter is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from chatrt.batch import BatchBuilder, BatchRows
from chatrt.kvcache import KVCache
from chatrt_kernels.reference import DenseWeight

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from chatrt.engine import Target
    from chatrt_drafts.head_file import HeadFile
    from chatrt_kernels.ops import Weight

PAGE_SIZE = 16


def dense(weight: Weight) -> Tensor:
    assert isinstance(weight, DenseWeight)
    return weight.matrix


class HeadOracle:
    """Computes a head over a whole sequence; `target` runs on the reference executor."""

    def __init__(self, head: HeadFile, target: Target) -> None:
        self.head = head
        self.target = target
        self.config = target.decoder.config
        self.embedding = dense(target.decoder.weights.embedding)
        self.rows = dense(target.decoder.weights.head)[head.token_ids.long()]

    def features(self, token_ids: Sequence[int]) -> Tensor:
        """What each position gives to the next one's row, `[tokens, hidden]`."""
        config, count = self.config, len(token_ids)
        pages = range(-(-count // PAGE_SIZE))
        kv = KVCache.allocate(
            num_layers=config.num_layers,
            num_pages=len(pages),
            page_size=PAGE_SIZE,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
            device="cpu",
        )
        batches = BatchBuilder(count, 1, len(pages), PAGE_SIZE, torch.device("cpu"))
        batch = batches.build([BatchRows(list(token_ids), 0, pages)])
        features = self.target.decoder.forward(batch, kv).features
        assert features is not None
        return self._rms(features.clone()).flatten(1) @ self._matrix("features").T

    def inputs(self, token_ids: Sequence[int], *, unknown: Collection[int] = ()) -> Tensor:
        """The layer's inputs `[tokens, hidden]`; nothing was known in front of `unknown` rows."""
        bases = torch.zeros(len(token_ids), self.config.hidden_size)
        bases[1:] = self.features(token_ids)[:-1]
        for position in unknown:
            bases[position] = 0
        return bases + self._embedded(token_ids)

    def keys_and_values(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """`[tokens, kv_heads, head_dim]` each, of positions from 0 on."""
        shape = (-1, self.config.num_kv_heads, self.config.head_dim)
        normed = self._norm(inputs, "attention_norm")
        keys = (normed @ self._matrix("key").T).view(shape)
        return self._rotate(keys), (normed @ self._matrix("value").T).view(shape)

    def chain(self, inputs: Tensor, num_tokens: int) -> list[int]:
        """Greedy drafts behind the last of the rows."""
        drafts: list[int] = []
        for _ in range(num_tokens):
            hidden = self._norm(self._layer(inputs)[-1], "final_norm")
            drafts.append(int(self.head.token_ids[(self.rows @ hidden).argmax()]))
            following = self._matrix("hidden") @ hidden + self._embedded(drafts[-1:])[0]
            inputs = torch.cat((inputs, following[None]))
        return drafts

    def _layer(self, inputs: Tensor) -> Tensor:
        config = self.config
        keys, values = self.keys_and_values(inputs)
        normed = self._norm(inputs, "attention_norm")
        queries = (normed @ self._matrix("query").T).view(-1, config.num_heads, config.head_dim)
        attended = functional.scaled_dot_product_attention(
            self._rotate(queries).transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            is_causal=True,
            enable_gqa=True,
        )
        hidden = inputs + attended.transpose(0, 1).flatten(1) @ self._matrix("output").T
        normed = self._norm(hidden, "mlp_norm")
        gate = functional.silu(normed @ self._matrix("gate").T)
        return hidden + (gate * (normed @ self._matrix("up").T)) @ self._matrix("down").T

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.target.decoder.rope[: len(x), None].chunk(2, dim=-1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _embedded(self, token_ids: Sequence[int]) -> Tensor:
        return self._rms(self.embedding[list(token_ids)]) @ self._matrix("embedding").T

    def _rms(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self._rms(x) * self.head.tensors[f"{name}.weight"]

    def _matrix(self, name: str) -> Tensor:
        return self.head.tensors[f"{name}.weight"]
