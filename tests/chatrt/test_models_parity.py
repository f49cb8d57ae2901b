"""Logits of every family against transformers, on random tiny models saved as safetensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from chatrt.models.files import ModelFiles
from chatrt.models.loader import load_model
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt.models_support import CPU, Bench

if TYPE_CHECKING:
    from pathlib import Path

VOCAB = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
# family, what differs from SIZES
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": ("Llama", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-windowed": ("Mistral", {"sliding_window": 64}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
}
TOKENS = [(i * i * 31 + 7 * i + 5) % VOCAB for i in range(60)]


def make_reference(family: str) -> Any:
    """A transformers model whose every parameter is random, norms and biases included."""
    class_name, changes = FAMILIES[family]
    config = getattr(transformers, f"{class_name}Config")(**{**SIZES, **changes})
    torch.manual_seed(1)
    model = getattr(transformers, f"{class_name}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        is_norm = parameter.dim() == 1 and not name.endswith("bias")
        parameter.data = 1 + noise / 10 if is_norm else noise / 6
    model.tie_weights()
    return model


def reference_logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def load(folder: Path, ops: ReferenceOps) -> Bench:
    files = ModelFiles(name="tiny", path=folder, tokenizer_dir=folder)
    return Bench(load_model(files, ops, device=CPU, dtype=ops.dtype), ops)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_with_transformers_in_float32(family: str, tmp_path: Path) -> None:
    model = make_reference(family)
    model.save_pretrained(tmp_path)
    expected = reference_logits(model)
    bench = load(tmp_path, ReferenceOps())
    assert expected.std() > 0.5
    for chunk in (256, 7, 1):
        torch.testing.assert_close(
            bench.logits(TOKENS, chunk=chunk), expected, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("family", ["llama3", "qwen3", "smollm3"])
def test_float64_agrees_up_to_what_transformers_computes_in_float32(
    family: str, tmp_path: Path
) -> None:
    # its norms and rotation angles stay in float32 whatever the model's dtype is
    model = make_reference(family).double()
    model.save_pretrained(tmp_path)
    bench = load(tmp_path, ReferenceOps(torch.float64))
    torch.testing.assert_close(bench.logits(TOKENS), reference_logits(model), rtol=2e-5, atol=2e-5)


def test_shards_give_the_same_logits_as_one_file(tmp_path: Path) -> None:
    model = make_reference("llama2")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    one, shards = (load(tmp_path / name, ReferenceOps()) for name in ("one", "shards"))
    assert torch.equal(shards.logits(TOKENS), one.logits(TOKENS))


def test_hidden_states_of_named_layers_are_those_of_transformers(tmp_path: Path) -> None:
    model = make_reference("llama2")
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        states = model.model(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    ops = ReferenceOps()
    files = ModelFiles(name="tiny", path=tmp_path, tokenizer_dir=tmp_path)
    loaded = load_model(files, ops, device=CPU, dtype=torch.float32)
    bench = Bench(loaded, ops, feature_layers=(0, 1))
    batch = bench.builder.build([bench.rows(TOKENS, 0)])
    features = bench.decoder.forward(batch, bench.kv).features
    # transformers counts the embedding as hidden state 0
    expected = torch.stack((states[1][0], states[2][0]), dim=1)
    assert features is not None
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)


def dequantised_by_transformers(path: Path) -> Any:
    """Its Llama model with the tensors that its own GGUF reader makes (without accelerate)."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    left_out = model.load_state_dict(read["tensors"], strict=False)
    assert set(left_out.missing_keys) <= {"lm_head.weight"}
    assert not left_out.unexpected_keys
    model.tie_weights()
    return model


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_agrees_with_transformers_on_dequantised_weights(
    default_gguf: Path,
) -> None:
    tokens = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018]
    with torch.inference_mode():
        expected = dequantised_by_transformers(default_gguf)(torch.tensor([tokens])).logits[0]
    files = ModelFiles(name="default", path=default_gguf, tokenizer_dir=default_gguf.parent)
    ops = ReferenceOps()
    bench = Bench(load_model(files, ops, device=CPU, dtype=torch.float32), ops)
    found = bench.logits(tokens)
    difference = (found - expected).abs().max().item()
    assert difference < 5e-4, f"largest difference {difference:.2e}"  # 6.5e-5 when written
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
