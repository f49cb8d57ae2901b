"""GGUF files with K-quant matrices, which the gguf library writes and reads but does not make."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

from tests.chatrt.models_support import gguf_name, interleaved, write_gguf

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from chatrt.models.config import ModelConfig

# Where a block's float16 numbers lie, and what each must be, over the deviation of the values, so
# that random bytes elsewhere give values around zero.
_HALVES = {
    "Q4_K": ((0, 1 / 200), (2, 7.5 / 200)),
    "Q5_K": ((0, 1 / 400), (2, 15.5 / 400)),
    "Q6_K": ((208, 1 / 1400),),
}


@dataclass(frozen=True, slots=True)
class KQuantMatrix:
    """Random K-quant bytes `[rows, row_bytes]` and their values by the gguf library."""

    quantization: str
    data: torch.Tensor
    values: torch.Tensor


def random_k_quant(quantization: str, rows: int, columns: int, seed: int = 0) -> KQuantMatrix:
    """A matrix whose values deviate by about 1 / sqrt(columns)."""
    kind = gguf.GGMLQuantizationType[quantization]
    block_size, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    shape = (rows, columns // block_size, bytes_per_block)
    blocks = generator.integers(0, 256, shape, dtype=np.uint8)
    for start, factor in _HALVES[quantization]:
        half = np.array([factor / math.sqrt(columns)], dtype=np.float16)
        blocks[..., start : start + 2] = half.view(np.uint8)
    data = blocks.reshape(rows, -1)
    values = gguf.quants.dequantize(data, kind).copy()
    return KQuantMatrix(quantization, torch.from_numpy(data), torch.from_numpy(values))


def write_k_quant_gguf(
    path: Path,
    config: ModelConfig,
    state: dict[str, torch.Tensor],
    packed: Mapping[str, KQuantMatrix],
) -> None:
    """The model as `write_gguf` writes it in float32, but with the matrices of `packed` instead."""
    dense = path.with_suffix(".f32")
    write_gguf(dense, config, state)
    reader = gguf.GGUFReader(dense)
    writer = gguf.GGUFWriter(path, config.architecture)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            _copy_field(writer, field)
    permuted = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    instead = {gguf_name(name): (name, matrix) for name, matrix in packed.items()}
    for tensor in reader.tensors:
        if tensor.name not in instead:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        name, matrix = instead[tensor.name]
        num_heads = permuted.get(name.split(".")[-2]) if config.architecture == "llama" else None
        rows = interleaved(matrix.data, num_heads) if num_heads else matrix.data
        kind = gguf.GGMLQuantizationType[matrix.quantization]
        writer.add_tensor(tensor.name, rows.numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_field(writer: Any, field: Any) -> None:
    kind = field.types[0]
    inner = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
