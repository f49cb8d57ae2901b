from __future__ import annotations

import logging
from typing import Any

import pytest

from chatrt.errors import ModelFileError, UnsupportedModel
from chatrt.models.config import LinearScaling, Llama3Scaling
from chatrt.models.config_hf import config_from_hf

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "eos_token_id": [2, 3],
    "bos_token_id": 1,
}
LLAMA3: dict[str, Any] = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def test_both_spellings_of_rope_give_the_same_configuration() -> None:
    old = config_from_hf(
        {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    )
    new = config_from_hf(
        {**LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}}
    )
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 1024)


def test_the_oldest_spelling_of_linear_scaling_is_read() -> None:
    config = config_from_hf({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert config.rope_scaling == LinearScaling(2.0)


def test_what_a_config_leaves_out_is_filled_in_by_its_family() -> None:
    bare = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps")}
    llama = config_from_hf(bare)
    assert (llama.num_kv_heads, llama.head_dim, llama.rope_theta) == (4, 16, 10_000.0)
    assert not llama.tie_word_embeddings
    smollm3 = config_from_hf({**LLAMA, "model_type": "smollm3"})
    assert smollm3.rope_theta == 2_000_000.0
    assert smollm3.tie_word_embeddings
    assert smollm3.no_rope_layers == {3}
    assert config_from_hf({**LLAMA, "model_type": "qwen3"}).head_dim == 128


def test_a_one_in_no_rope_layers_marks_a_layer_that_rotates() -> None:
    values = {**LLAMA, "model_type": "smollm3", "no_rope_layers": [1, 0, 1, 0]}
    assert config_from_hf(values).no_rope_layers == {1, 3}


def test_qwen2_has_biases_on_query_key_and_value_only() -> None:
    config = config_from_hf({**LLAMA, "model_type": "qwen2"})
    assert config.attention_bias
    assert not config.attention_out_bias
    assert not config.qk_norm


def test_mistral_context_is_clipped_to_its_sliding_window(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        config = config_from_hf({**LLAMA, "model_type": "mistral", "sliding_window": 1024})
    assert config.max_context == 1024
    assert "4096" in caplog.text
    assert "1024" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 4096},
        {"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": False},
    ],
)
def test_a_window_that_is_off_or_wide_enough_clips_nothing(changes: dict[str, Any]) -> None:
    assert config_from_hf({**LLAMA, **changes}).max_context == 4096


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gemma3"}, "'gemma3' is not served; supported are llama, mistral"),
        ({"hidden_act": "gelu"}, "'gelu'.*silu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'.*linear, llama3"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "0.5.*1.0"),
        ({"num_hidden_layers": 0}, "num_layers is 0, it must be at least 1"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        config_from_hf({**LLAMA, **changes})


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ModelFileError, match="'vocab_size'"):
        config_from_hf({k: v for k, v in LLAMA.items() if k != "vocab_size"})


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "large"},
        {"num_attention_heads": 0},
        {"rope_scaling": {"rope_type": "linear"}},
        {"eos_token_id": {}},
    ],
)
def test_a_value_that_cannot_be_read_is_an_error_of_the_file(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json is damaged"):
        config_from_hf({**LLAMA, **changes})
