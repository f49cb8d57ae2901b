from __future__ import annotations

from typing import Any

import pytest

from chatrt.errors import ModelFileError, UnsupportedModel
from chatrt.models.config import LinearScaling, ModelConfig
from chatrt.models.config_gguf import config_from_gguf

GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 4096,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100_000.0,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 3,
}
SHAPES = {"token_embd.weight": (100, 64)}


def test_metadata_and_shapes_give_the_configuration() -> None:
    expected = ModelConfig(
        architecture="llama",
        hidden_size=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=100,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        max_context=4096,
        eos_token_ids=frozenset({2, 3}),
    )
    assert config_from_gguf(GGUF, {**SHAPES, "output.weight": (100, 64)}) == expected


def test_linear_scaling_is_read() -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config_from_gguf({**GGUF, **scaling}, SHAPES).rope_scaling == LinearScaling(4.0)


def test_gguf_tensors_tell_biases_norms_and_a_tied_head() -> None:
    names = ("blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "blk.0.attn_output.bias")
    config = config_from_gguf(GGUF, {**SHAPES, **dict.fromkeys(names, (1,))})
    assert config.attention_bias
    assert config.attention_out_bias
    assert config.qk_norm
    assert config.tie_word_embeddings


def test_every_fourth_layer_of_a_smollm3_gguf_does_not_rotate() -> None:
    renamed = {key.replace("llama.", "smollm3."): value for key, value in GGUF.items()}
    renamed["general.architecture"] = "smollm3"
    assert config_from_gguf(renamed, SHAPES).no_rope_layers == {3}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general.architecture": "phi3"}, "'phi3' is not served"),
        ({"llama.expert_count": 8}, "mixture of 8 experts"),
        ({"llama.rope.dimension_count": 8}, "is 8 where a head has 16"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.attention.head_count_kv": [2, 2, 4, 4]}, "differs between layers"),
    ],
)
def test_a_gguf_that_is_not_served_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        config_from_gguf({**GGUF, **changes}, SHAPES)


def test_a_missing_gguf_key_is_named() -> None:
    values = {k: v for k, v in GGUF.items() if k != "llama.block_count"}
    with pytest.raises(ModelFileError, match=r"llama\.block_count"):
        config_from_gguf(values, SHAPES)
    with pytest.raises(ModelFileError, match=r"token_embd\.weight"):
        config_from_gguf(GGUF, {})


def test_a_gguf_value_that_cannot_be_read_is_an_error_of_the_file() -> None:
    with pytest.raises(ModelFileError, match="metadata is damaged"):
        config_from_gguf({**GGUF, "llama.attention.layer_norm_rms_epsilon": "tiny"}, SHAPES)
