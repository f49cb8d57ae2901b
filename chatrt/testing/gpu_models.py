"""Models of well-known shapes with random weights, made on a device: nothing is downloaded.

Knows: configurations, transformers as the maker of the weights and as the peer.
Does not know: what is measured.
Invariant: our weights and the peer's are the same memory, so both compute the same model.
Cost: the weights in bfloat16, once (16 GB for the 8B shape).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from chatrt.batch import BatchBuilder
from chatrt.engine import Target
from chatrt.kvcache import KVCache
from chatrt.models.config_hf import config_from_hf
from chatrt.models.decoder import Decoder
from chatrt.models.loader import load_weights
from chatrt.models.quantize import load_quantization
from chatrt.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from chatrt.models.config import ModelConfig
    from chatrt.models.weights import DecoderWeights
    from chatrt.sampling import MakeSampler
    from chatrt.text.tokenizer import Tokenizer
    from chatrt_kernels.ops import Ops

PAGE_SIZE = 16
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {**_LLAMA_ROPE, "factor": 32.0},
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "rope_parameters": {**_LLAMA_ROPE, "factor": 8.0},
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model of a shape: transformers' own, and its tensors by their names in files."""

    config: ModelConfig
    peer: Any
    tensors: Mapping[str, Tensor]

    @classmethod
    def make(
        cls, shape: Mapping[str, Any], device: torch.device, dtype: torch.dtype, seed: int = 0
    ) -> RandomModel:
        """Draw the weights on the device, as transformers initialises them."""
        import transformers

        values = dict(shape)
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        torch.manual_seed(seed)
        with torch.device(device):
            peer = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        return cls(config_from_hf(shape), peer.eval(), dict(peer.state_dict()))

    def weights(self, ops: Ops, *, quantize: str = "none") -> DecoderWeights:
        """Prepared by an executor; dense ones stay where the peer has them."""
        formats = load_quantization(quantize, native_kernels=False)  # type: ignore[arg-type]
        return load_weights(
            self, self.config, ops, device=self.device, dtype=self.dtype, quantize=formats
        )

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(iter(self.tensors.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(iter(self.tensors.values())).dtype

    def matrix(self, name: str) -> Tensor:
        """A matrix `[out_features, in_features]`."""
        return self.tensors[name]

    def vector(self, name: str) -> Tensor:
        """A vector."""
        return self.tensors[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """How a target keeps pages and weights, and how long a sequence may be."""

    kv_dtype: torch.dtype
    max_context: int
    max_rows: int = 512
    quantize: str = "none"


def target_of(
    model: RandomModel,
    ops: Ops,
    tokenizer: Tokenizer,
    options: TargetOptions,
    *,
    make_sampler: MakeSampler = Sampler,
    sampling_device: torch.device | None = None,
) -> Target:
    """A target with pages for one sequence of `max_context` tokens and a few more.

    Samplers work in main memory if there is no `sampling_device`.
    """
    config, device = model.config, model.device
    max_rows, max_context = options.max_rows, options.max_context
    decoder = Decoder(
        config,
        model.weights(ops, quantize=options.quantize),
        ops,
        max_rows=max_rows,
        max_positions=max_context,
        device=device,
        dtype=model.dtype,
    )
    num_pages = -(-max_context // PAGE_SIZE)
    kv = KVCache.allocate(
        num_layers=config.num_layers,
        num_pages=num_pages + 64,
        page_size=PAGE_SIZE,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=options.kv_dtype,
        device=device,
        layout=ops.kv_layout,
    )
    kv.data.zero_()
    if kv.scales is not None:
        kv.scales.zero_()
    batches = BatchBuilder(max_rows, 32, num_pages, PAGE_SIZE, device)
    where = sampling_device or torch.device("cpu")
    return Target(decoder, kv, batches, tokenizer, make_sampler, where)
