from __future__ import annotations

import torch

from chatrt.testing.models import tiny_config, tiny_model
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt.models_support import Bench

TOKENS = list(range(40))


def logits(seed: int = 0) -> torch.Tensor:
    ops = ReferenceOps()
    return Bench(tiny_model(ops, seed=seed), ops).logits(TOKENS)


def test_a_seed_gives_the_same_model_and_another_seed_another() -> None:
    assert torch.equal(logits(), logits())
    assert not torch.equal(logits(), logits(seed=1))


def test_logits_are_spread_enough_to_sample_different_tokens() -> None:
    found = logits()
    assert found.shape == (40, 320)
    assert found.std() > 1
    assert len(set(found.argmax(-1).tolist())) > 10


def test_a_configuration_can_be_given() -> None:
    config = tiny_config(vocab_size=500, num_layers=3, eos_token_ids=frozenset({9}))
    model = tiny_model(ReferenceOps(), config)
    assert model.config is config
    assert len(model.weights.layers) == 3
    assert model.weights.embedding.shape == (500, 64)
