"""What a decoder-only model of the Llama family is, read from `config.json` or GGUF metadata.

Knows: the two spellings (transformers 4 and 5) and the GGUF keys of the families that are served.
Does not know: tensors, files, devices.
Invariant: a `ModelConfig` that exists can be served; everything else was refused by name.
Source: the configuration classes of transformers and llama.cpp's GGUF key list.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from chatrt.errors import ModelFileError, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

logger = logging.getLogger(__name__)

SUPPORTED_HF = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
SUPPORTED_GGUF = ("llama", "qwen2", "qwen3", "smollm3")
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
        ModelFileError: A required key is missing.
    """
    architecture = str(values.get("model_type", "unknown"))
    family = _FAMILIES.get(architecture)
    if family is None:
        raise _unsupported_architecture(architecture, SUPPORTED_HF)
    _refuse_hf_variants(values)
    num_layers = int(_required(values, "num_hidden_layers"))
    num_heads = int(_required(values, "num_attention_heads"))
    hidden_size = int(_required(values, "hidden_size"))
    head_dim = values.get("head_dim") or family.head_dim or hidden_size // num_heads
    kv_heads = values.get("num_key_value_heads") or family.num_kv_heads or num_heads
    max_context, window = _clip_to_window(
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
        eos_token_ids=_id_set(values.get("eos_token_id")),
        bos_token_id=_first_id(values.get("bos_token_id")),
    )


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
    if architecture not in SUPPORTED_GGUF:
        raise _unsupported_architecture(architecture, SUPPORTED_GGUF)
    values = _GgufValues(metadata, architecture)
    num_layers, num_heads = values.count("block_count"), values.count("attention.head_count")
    hidden_size = values.count("embedding_length")
    head_dim = values.count("attention.key_length", hidden_size // num_heads)
    if "token_embd.weight" not in shapes:
        raise ModelFileError("the GGUF file has no tensor 'token_embd.weight'")
    _refuse_gguf_variants(values, head_dim)
    max_context, window = _clip_to_window(
        values.count("context_length"), values.optional("attention.sliding_window")
    )
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
        no_rope_layers=_every_nth_layer(num_layers) if architecture == "smollm3" else frozenset(),
        sliding_window=window,
        eos_token_ids=_id_set([end for end in ends if end is not None]),
        bos_token_id=_first_id(metadata.get("tokenizer.ggml.bos_token_id")),
    )


def generation_defaults_from_hf(values: Mapping[str, Any]) -> GenerationDefaults:
    """Read the contents of `generation_config.json`; an empty mapping gives no recommendation.

    Without `do_sample` its sampling values are not in force upstream, so they are not taken over.
    """
    eos = _id_set(values.get("eos_token_id"))
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


def _unsupported_architecture(name: str, supported: Collection[str]) -> UnsupportedModel:
    return UnsupportedModel(
        f"architecture '{name}' is not served; supported are {', '.join(supported)}"
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


def _clip_to_window(max_context: int, window: int | None) -> tuple[int, int | None]:
    if window is None or window >= max_context:
        return max_context, window
    logger.warning(
        "context clipped from %d to the model's sliding window of %d tokens", max_context, window
    )
    return window, window


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
    raise _unsupported_rope(str(kind))


def _unsupported_rope(kind: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"rope scaling '{kind}' is not served; supported are {', '.join(_SUPPORTED_ROPE)}"
    )


def _hf_no_rope_layers(values: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    if values["model_type"] != "smollm3":
        return frozenset()
    # upstream's list is named after the layers without rotation, yet 1 marks a layer that rotates
    flags = values.get("no_rope_layers")
    if flags is None:
        return _every_nth_layer(num_layers, int(values.get("no_rope_layer_interval", 4)))
    return frozenset(i for i in range(num_layers) if not flags[i])


def _every_nth_layer(num_layers: int, interval: int = _NO_ROPE_INTERVAL) -> frozenset[int]:
    return frozenset(range(interval - 1, num_layers, interval))


def _id_set(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(int(i) for i in (value if isinstance(value, list) else [value]))


def _first_id(value: Any) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    return None if value is None else int(value)


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
    raise _unsupported_rope(str(kind))
