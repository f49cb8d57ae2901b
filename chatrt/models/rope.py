"""The rotation table of a model: cosines and sines of every position, computed once.

Knows: `ModelConfig`'s theta and scaling. Does not know: rows, pages, how the table is applied.
Invariant: angles are computed in float64 and rounded once, so far positions lose nothing.
Source: RoFormer (arXiv 2104.09864); Llama 3.1's frequency bands as in its reference release.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from chatrt.models.config import LinearScaling, Llama3Scaling

if TYPE_CHECKING:
    from chatrt.models.config import ModelConfig, RopeScaling


def rope_table(
    config: ModelConfig,
    *,
    num_positions: int,
    divisors: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Cosines, then sines, of the head_dim / 2 angles: `[num_positions, head_dim]`.

    `divisors` `[head_dim / 2]` divide the frequencies (GGUF's `rope_freqs.weight`), or None.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    frequencies = _scaled(config.rope_theta**-exponents, config.rope_scaling)
    if divisors is not None:
        frequencies = frequencies / divisors.to("cpu", torch.float64)
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device, dtype)


def identity_rope_table(table: torch.Tensor) -> torch.Tensor:
    """A table of the same form that rotates nothing, for layers without rotation."""
    identity = torch.zeros_like(table)
    identity[:, : table.shape[1] // 2] = 1
    return identity


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(frequencies, scaling)
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    turns = scaling.original_max_context * frequencies / (2 * math.pi)  # in the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = ((turns - low) / (high - low)).clamp(0, 1)
    return kept_share * frequencies + (1 - kept_share) * frequencies / scaling.factor
