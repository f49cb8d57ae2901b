from __future__ import annotations

from dataclasses import replace

import pytest

from chatrt.errors import UnsupportedModel
from chatrt.models.config import (
    clip_to_window,
    every_nth_layer,
    first_id,
    generation_defaults_from_hf,
    id_set,
)
from chatrt.testing.models import tiny_config


def test_counts_that_cannot_be_served_are_refused_with_the_numbers() -> None:
    config = tiny_config()
    with pytest.raises(UnsupportedModel, match="4 query heads cannot share 3"):
        replace(config, num_kv_heads=3)
    with pytest.raises(UnsupportedModel, match="num_layers is 0"):
        replace(config, num_layers=0)
    with pytest.raises(UnsupportedModel, match="dimension is 15, it must be even"):
        replace(config, head_dim=15)


def test_a_context_is_clipped_only_to_a_narrower_window() -> None:
    assert clip_to_window(100, 64) == (64, 64)
    assert clip_to_window(100, 100) == (100, 100)
    assert clip_to_window(100, None) == (100, None)


def test_every_nth_layer_counts_from_one() -> None:
    assert every_nth_layer(9, 4) == {3, 7}


def test_ids_may_be_a_number_a_list_or_nothing() -> None:
    assert id_set(3) == {3}
    assert id_set([3, 4]) == {3, 4}
    assert id_set(None) == frozenset()
    assert (first_id(3), first_id([4, 3]), first_id([]), first_id(None)) == (3, 4, None, None)


def test_sampling_values_count_only_where_the_model_samples_by_default() -> None:
    values = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 5}
    silent = generation_defaults_from_hf(values)
    assert silent.temperature is None
    assert silent.eos_token_ids == {5}
    loud = generation_defaults_from_hf({**values, "do_sample": True, "top_k": 20})
    assert (loud.temperature, loud.top_p, loud.top_k) == (0.6, 0.9, 20)
