"""A tiny random decoder for tests: real ops, real configuration, made in milliseconds.

Knows: the shapes of a Llama-type layer. Does not know: transformers, files.
Invariant: the same arguments give the same weights on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatrt.models.config import GenerationDefaults, ModelConfig
from chatrt.models.loader import Model
from chatrt.models.weights import DecoderWeights, LayerWeights, Projection

if TYPE_CHECKING:
    from chatrt_kernels.ops import Ops, Weight


def tiny_config(
    *,
    vocab_size: int = 320,
    num_layers: int = 2,
    max_context: int = 512,
    eos_token_ids: frozenset[int] = frozenset(),
) -> ModelConfig:
    """A Llama-type configuration: hidden 64, four heads of 16 that share two KV heads."""
    return ModelConfig(
        architecture="llama",
        hidden_size=64,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=vocab_size,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_context=max_context,
        tie_word_embeddings=True,
        eos_token_ids=eos_token_ids,
    )


def tiny_model(
    ops: Ops,
    config: ModelConfig | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Model:
    """Random weights for `config` (default: `tiny_config()`), prepared by `ops`.

    Logits have a standard deviation near 4, so that samples differ between positions.
    Biases and q/k norms are left out.
    """
    config = config or tiny_config()
    random = _Random(ops, torch.Generator().manual_seed(seed), torch.device(device), dtype)
    embedding = random.weight(config.vocab_size, config.hidden_size, gain=4.0)
    layers = tuple(_layer(random, config) for _ in range(config.num_layers))
    final_norm = random.norm(config.hidden_size)
    weights = DecoderWeights(embedding, layers, final_norm, head=embedding)
    return Model(config, weights, GenerationDefaults(), fingerprint=f"tiny-{seed}-{config!r}")


@dataclass(frozen=True, slots=True)
class _Random:
    """Draws weights, one after the other, from one generator."""

    ops: Ops
    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype

    def weight(self, out_features: int, in_features: int, *, gain: float = 1.0) -> Weight:
        values = torch.randn(out_features, in_features, generator=self.generator)
        return self.ops.prepare(values * (gain / math.sqrt(in_features)))

    def projection(self, out_features: int, in_features: int) -> Projection:
        return Projection(self.weight(out_features, in_features))

    def norm(self, size: int) -> torch.Tensor:
        values = 1 + torch.randn(size, generator=self.generator) / 10
        return values.to(self.device, self.dtype)


def _layer(random: _Random, config: ModelConfig) -> LayerWeights:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    return LayerWeights(
        attention_norm=random.norm(hidden),
        query=random.projection(q_width, hidden),
        key=random.projection(kv_width, hidden),
        value=random.projection(kv_width, hidden),
        output=random.projection(hidden, q_width),
        mlp_norm=random.norm(hidden),
        gate=random.projection(intermediate, hidden),
        up=random.projection(intermediate, hidden),
        down=random.projection(hidden, intermediate),
    )
