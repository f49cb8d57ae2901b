"""The device chooses what the host chooses, under Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from chatrt.device_sampling import DeviceSampler, warm_up_sampling
from chatrt.params import SamplingParams
from chatrt.sampling import Sampler
from chatrt_kernels.triton.sample import CANDIDATES

VOCAB = 3000
CPU = torch.device("cpu")
PROMPT = [3, 5, 5, 2999]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "noisy": {"temperature": 0.8},
    "hot": {"temperature": 2.0},
    "top k": {"top_k": 40},
    "top k of one": {"top_k": 1, "temperature": 1.5},
    "top p": {"top_p": 0.9},
    "small nucleus": {"top_p": 0.05},
    "min p": {"min_p": 0.05},
    "all filters": {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    "bias": {"logit_bias": {7: 8.0, 11: -100.0}, "temperature": 0.9},
    "penalties": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "temperature": 0.7,
    },
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 0.8},
    "everything": {
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {1: 2.0},
    },
}


def samplers(params: SamplingParams, seed: int = 11) -> tuple[DeviceSampler, Sampler]:
    known: dict[str, Any] = {"seed": seed, "vocab_size": VOCAB, "prompt_ids": PROMPT}
    return DeviceSampler(params, **known, device=CPU), Sampler(params, **known)


def logits(rows: int, *, seed: int, width: int = VOCAB + 8, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator) * scale


@pytest.mark.parametrize("name", PARAMS)
def test_the_device_chooses_what_the_host_chooses(name: str) -> None:
    params = SamplingParams(**PARAMS[name])
    for seed in range(6):
        device, host = samplers(params, seed)
        for sampler in (device, host):
            sampler.accept([9, 9, 4])
        rows = logits(4, seed=seed)
        drafts = host.choose_rows(rows[:1], [], position=50)
        drafts += [drafts[0], 17]
        expected = host.choose_rows(rows, drafts, position=50)
        assert device.choose_rows(rows, drafts, position=50) == expected


@pytest.mark.parametrize("name", PARAMS)
def test_every_row_is_chosen_as_if_it_stood_alone(name: str) -> None:
    device, host = samplers(SamplingParams(**PARAMS[name]))
    rows = logits(3, seed=5)
    own: list[int] = []
    for i in range(3):
        own.append(host.sample(rows[i], position=9 + i, drafts_before=own))
    assert device.choose_rows(rows, own[:2], position=9) == own


def test_a_nucleus_wider_than_the_candidates_is_decided_on_the_host() -> None:
    device, host = samplers(SamplingParams(top_p=0.999))
    flat = logits(2, seed=1, scale=0.01)  # three thousand tokens of the same size
    drafts = host.choose_rows(flat[:1], [], position=3)
    assert device.choose_rows(flat, drafts, position=3) == host.choose_rows(
        flat, drafts, position=3
    )
    assert CANDIDATES < VOCAB


def test_of_equal_scores_the_smaller_id_is_taken() -> None:
    device, _ = samplers(SamplingParams(temperature=0.0))
    tied = torch.zeros(1, VOCAB)
    tied[0, [2500, 40, 1200]] = 5.0
    assert device.choose_rows(tied, [], position=0) == [40]


def test_ids_behind_the_vocabulary_are_never_chosen() -> None:
    row = logits(1, seed=8)
    row[0, VOCAB:] = 100.0
    for name in ("greedy", "noisy", "top k"):
        device, host = samplers(SamplingParams(**PARAMS[name]))
        assert device.choose_rows(row, [], position=0) == host.choose_rows(row, [], position=0)


def test_seeds_of_64_bits_and_far_positions_have_their_own_noise() -> None:
    params = SamplingParams(temperature=1.0)
    rows = logits(1, seed=3, scale=0.5)
    for seed in (0, 2**63 - 1, 2**62 + 12345):
        for position in (0, 131_071):
            device, host = samplers(params, seed)
            assert device.choose_rows(rows, [], position=position) == host.choose_rows(
                rows, [], position=position
            )


def test_log_probabilities_are_the_hosts() -> None:
    device, host = samplers(SamplingParams(top_logprobs=3))
    row = logits(1, seed=2)[0]
    assert device.logprobs(row, 7) == host.logprobs(row, 7)


def test_a_draft_among_some_tokens_is_the_hosts() -> None:
    device, host = samplers(SamplingParams(temperature=0.8))
    ids = torch.tensor([5, 9, 100, 7])
    few = logits(1, seed=4, width=4)[0]
    assert device.choose_among(few, ids, position=4) == host.choose_among(few, ids, position=4)


def test_a_warm_up_compiles_every_variant_of_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, tuple[tuple[str, object], ...]]] = set()
    plain = InterpretedFunction.__getitem__

    def noted(self: Any, grid: Any) -> Any:
        launch = plain(self, grid)

        def call(*args: Any, **kwargs: Any) -> Any:
            names = ("NOISY", "HAS_BIAS", "HAS_COUNTS")
            flags = tuple((name, kwargs[name]) for name in names if name in kwargs)
            seen.add((self.fn.__name__, flags))
            return launch(*args, **kwargs)

        return call

    monkeypatch.setattr(InterpretedFunction, "__getitem__", noted)
    warm_up_sampling(VOCAB, torch.float32, CPU)
    warm = set(seen)
    for name in PARAMS:
        device, _ = samplers(SamplingParams(**PARAMS[name]))
        device.choose_rows(logits(2, seed=1), [5], position=3)
    assert seen == warm
    assert len(warm) == 8  # four of scores, with noise and without, their best, filters
