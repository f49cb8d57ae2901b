"""Reads the metadata of a GGUF file.

Knows: the keys under an architecture's prefix, and which tensors tell biases and norms.
Does not know: the container (gguf_file), tensors' contents.
Invariant: what cannot be served raises `UnsupportedModel`, what cannot be read `ModelFileError`.
Source: llama.cpp's list of GGUF keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatrt.errors import ModelFileError, UnsupportedModel
from chatrt.models.config import (
    LinearScaling,
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

_SUPPORTED = ("llama", "qwen2", "qwen3", "smollm3")  # Mistral models call themselves llama


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> ModelConfig:
    """Read GGUF metadata; `shapes` are the tensors' `(out_features, in_features)` by name.

    Biases, q/k norms and a tied head are told by which tensors exist, as llama.cpp does it.

    Raises:
        UnsupportedModel: The architecture, rope scaling or expert layout is not served.
        ModelFileError: A required key or the token embedding is missing.
    """
    architecture = str(metadata.get("general.architecture", "unknown"))
    if architecture not in _SUPPORTED:
        raise unsupported_architecture(architecture, _SUPPORTED)
    if "token_embd.weight" not in shapes:
        raise ModelFileError("the GGUF file has no tensor 'token_embd.weight'")
    try:
        return _read(_GgufValues(metadata, architecture), shapes)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelFileError(f"the GGUF file's metadata is damaged: {error!r}") from error


def _read(values: _GgufValues, shapes: Mapping[str, tuple[int, ...]]) -> ModelConfig:
    num_layers, num_heads = values.count("block_count"), values.count("attention.head_count")
    hidden_size = values.count("embedding_length")
    head_dim = values.count("attention.key_length", hidden_size // num_heads)
    _refuse_gguf_variants(values, head_dim)
    max_context, window = clip_to_window(
        values.count("context_length"), values.optional("attention.sliding_window")
    )
    metadata, architecture = values.metadata, values.architecture
    ends = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=values.count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=values.count("feed_forward_length"),
        vocab_size=shapes["token_embd.weight"][0],
        rms_norm_eps=float(values.required("attention.layer_norm_rms_epsilon")),
        rope_theta=float(values.optional("rope.freq_base") or 10_000.0),
        max_context=max_context,
        rope_scaling=_gguf_rope_scaling(values),
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        attention_out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        no_rope_layers=every_nth_layer(num_layers) if architecture == "smollm3" else frozenset(),
        sliding_window=window,
        eos_token_ids=id_set([end for end in ends if end is not None]),
        bos_token_id=first_id(metadata.get("tokenizer.ggml.bos_token_id")),
    )


@dataclass(frozen=True, slots=True)
class _GgufValues:
    """Metadata under one architecture's prefix."""

    metadata: Mapping[str, Any]
    architecture: str

    def optional(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def required(self, key: str) -> Any:
        value = self.optional(key)
        if value is None:
            raise ModelFileError(f"the GGUF file has no key '{self.architecture}.{key}'")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.optional(key)
        if value is None and default is not None:
            return default
        value = self.required(key)
        if isinstance(value, int):
            return value
        raise UnsupportedModel(
            f"'{self.architecture}.{key}' differs between layers, which is not served; "
            "supported is one number for all"
        )


def _refuse_gguf_variants(values: _GgufValues, head_dim: int) -> None:
    experts = values.optional("expert_count") or 0
    if experts:
        raise UnsupportedModel(f"a mixture of {experts} experts is not served; supported are dense")
    for key in ("rope.dimension_count", "attention.value_length"):
        size = values.count(key, head_dim)
        if size != head_dim:
            raise UnsupportedModel(
                f"'{key}' is {size} where a head has {head_dim} dimensions; they must be equal"
            )


def _gguf_rope_scaling(values: _GgufValues) -> RopeScaling:
    # Llama 3's own scaling comes as the tensor rope_freqs.weight, not as metadata
    kind = values.optional("rope.scaling.type") or "none"
    if kind == "none":
        return None
    if kind == "linear":
        return LinearScaling(float(values.required("rope.scaling.factor")))
    raise unsupported_rope(str(kind))
