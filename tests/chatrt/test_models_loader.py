from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt.errors import ModelFileError
from chatrt.models.config import GenerationDefaults, ModelConfig
from chatrt.models.files import ModelFiles, generation_defaults
from chatrt.models.loader import load_model, read_config
from chatrt.models.quantize import UNQUANTIZED, LoadQuantization
from chatrt.testing.models import tiny_config
from chatrt_kernels.formats import QuantFormat
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt.k_quants_support import random_k_quant, write_k_quant_gguf
from tests.chatrt.models_support import (
    CPU,
    Bench,
    random_state,
    rounded_through,
    write_gguf,
    write_safetensors,
)

if TYPE_CHECKING:
    from pathlib import Path

    from chatrt.models.loader import Model
    from chatrt_kernels.formats import QuantizedTensor
    from chatrt_kernels.reference import DenseWeight

TOKENS = [(5 * i * i + 3) % 50 for i in range(40)]
LLAMA = replace(tiny_config(vocab_size=50), tie_word_embeddings=False)
QWEN2 = replace(LLAMA, architecture="qwen2", attention_bias=True)
QWEN3 = replace(LLAMA, architecture="qwen3", qk_norm=True, head_dim=32)
Q8 = LoadQuantization(layers=QuantFormat.Q8_0, ends=QuantFormat.Q8_0)
Q4 = LoadQuantization(layers=QuantFormat.Q4_1, ends=QuantFormat.Q8_0)


class NotingOps(ReferenceOps):
    """Remembers what it was asked of each matrix; the format is None for a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: list[QuantFormat | None] = []
        self.first_rows: list[torch.Tensor | None] = []

    def prepare(
        self,
        weight: QuantizedTensor | torch.Tensor,
        *,
        sensitive: bool = False,
        first_rows: torch.Tensor | None = None,
    ) -> DenseWeight:
        self.formats.append(None if isinstance(weight, torch.Tensor) else weight.format)
        self.first_rows.append(first_rows)
        return super().prepare(weight, sensitive=sensitive, first_rows=first_rows)


def model_files(path: Path) -> ModelFiles:
    return ModelFiles(name="tiny", path=path, tokenizer_dir=path)


def load(
    path: Path, quantize: LoadQuantization = UNQUANTIZED, ops: ReferenceOps | None = None
) -> Model:
    ops = ops or ReferenceOps()
    return load_model(model_files(path), ops, device=CPU, dtype=ops.dtype, quantize=quantize)


def logits(model: Model) -> torch.Tensor:
    return Bench(model, ReferenceOps()).logits(TOKENS)


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3], ids=lambda c: c.architecture)
@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0", "Q4_1"])
def test_a_gguf_computes_what_its_rounded_weights_compute_as_safetensors(
    config: ModelConfig, quantization: str, tmp_path: Path
) -> None:
    state = random_state(config)
    write_gguf(tmp_path / "tiny.gguf", config, state, quantization)
    write_safetensors(tmp_path / "dense", config, rounded_through(quantization, state))
    expected = logits(load(tmp_path / "dense"))
    assert torch.equal(logits(load(tmp_path / "tiny.gguf")), expected)


def test_query_and_key_biases_of_a_llama_gguf_are_put_in_order_too(tmp_path: Path) -> None:
    config = replace(LLAMA, attention_bias=True, attention_out_bias=True, mlp_bias=True)
    state = random_state(config)
    write_gguf(tmp_path / "tiny.gguf", config, state)
    write_safetensors(tmp_path / "dense", config, state)
    assert torch.equal(logits(load(tmp_path / "tiny.gguf")), logits(load(tmp_path / "dense")))


def test_rope_divisors_of_a_gguf_slow_the_rotation(tmp_path: Path) -> None:
    state = random_state(LLAMA)
    divisors = torch.full((LLAMA.head_dim // 2,), 4.0)
    write_gguf(tmp_path / "slow.gguf", LLAMA, state, extra={"rope_freqs.weight": divisors})
    write_safetensors(tmp_path / "linear", LLAMA, state)
    path = tmp_path / "linear" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "rope_scaling": {"type": "linear", "factor": 4.0}}))
    expected = logits(load(tmp_path / "linear"))
    assert torch.equal(logits(load(tmp_path / "slow.gguf")), expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_gguf_that_mixes_k_quants_computes_what_their_values_compute_as_safetensors(
    architecture: str, tmp_path: Path
) -> None:
    # as Q4_K_M files do: some value and down matrices and the ends have more bits than the rest
    config = replace(LLAMA, architecture=architecture, hidden_size=256, intermediate_size=512)
    config = replace(config, head_dim=64, qk_norm=architecture == "qwen3")
    state = random_state(config)
    wide = ("embed_tokens", "lm_head", "layers.0.mlp.down_proj", "layers.1.self_attn.v_proj")
    packed = {}
    for seed, (name, tensor) in enumerate(state.items()):
        if tensor.dim() == 2:
            quantization = "Q6_K" if name.removesuffix(".weight").endswith(wide) else "Q4_K"
            if name.endswith("layers.0.mlp.gate_proj.weight"):
                quantization = "Q5_K"
            rows, columns = tensor.shape
            packed[name] = random_k_quant(quantization, rows, columns, seed)
    dense = {**state, **{name: matrix.values for name, matrix in packed.items()}}
    write_k_quant_gguf(tmp_path / "k.gguf", config, state, packed)
    write_safetensors(tmp_path / "dense", config, dense)
    ops = NotingOps()
    found = logits(load(tmp_path / "k.gguf", ops=ops))
    assert set(ops.formats) == {QuantFormat.Q4_K, QuantFormat.Q5_K, QuantFormat.Q6_K}
    assert found.isfinite().all()
    assert torch.equal(found, logits(load(tmp_path / "dense")))


@pytest.mark.parametrize(("quantize", "layers"), [(Q8, "Q8_0"), (Q4, "Q4_1")])
@pytest.mark.parametrize("tied", [False, True])
def test_quantising_at_load_gives_the_rounded_layers_and_ends(
    quantize: LoadQuantization, layers: str, tied: bool, tmp_path: Path
) -> None:
    config = replace(LLAMA, tie_word_embeddings=tied)
    state = random_state(config)
    write_safetensors(tmp_path / "dense", config, state)
    in_layers = {name: t for name, t in state.items() if name.startswith("model.layers")}
    ends = {name: t for name, t in state.items() if name not in in_layers}
    rounded = rounded_through(layers, in_layers) | rounded_through("Q8_0", ends)
    write_safetensors(tmp_path / "rounded", config, rounded)
    found = logits(load(tmp_path / "dense", quantize))
    assert torch.equal(found, logits(load(tmp_path / "rounded")))


def test_matrices_with_rows_of_no_whole_blocks_stay_unquantised(tmp_path: Path) -> None:
    config = replace(LLAMA, intermediate_size=100, num_layers=1)
    write_safetensors(tmp_path / "m", config, random_state(config))
    ops = NotingOps()
    model = load(tmp_path / "m", Q8, ops)
    # embedding, the layer with `down` last, head
    assert ops.formats == [QuantFormat.Q8_0] * 7 + [None, QuantFormat.Q8_0]
    assert logits(model).isfinite().all()


def test_a_gguf_keeps_its_own_formats_whatever_is_asked_for_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, LLAMA, random_state(LLAMA), "BF16")
    ops = NotingOps()
    assert load(path, Q8, ops).fingerprint == load(path).fingerprint
    assert set(ops.formats) == {QuantFormat.BF16}


def test_a_tied_head_is_the_embedding_itself_and_is_counted_once(tmp_path: Path) -> None:
    tied = replace(LLAMA, tie_word_embeddings=True)
    write_safetensors(tmp_path / "tied", tied, random_state(tied))
    write_safetensors(tmp_path / "untied", LLAMA, random_state(LLAMA))
    one, two = load(tmp_path / "tied").weights, load(tmp_path / "untied").weights
    assert one.head is one.embedding
    assert two.num_bytes - one.num_bytes == 50 * 64 * 4


@pytest.mark.parametrize("tied", [False, True])
def test_first_rows_are_asked_of_the_head_matrix_alone_and_change_no_logit(
    tied: bool, tmp_path: Path
) -> None:
    config = replace(LLAMA, tie_word_embeddings=tied)
    write_safetensors(tmp_path / "m", config, random_state(config))
    ops, first_rows = NotingOps(), torch.tensor([7, 3, 40])
    model = load_model(
        model_files(tmp_path / "m"), ops, device=CPU, dtype=ops.dtype, first_rows=first_rows
    )
    asked = [index for index, rows in enumerate(ops.first_rows) if rows is first_rows]
    # the embedding comes first, an untied head last
    assert asked == [0 if tied else len(ops.first_rows) - 1]
    plain = load(tmp_path / "m")
    assert torch.equal(logits(model), logits(plain))
    assert model.fingerprint == plain.fingerprint
    assert model.weights.num_bytes == plain.weights.num_bytes


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    state = random_state(LLAMA)
    state["model.layers.1.mlp.up_proj.weight"] = torch.zeros(100, 64)
    write_safetensors(tmp_path / "m", LLAMA, state)
    with pytest.raises(
        ModelFileError, match=r"layers\.1\.mlp\.up_proj.*\[100, 64\], expected \[128, 64\]"
    ):
        load(tmp_path / "m")


def test_an_untied_model_without_a_head_names_the_missing_tensor(tmp_path: Path) -> None:
    state = random_state(LLAMA)
    del state["lm_head.weight"]
    write_safetensors(tmp_path / "m", LLAMA, state)
    with pytest.raises(ModelFileError, match=r"lm_head\.weight"):
        load(tmp_path / "m")


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config_json_is_an_error_of_the_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"config\.json is damaged"):
        load(tmp_path)


def test_a_folder_without_config_json_is_an_error_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json cannot be read"):
        read_config(model_files(tmp_path))


def test_end_tokens_of_both_configurations_are_joined(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m", LLAMA, random_state(LLAMA))
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    (tmp_path / "m/generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert load(tmp_path / "m").config.eos_token_ids == {2, 3, 4}
    write_gguf(tmp_path / "tiny.gguf", LLAMA, random_state(LLAMA))
    assert load(tmp_path / "tiny.gguf").config.eos_token_ids == {7}


def test_the_name_lists_sampling_comes_before_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    files = model_files(tmp_path)
    assert generation_defaults(files).temperature == 0.6
    named = replace(files, generation=GenerationDefaults(temperature=0.2))
    assert generation_defaults(named).temperature == 0.2


def test_the_fingerprint_tells_weights_apart_and_is_stable(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_safetensors(tmp_path / name, LLAMA, random_state(LLAMA, seed))
    a, b, c = (load(tmp_path / name).fingerprint for name in "abc")
    assert a == b
    assert a != c
    assert len({load(tmp_path / "a", one).fingerprint for one in (UNQUANTIZED, Q8, Q4)}) == 3


def test_the_configuration_can_be_read_without_weights(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m", LLAMA, random_state(LLAMA))
    (tmp_path / "m/model.safetensors").unlink()
    assert read_config(model_files(tmp_path / "m")) == LLAMA
