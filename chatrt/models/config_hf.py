"""Reads a Hugging Face `config.json`.

Knows: the spellings of transformers 4 and 5, and what each family fills in for a missing key.
Does not know: files, tensors, GGUF.
Invariant: what cannot be served raises `UnsupportedModel`, what cannot be read `ModelFileError`.
Source: the configuration classes of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatrt.errors import ModelFileError, UnsupportedModel
from chatrt.models.config import (
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeScaling,
    clip_to_window,
    every_nth_layer,
    first_id,
    id_set,
    unsupported_architecture,
    unsupported_rope,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class _Family:
    """What transformers fills in when `config.json` leaves a key out."""

    max_context: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden size / query heads
    rope_theta: float = 10_000.0
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False  # always present, whatever `attention_bias` says
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    window_needs_flag: bool = True  # `sliding_window` counts only with `use_sliding_window`


_FAMILIES = {
    "llama": _Family(2048, reads_attention_bias=True, reads_mlp_bias=True),
    "mistral": _Family(131_072, num_kv_heads=8, window_needs_flag=False),
    "qwen2": _Family(32_768, num_kv_heads=32, qkv_bias=True),
    "qwen3": _Family(
        32_768, num_kv_heads=32, head_dim=128, qk_norm=True, reads_attention_bias=True
    ),
    "smollm3": _Family(
        32_768,
        num_kv_heads=4,
        rope_theta=2_000_000.0,
        tied=True,
        reads_attention_bias=True,
        reads_mlp_bias=True,
    ),
}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Read the contents of a Hugging Face `config.json`.

    Raises:
        UnsupportedModel: The architecture, activation, rope scaling or quantisation is not served.
        ModelFileError: A required key is missing, or a value cannot be read.
    """
    architecture = str(values.get("model_type", "unknown"))
    family = _FAMILIES.get(architecture)
    if family is None:
        raise unsupported_architecture(architecture, tuple(_FAMILIES))
    _refuse_hf_variants(values)
    try:
        return _read(values, architecture, family)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelFileError(f"config.json is damaged: {error!r}") from error


def _read(values: Mapping[str, Any], architecture: str, family: _Family) -> ModelConfig:
    num_layers = int(_required(values, "num_hidden_layers"))
    num_heads = int(_required(values, "num_attention_heads"))
    hidden_size = int(_required(values, "hidden_size"))
    head_dim = values.get("head_dim") or family.head_dim or hidden_size // num_heads
    kv_heads = values.get("num_key_value_heads") or family.num_kv_heads or num_heads
    max_context, window = clip_to_window(
        int(values.get("max_position_embeddings", family.max_context)),
        _hf_window(values, family),
    )
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    attention_bias = family.reads_attention_bias and bool(values.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        intermediate_size=int(_required(values, "intermediate_size")),
        vocab_size=int(_required(values, "vocab_size")),
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or values.get("rope_theta") or family.rope_theta),
        max_context=max_context,
        rope_scaling=_hf_rope_scaling(rope, max_context),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", family.tied)),
        attention_bias=attention_bias or family.qkv_bias,
        attention_out_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and bool(values.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        no_rope_layers=_hf_no_rope_layers(values, num_layers),
        sliding_window=window,
        eos_token_ids=id_set(values.get("eos_token_id")),
        bos_token_id=first_id(values.get("bos_token_id")),
    )


def _required(values: Mapping[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise ModelFileError(f"config.json has no '{key}'")
    return values[key]


def _refuse_hf_variants(values: Mapping[str, Any]) -> None:
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"activation '{activation}' is not served; supported is silu")
    quantization = values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModel(
            f"safetensors quantised with '{method}' are not served; "
            "use float16, bfloat16 or float32 weights, or a GGUF file"
        )


def _hf_window(values: Mapping[str, Any], family: _Family) -> int | None:
    window = values.get("sliding_window")
    if window is None or (family.window_needs_flag and not values.get("use_sliding_window", False)):
        return None
    return int(window)


def _hf_rope_scaling(rope: Mapping[str, Any], max_context: int) -> RopeScaling:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(
            f"partial rotation ({rope['partial_rotary_factor']} of a head) is not served; "
            "supported is 1.0"
        )
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(float(rope["factor"]))
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_context=int(rope.get("original_max_position_embeddings", max_context)),
        )
    raise unsupported_rope(str(kind))


def _hf_no_rope_layers(values: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    if values["model_type"] != "smollm3":
        return frozenset()
    # upstream's list is named after the layers without rotation, yet 1 marks a layer that rotates
    flags = values.get("no_rope_layers")
    if flags is None:
        return every_nth_layer(num_layers, int(values.get("no_rope_layer_interval", 4)))
    return frozenset(i for i in range(num_layers) if not flags[i])
