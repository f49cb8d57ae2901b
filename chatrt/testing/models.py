"""A tiny random decoder for tests: real ops, real configuration, made in milliseconds.

Knows: the shapes of a Llama-type layer. Does not know: transformers, files.
Invariant: the same arguments give the same weights on every machine.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from chatrt.models.config import GenerationDefaults, ModelConfig
from chatrt.models.loader import Model
from chatrt.models.weights import DecoderWeights, LayerWeights, Projection

if TYPE_CHECKING:
    from chatrt_kernels.ops import Ops


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
    generator = torch.Generator().manual_seed(seed)

    def matrix(out_features: int, in_features: int, *, gain: float = 1.0) -> torch.Tensor:
        scale = gain / math.sqrt(in_features)
        return torch.randn(out_features, in_features, generator=generator) * scale

    def projection(out_features: int, in_features: int) -> Projection:
        return Projection(ops.prepare(matrix(out_features, in_features)))

    def norm() -> torch.Tensor:
        return (1 + torch.randn(config.hidden_size, generator=generator) / 10).to(device, dtype)

    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    embedding = ops.prepare(matrix(config.vocab_size, config.hidden_size, gain=4.0))
    layers = tuple(
        LayerWeights(
            attention_norm=norm(),
            query=projection(q_width, config.hidden_size),
            key=projection(kv_width, config.hidden_size),
            value=projection(kv_width, config.hidden_size),
            output=projection(config.hidden_size, q_width),
            mlp_norm=norm(),
            gate=projection(config.intermediate_size, config.hidden_size),
            up=projection(config.intermediate_size, config.hidden_size),
            down=projection(config.hidden_size, config.intermediate_size),
        )
        for _ in range(config.num_layers)
    )
    weights = DecoderWeights(embedding, layers, final_norm=norm(), head=embedding)
    return Model(config, weights, GenerationDefaults(), fingerprint=f"tiny-{seed}-{config!r}")
