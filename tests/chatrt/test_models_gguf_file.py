from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch

from chatrt.errors import ModelError, ModelFileError, UnsupportedModel
from chatrt.models.gguf_file import GgufFile, unpermute_rows
from chatrt.testing.models import tiny_config
from chatrt_kernels.formats import QuantFormat, dequantize
from tests.chatrt.k_quants_support import random_k_quant, write_k_quant_gguf
from tests.chatrt.models_support import interleaved, random_state, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = tiny_config(vocab_size=50, num_layers=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, CONFIG, random_state(CONFIG), "Q4_1")
    return path


def test_scalars_and_short_arrays_are_read_and_vocabularies_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a", 200)
    writer.add_int64("b", -(2**40))
    writer.add_float64("c", 0.1)
    writer.add_bool("d", True)
    writer.add_string("e", "größer")
    writer.add_array("f", [1, 2, 3])
    writer.add_array("strings", ["x", "yy"])
    writer.add_array("long", list(range(5000)))
    writer.add_uint32("last", 7)
    writer.add_tensor("v", np.arange(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GgufFile(path).metadata
    expected = {"a": 200, "b": -(2**40), "c": 0.1, "d": True, "e": "größer", "f": [1, 2, 3]}
    assert {key: metadata[key] for key in expected} == expected
    assert metadata["strings"] is None
    assert metadata["long"] is None
    assert metadata["last"] == 7


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_matrix_has_the_bytes_that_the_gguf_library_reads(
    quantization: str, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, CONFIG, random_state(CONFIG), quantization)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_down.weight")
    matrix = GgufFile(path).matrix("blk.0.ffn_down.weight")
    assert matrix.format is QuantFormat(quantization)
    assert matrix.shape == (64, 128)
    values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
    assert torch.equal(dequantize(matrix), values.view(64, 128))


@pytest.mark.parametrize("quantization", ["Q4_K", "Q5_K", "Q6_K"])
def test_a_k_quant_matrix_has_the_bytes_that_were_written(
    quantization: str, tmp_path: Path
) -> None:
    path = tmp_path / "k.gguf"
    written = random_k_quant(quantization, 3, 512)
    name = "model.layers.0.mlp.down_proj.weight"
    write_k_quant_gguf(path, CONFIG, random_state(CONFIG), {name: written})
    matrix = GgufFile(path).matrix("blk.0.ffn_down.weight")
    assert (matrix.format, matrix.shape) == (QuantFormat(quantization), (3, 512))
    assert torch.equal(matrix.data, written.data)
    assert torch.equal(dequantize(matrix), written.values)


def test_a_vector_is_float32(path: Path) -> None:
    expected = random_state(CONFIG)["model.norm.weight"]
    assert torch.equal(GgufFile(path).vector("output_norm.weight"), expected)


def test_unpermuting_restores_the_rows_that_the_converter_interleaved() -> None:
    rows = torch.arange(48).view(24, 2)
    assert torch.equal(unpermute_rows(interleaved(rows, 3), 3), rows)
    assert not torch.equal(interleaved(rows, 3), rows)
    bias = torch.arange(24)
    assert torch.equal(unpermute_rows(interleaved(bias, 3), 3), bias)


def test_a_truncated_file_says_both_sizes(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(ModelFileError, match=rf"has {len(whole) - 1000} bytes.*need \d+"):
        GgufFile(path)


@pytest.mark.parametrize("kept", [5, 30, 100, 400])
def test_a_file_that_ends_inside_its_header_is_truncated(path: Path, kept: int) -> None:
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelFileError, match=f"truncated: it ends after {kept} bytes"):
        GgufFile(path)


def test_an_unserved_tensor_type_names_the_tensor_and_what_is_served(tmp_path: Path) -> None:
    path = tmp_path / "k.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType.Q3_K
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((2, 110), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel) as caught:
        GgufFile(path)
    said, served = caught.value.message.split("; supported are ")
    assert said == f"{path}: tensor 'blk.0.attn_q.weight' has type Q3_K"
    assert set(served.split(", ")) == {one.value for one in QuantFormat}


def test_what_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        GgufFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(UnsupportedModel, match="version 1; supported are 2 and 3"):
        GgufFile(path)
    path.write_bytes(b"")
    with pytest.raises(ModelFileError, match="cannot be read"):
        GgufFile(path)
    with pytest.raises(ModelFileError, match="cannot be read"):
        GgufFile(tmp_path / "none.gguf")


def test_a_missing_tensor_is_named(path: Path) -> None:
    with pytest.raises(ModelFileError, match="no tensor 'absent'"):
        GgufFile(path).matrix("absent")


def test_a_tensor_of_the_wrong_rank_is_named_with_both_numbers(path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"'output_norm\.weight' has 1 dimensions, expected 2"):
        GgufFile(path).matrix("output_norm.weight")


@pytest.mark.parametrize("seed", range(150))
def test_a_damaged_header_opens_or_is_refused_with_a_model_error(path: Path, seed: int) -> None:
    generator = random.Random(seed)
    content = bytearray(path.read_bytes())
    for _ in range(generator.choice((1, 3))):
        content[generator.randrange(4, 1200)] = generator.randrange(256)
    path.write_bytes(content)
    try:
        file = GgufFile(path)
    except ModelError:
        return
    assert file.shapes
