"""What a decoder-only model of the Llama family is, whatever its files look like.

Knows: counts, norms, rotation, end tokens; `generation_config.json`, and what
both readers of configurations share.
Does not know: the keys of `config.json` (config_hf) or GGUF (config_gguf), tensors, devices.
Invariant: a `ModelConfig` that exists can be served; everything else was refused by name.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from chatrt.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

logger = logging.getLogger(__name__)

_SUPPORTED_ROPE = ("none", "linear", "llama3")
_NO_ROPE_INTERVAL = 4  # SmolLM3: every fourth layer has no rotation unless told otherwise


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones are kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one model; all counts are per layer where they can be.

    `attention_bias` is that of the query, key and value projections, `attention_out_bias` that of
    the output projection. `no_rope_layers` are the 0-based layers without rotation. `max_context`
    is already clipped to `sliding_window`, since attention here always sees everything.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_context: int
    rope_scaling: RopeScaling = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    no_rope_layers: frozenset[int] = frozenset()
    sliding_window: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise UnsupportedModel(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(f"head dimension is {self.head_dim}, it must be even")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's makers recommend for sampling; None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: frozenset[int] = frozenset()


def generation_defaults_from_hf(values: Mapping[str, Any]) -> GenerationDefaults:
    """Read the contents of `generation_config.json`; an empty mapping gives no recommendation.

    Without `do_sample` its sampling values are not in force upstream, so they are not taken over.
    """
    eos = id_set(values.get("eos_token_id"))
    if not values.get("do_sample", False):
        return GenerationDefaults(eos_token_ids=eos)
    return GenerationDefaults(
        temperature=values.get("temperature"),
        top_p=values.get("top_p"),
        top_k=values.get("top_k"),
        min_p=values.get("min_p"),
        repetition_penalty=values.get("repetition_penalty"),
        eos_token_ids=eos,
    )


def unsupported_architecture(name: str, supported: Collection[str]) -> UnsupportedModel:
    """The error for an architecture that is not among `supported`."""
    return UnsupportedModel(
        f"architecture '{name}' is not served; supported are {', '.join(supported)}"
    )


def unsupported_rope(kind: str) -> UnsupportedModel:
    """The error for a kind of rope scaling that is not served."""
    return UnsupportedModel(
        f"rope scaling '{kind}' is not served; supported are {', '.join(_SUPPORTED_ROPE)}"
    )


def clip_to_window(max_context: int, window: int | None) -> tuple[int, int | None]:
    """The context that can be served, and the window; clipping is logged."""
    if window is None or window >= max_context:
        return max_context, window
    logger.warning(
        "context clipped from %d to the model's sliding window of %d tokens", max_context, window
    )
    return window, window


def every_nth_layer(num_layers: int, interval: int = _NO_ROPE_INTERVAL) -> frozenset[int]:
    """Every `interval`-th layer, counted from 1: SmolLM3's layers without rotation."""
    return frozenset(range(interval - 1, num_layers, interval))


def id_set(value: Any) -> frozenset[int]:
    """Token ids written as one number, a list, or nothing."""
    if value is None:
        return frozenset()
    return frozenset(int(i) for i in (value if isinstance(value, list) else [value]))


def first_id(value: Any) -> int | None:
    """A token id written as a number or a list, of which the first counts."""
    if isinstance(value, list):
        value = value[0] if value else None
    return None if value is None else int(value)
