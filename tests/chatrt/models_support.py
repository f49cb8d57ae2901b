"""Shared by the model tests: random models on disk, and a decoder with its cache around it."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import gguf
import torch
from safetensors.torch import save_file

from chatrt.batch import BatchBuilder, BatchRows
from chatrt.kvcache import KVCache
from chatrt.models.decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from chatrt.models.config import ModelConfig
    from chatrt.models.loader import Model
    from chatrt_kernels.ops import Ops

CPU = torch.device("cpu")
PAGE_SIZE = 16


class Bench:
    """One decoder with its own cache and batch builder; sequence s owns pages from s * 8 on."""

    PAGES = 8

    def __init__(
        self,
        model: Model,
        ops: Ops,
        *,
        num_sequences: int = 1,
        feature_layers: tuple[int, ...] = (),
    ) -> None:
        config, dtype = model.config, model.weights.final_norm.dtype
        self.decoder = Decoder(
            config,
            model.weights,
            ops,
            max_rows=256,
            max_positions=self.PAGES * PAGE_SIZE,
            device=CPU,
            dtype=dtype,
            feature_layers=feature_layers,
        )
        self.builder = BatchBuilder(256, num_sequences, self.PAGES, PAGE_SIZE, CPU)
        self.kv = KVCache.allocate(
            num_layers=config.num_layers,
            num_pages=num_sequences * self.PAGES,
            page_size=PAGE_SIZE,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=CPU,
        )
        self.kv.data.fill_(math.nan)

    def rows(self, ids: Sequence[int], start: int, sequence: int = 0) -> BatchRows:
        first_page = sequence * self.PAGES
        pages = range(first_page, first_page + self.PAGES)
        return BatchRows(ids, start, pages, range(len(ids)))

    def logits(self, token_ids: Sequence[int], *, chunk: int = 256) -> torch.Tensor:
        """Logits of every position `[tokens, vocab]`, computed in chunks from position 0."""
        parts = []
        for start in range(0, len(token_ids), chunk):
            batch = self.builder.build([self.rows(token_ids[start : start + chunk], start)])
            parts.append(self.decoder.forward(batch, self.kv).values.clone())
        return torch.cat(parts)


def random_state(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors under their Hugging Face names, biases and q/k norms where the config says."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    state: dict[str, torch.Tensor] = {}

    def matrix(name: str, rows: int, columns: int, *, bias: bool = False) -> None:
        values = torch.randn(rows, columns, generator=generator)
        state[f"{name}.weight"] = values / math.sqrt(columns)
        if bias:
            state[f"{name}.bias"] = torch.randn(rows, generator=generator) / 4

    def norm(name: str, size: int) -> None:
        state[f"{name}.weight"] = 1 + torch.randn(size, generator=generator) / 10

    matrix("model.embed_tokens", config.vocab_size, hidden)
    norm("model.norm", hidden)
    if not config.tie_word_embeddings:
        matrix("lm_head", config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        matrix(f"{layer}.self_attn.q_proj", q_width, hidden, bias=config.attention_bias)
        matrix(f"{layer}.self_attn.k_proj", kv_width, hidden, bias=config.attention_bias)
        matrix(f"{layer}.self_attn.v_proj", kv_width, hidden, bias=config.attention_bias)
        matrix(f"{layer}.self_attn.o_proj", hidden, q_width, bias=config.attention_out_bias)
        matrix(f"{layer}.mlp.gate_proj", width, hidden, bias=config.mlp_bias)
        matrix(f"{layer}.mlp.up_proj", width, hidden, bias=config.mlp_bias)
        matrix(f"{layer}.mlp.down_proj", hidden, width, bias=config.mlp_bias)
        if config.qk_norm:
            norm(f"{layer}.self_attn.q_norm", config.head_dim)
            norm(f"{layer}.self_attn.k_norm", config.head_dim)
    return state


def hf_values(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a configuration without rope scaling."""
    return {
        "model_type": config.architecture,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


def write_safetensors(folder: Path, config: ModelConfig, state: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_values(config)))
    save_file(state, folder / "model.safetensors")


_GGUF_PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    ".input_layernorm": ".attn_norm",
    ".post_attention_layernorm": ".ffn_norm",
    ".self_attn.q_proj": ".attn_q",
    ".self_attn.k_proj": ".attn_k",
    ".self_attn.v_proj": ".attn_v",
    ".self_attn.o_proj": ".attn_output",
    ".self_attn.q_norm": ".attn_q_norm",
    ".self_attn.k_norm": ".attn_k_norm",
    ".mlp.gate_proj": ".ffn_gate",
    ".mlp.up_proj": ".ffn_up",
    ".mlp.down_proj": ".ffn_down",
}


def gguf_name(name: str) -> str:
    for part, replacement in _GGUF_PARTS.items():
        name = name.replace(part, replacement)
    return name


def interleaved(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The order in which llama.cpp's converter stores the rows of query and key."""
    halves = rows.view(num_heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    config: ModelConfig,
    state: dict[str, torch.Tensor],
    quantization: str = "F32",
    *,
    extra: dict[str, torch.Tensor] | None = None,
) -> None:
    """A GGUF file of the model, its matrices in the given format, without a tokenizer."""
    arch = config.architecture
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list([f"token {i}" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_eos_token_id(7)
    permuted = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    for name, tensor in state.items():
        num_heads = permuted.get(name.split(".")[-2]) if arch in ("llama", "smollm3") else None
        rows = interleaved(tensor, num_heads) if num_heads else tensor
        _add_tensor(writer, gguf_name(name), rows, quantization)
    for name, tensor in (extra or {}).items():
        _add_tensor(writer, name, tensor, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: Any, name: str, tensor: torch.Tensor, quantization: str) -> None:
    kind = gguf.GGMLQuantizationType[quantization if tensor.dim() == 2 else "F32"]
    writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)


def rounded_through(quantization: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is left of the matrices after quantising them."""
    kind = gguf.GGMLQuantizationType[quantization]

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        packed = gguf.quants.quantize(tensor.numpy(), kind)
        return torch.from_numpy(gguf.quants.dequantize(packed, kind).copy())

    return {name: rounded(t) if t.dim() == 2 else t for name, t in state.items()}
