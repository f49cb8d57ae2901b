"""From a model's files to an executor's weights.

Knows: how safetensors and GGUF name the tensors of a layer, expected shapes, load-time quantising.
Does not know: networks, how an executor keeps a matrix.
Invariant: each tensor has the shape that the configuration promises, and rotation always pairs
dimension i with i + head_dim / 2, whatever order the file has.
Cost: quantised bytes go to the executor as they are; query and key matrices of llama-type GGUF
files are copied once (row order).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from chatrt.errors import ModelFileError
from chatrt.models.config_gguf import config_from_gguf
from chatrt.models.config_hf import config_from_hf
from chatrt.models.files import ModelFiles, fingerprint, generation_defaults, read_json
from chatrt.models.gguf_file import GgufFile, unpermute_rows
from chatrt.models.quantize import UNQUANTIZED, LoadQuantization, quantize_matrix
from chatrt.models.safetensors_file import SafetensorsFolder
from chatrt.models.weights import DecoderWeights, LayerWeights, Projection
from chatrt_kernels.formats import QuantizedTensor

if TYPE_CHECKING:
    import torch

    from chatrt.models.config import GenerationDefaults, ModelConfig
    from chatrt_kernels.ops import Ops, Weight

_PERMUTED_GGUF = ("llama", "smollm3")  # architectures whose query and key rows are interleaved
_HF_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "model.layers.{layer}.input_layernorm.weight",
    "query": "model.layers.{layer}.self_attn.q_proj.{part}",
    "key": "model.layers.{layer}.self_attn.k_proj.{part}",
    "value": "model.layers.{layer}.self_attn.v_proj.{part}",
    "output": "model.layers.{layer}.self_attn.o_proj.{part}",
    "query_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "key_norm": "model.layers.{layer}.self_attn.k_norm.weight",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "gate": "model.layers.{layer}.mlp.gate_proj.{part}",
    "up": "model.layers.{layer}.mlp.up_proj.{part}",
    "down": "model.layers.{layer}.mlp.down_proj.{part}",
}
_GGUF_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "attention_norm": "blk.{layer}.attn_norm.weight",
    "query": "blk.{layer}.attn_q.{part}",
    "key": "blk.{layer}.attn_k.{part}",
    "value": "blk.{layer}.attn_v.{part}",
    "output": "blk.{layer}.attn_output.{part}",
    "query_norm": "blk.{layer}.attn_q_norm.weight",
    "key_norm": "blk.{layer}.attn_k_norm.weight",
    "mlp_norm": "blk.{layer}.ffn_norm.weight",
    "gate": "blk.{layer}.ffn_gate.{part}",
    "up": "blk.{layer}.ffn_up.{part}",
    "down": "blk.{layer}.ffn_down.{part}",
}
_ROPE_DIVISORS = "rope_freqs.weight"


class TensorFile(Protocol):
    """Tensors by the names of their file."""

    def matrix(self, name: str) -> QuantizedTensor | torch.Tensor:
        """A matrix `[out_features, in_features]` as it is stored."""
        ...

    def vector(self, name: str) -> torch.Tensor:
        """A vector, dense."""
        ...


@dataclass(frozen=True, slots=True)
class Model:
    """A model in memory. `fingerprint` tells whether stored KV belongs to these weights."""

    config: ModelConfig
    weights: DecoderWeights
    generation_defaults: GenerationDefaults
    fingerprint: str


def load_model(
    files: ModelFiles,
    ops: Ops,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantize: LoadQuantization = UNQUANTIZED,
    first_rows: torch.Tensor | None = None,
) -> Model:
    """Read configuration and weights; matrices are prepared by `ops`, vectors have `dtype`.

    `quantize` is for safetensors; the matrices of a GGUF file keep the formats of the file. One
    whose rows are no multiple of 32 numbers stays unquantised. `first_rows` int64 `[n]`: tokens
    whose rows of the head a draft will ask for (see `Ops.prepare`); the head means what it did.

    Raises:
        ModelFileError: A file or tensor is missing, truncated, or has another shape.
        UnsupportedModel: The architecture or a tensor type is not served.
    """
    tensors: GgufFile | SafetensorsFolder
    if files.is_gguf:
        tensors = GgufFile(files.path)
        config = config_from_gguf(tensors.metadata, tensors.shapes)
    else:
        config = config_from_hf(read_json(files.path / "config.json"))
        tensors = SafetensorsFolder(files.path)
    defaults = generation_defaults(files)
    config = replace(config, eos_token_ids=config.eos_token_ids | defaults.eos_token_ids)
    weights = load_weights(
        *(tensors, config, ops),
        device=device,
        dtype=dtype,
        quantize=quantize,
        first_rows=first_rows,
    )
    facts = (repr(config), repr(UNQUANTIZED if files.is_gguf else quantize))
    return Model(config, weights, defaults, fingerprint(files.weight_files(), *facts))


def read_config(files: ModelFiles) -> ModelConfig:
    """The configuration alone, without touching weights. Errors as in `load_model`."""
    if files.is_gguf:
        file = GgufFile(files.path)
        return config_from_gguf(file.metadata, file.shapes)
    return config_from_hf(read_json(files.path / "config.json"))


def load_weights(
    tensors: TensorFile,
    config: ModelConfig,
    ops: Ops,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantize: LoadQuantization = UNQUANTIZED,
    first_rows: torch.Tensor | None = None,
) -> DecoderWeights:
    """All tensors of a decoder; dense matrices get the formats of `quantize` while loading.

    `first_rows` int64 `[n]` are those of the head matrix, be it the embedding or its own.
    """
    reader = _Reader(tensors, config, ops, device, dtype, quantize, first_rows)
    embedding = reader.weight("embedding")
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_load_layer(reader, index) for index in range(config.num_layers)),
        final_norm=reader.vector("final_norm"),
        head=embedding if config.tie_word_embeddings else reader.weight("head"),
        rope_divisors=reader.rope_divisors(),
    )


def _load_layer(reader: _Reader, index: int) -> LayerWeights:
    config = reader.config
    return LayerWeights(
        attention_norm=reader.vector("attention_norm", index),
        query=reader.projection("query", index, biased=config.attention_bias),
        key=reader.projection("key", index, biased=config.attention_bias),
        value=reader.projection("value", index, biased=config.attention_bias),
        output=reader.projection("output", index, biased=config.attention_out_bias),
        mlp_norm=reader.vector("mlp_norm", index),
        gate=reader.projection("gate", index, biased=config.mlp_bias),
        up=reader.projection("up", index, biased=config.mlp_bias),
        down=reader.projection("down", index, biased=config.mlp_bias),
        query_norm=reader.vector("query_norm", index) if config.qk_norm else None,
        key_norm=reader.vector("key_norm", index) if config.qk_norm else None,
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads tensors by their role, checked against the configuration."""

    tensors: TensorFile
    config: ModelConfig
    ops: Ops
    device: torch.device
    dtype: torch.dtype
    quantize: LoadQuantization
    first_rows: torch.Tensor | None

    def weight(self, role: str, layer: int | None = None) -> Weight:
        name = self._name(role, layer, "weight")
        matrix = self.tensors.matrix(name)
        self._check(name, tuple(matrix.shape), _matrix_shape(role, self.config))
        num_heads = self._interleaved_heads(role)
        quant_format = self.quantize.ends if layer is None else self.quantize.layers
        if isinstance(matrix, QuantizedTensor):
            if num_heads:
                matrix = replace(matrix, data=unpermute_rows(matrix.data, num_heads))
        elif quant_format is not None:
            matrix = quantize_matrix(matrix, quant_format)
        # rounding of what a matrix multiplies shows most in attention and in logits
        is_head = role == ("embedding" if self.config.tie_word_embeddings else "head")
        return self.ops.prepare(
            matrix,
            sensitive=is_head or role in ("query", "key", "value"),
            first_rows=self.first_rows if is_head else None,
        )

    def projection(self, role: str, layer: int, *, biased: bool) -> Projection:
        weight = self.weight(role, layer)
        if not biased:
            return Projection(weight)
        name = self._name(role, layer, "bias")
        bias = self.tensors.vector(name)
        self._check(name, tuple(bias.shape), (weight.shape[0],))
        num_heads = self._interleaved_heads(role)
        if num_heads:
            bias = unpermute_rows(bias, num_heads)
        return Projection(weight, bias.to(self.device, self.dtype))

    def vector(self, role: str, layer: int | None = None) -> torch.Tensor:
        name = self._name(role, layer, "weight")
        vector = self.tensors.vector(name)
        config = self.config
        size = config.head_dim if role in ("query_norm", "key_norm") else config.hidden_size
        self._check(name, tuple(vector.shape), (size,))
        return vector.to(self.device, self.dtype)

    def rope_divisors(self) -> torch.Tensor | None:
        if isinstance(self.tensors, GgufFile) and _ROPE_DIVISORS in self.tensors.shapes:
            divisors = self.tensors.vector(_ROPE_DIVISORS)
            self._check(_ROPE_DIVISORS, tuple(divisors.shape), (self.config.head_dim // 2,))
            return divisors
        return None

    def _name(self, role: str, layer: int | None, part: str) -> str:
        names = _GGUF_NAMES if isinstance(self.tensors, GgufFile) else _HF_NAMES
        return names[role].format(layer=layer, part=part)

    def _interleaved_heads(self, role: str) -> int:
        """Heads of a matrix whose rows must be put in order; 0 where they are in order."""
        if not isinstance(self.tensors, GgufFile) or self.config.architecture not in _PERMUTED_GGUF:
            return 0
        return {"query": self.config.num_heads, "key": self.config.num_kv_heads}.get(role, 0)

    def _check(self, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            raise ModelFileError(f"tensor '{name}' is {list(found)}, expected {list(expected)}")


def _matrix_shape(role: str, config: ModelConfig) -> tuple[int, int]:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    return {
        "embedding": (config.vocab_size, hidden),
        "head": (config.vocab_size, hidden),
        "query": (q_width, hidden),
        "key": (kv_width, hidden),
        "value": (kv_width, hidden),
        "output": (hidden, q_width),
        "gate": (intermediate, hidden),
        "up": (intermediate, hidden),
        "down": (hidden, intermediate),
    }[role]
