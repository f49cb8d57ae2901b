"""Sampling: one pipeline, no state, noise keyed by seed, position and token."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatrt.errors import InvalidValue
from chatrt.params import SamplingParams
from chatrt.sampling import MAX_GUMBEL, Sampler, gumbel_noise, sample_greedy

VOCAB = 500


def make_sampler(params: SamplingParams, *, seed: int = 7, prompt: tuple[int, ...] = ()) -> Sampler:
    return Sampler(params, seed=seed, vocab_size=VOCAB, prompt_ids=prompt)


def random_logits(seed: int, *, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def test_temperature_zero_takes_the_likeliest_token() -> None:
    logits = random_logits(1)
    assert make_sampler(SamplingParams(temperature=0.0)).sample(logits, position=3) == int(
        logits.argmax()
    )
    assert sample_greedy(logits[None], VOCAB) == [int(logits.argmax())]


def test_padding_ids_are_never_sampled() -> None:
    logits = torch.cat([random_logits(2), torch.full((12,), 100.0)])
    sampler = make_sampler(SamplingParams(temperature=1.0))
    assert all(sampler.sample(logits, position=i) < VOCAB for i in range(50))
    assert sample_greedy(logits[None], VOCAB)[0] < VOCAB


def test_sampled_frequencies_follow_the_softmax() -> None:
    logits = torch.full((VOCAB,), -50.0)
    logits[:4] = torch.tensor([1.0, 2.0, 3.0, 0.0])
    sampler = make_sampler(SamplingParams(temperature=0.8))
    num_draws = 6000
    counts = Counter(sampler.sample(logits, position=i) for i in range(num_draws))
    for token_id, expected in enumerate(torch.softmax(logits[:4] / 0.8, 0).tolist()):
        deviation = math.sqrt(expected * (1 - expected) / num_draws)
        assert abs(counts[token_id] / num_draws - expected) < 5 * deviation


def test_the_same_seed_and_position_choose_the_same_token_without_any_state() -> None:
    logits = random_logits(3)
    params = SamplingParams(temperature=1.0)
    forwards = [make_sampler(params).sample(logits, position=i) for i in range(40)]
    sampler = make_sampler(params)
    backwards = [sampler.sample(logits, position=i) for i in reversed(range(40))]
    assert forwards == backwards[::-1]
    assert forwards != [make_sampler(params, seed=8).sample(logits, position=i) for i in range(40)]


def test_noise_does_not_depend_on_which_other_tokens_are_asked_for() -> None:
    whole = gumbel_noise(5, 9, torch.arange(VOCAB))
    some = torch.tensor([499, 3, 77])
    assert torch.equal(gumbel_noise(5, 9, some), whole[some])


def test_noise_has_the_moments_of_gumbel_noise_and_its_stated_bound() -> None:
    noise = gumbel_noise(2**63 - 1, 12, torch.arange(200_000))
    assert abs(float(noise.mean()) - 0.57722) < 0.02
    assert abs(float(noise.std()) - math.pi / math.sqrt(6)) < 0.02
    assert float(noise.max()) <= MAX_GUMBEL
    assert bool(torch.isfinite(noise).all())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 2.0]), st.integers(0, 5000))
def test_skipping_hopeless_candidates_never_changes_the_choice(
    seed: int, temperature: float, position: int
) -> None:
    logits = random_logits(seed, scale=6.0)
    chosen = make_sampler(SamplingParams(temperature=temperature), seed=seed).sample(
        logits, position=position
    )
    noisy = (logits / temperature).double() + gumbel_noise(seed, position, torch.arange(VOCAB))
    assert chosen == int(noisy.argmax())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.5, 0.9, 0.999]), st.sampled_from([0, 5, 100]))
def test_top_p_keeps_the_smallest_set_that_reaches_it(seed: int, top_p: float, top_k: int) -> None:
    logits = random_logits(seed, scale=1.0)
    order = logits.argsort(descending=True)[: top_k or VOCAB]
    mass = torch.softmax(logits[order].double(), 0).cumsum(0)
    allowed = set(order[: int((mass < top_p - 1e-6).sum()) + 1].tolist())
    sampler = make_sampler(SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k), seed=seed)
    assert {sampler.sample(logits, position=i) for i in range(60)} <= allowed


def test_top_k_and_min_p_bound_the_candidates() -> None:
    logits = random_logits(4, scale=1.0)
    best = set(logits.topk(3).indices.tolist())
    sampler = make_sampler(SamplingParams(temperature=2.0, top_k=3))
    assert {sampler.sample(logits, position=i) for i in range(200)} == best
    floor = float(torch.softmax(logits, 0).max()) * 0.5
    likely = {i for i, p in enumerate(torch.softmax(logits, 0).tolist()) if p >= floor}
    sampler = make_sampler(SamplingParams(temperature=1.0, min_p=0.5))
    assert {sampler.sample(logits, position=i) for i in range(200)} <= likely


def test_logit_bias_lifts_and_bans() -> None:
    logits = random_logits(5)
    best = int(logits.argmax())
    banned = make_sampler(SamplingParams(temperature=0.0, logit_bias={best: -100.0}))
    assert banned.sample(logits, position=0) != best
    lifted = make_sampler(SamplingParams(temperature=0.0, logit_bias={17: 100.0}))
    assert lifted.sample(logits, position=0) == 17


def test_penalties_count_every_accepted_token_once_and_drafts_before_the_row() -> None:
    params = SamplingParams(
        temperature=0.0, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3
    )
    logits = random_logits(6)
    stepwise = make_sampler(params, prompt=(1, 2, 3))
    emitted: list[int] = []
    for position in range(6):
        token = stepwise.sample(logits, position=position)
        stepwise.accept([token])
        emitted.append(token)
    drafted = make_sampler(params, prompt=(1, 2, 3))
    rows = [
        drafted.sample(logits, position=i, drafts_before=emitted[:i]) for i in range(len(emitted))
    ]
    assert rows == emitted
    assert len(set(emitted)) > 1


def test_repetition_penalty_sees_the_prompt_but_frequency_does_not() -> None:
    logits = random_logits(7, scale=1.0)
    best, second = logits.topk(2).indices.tolist()
    logits[best], logits[second] = 5.0, 4.9
    repeated = make_sampler(SamplingParams(temperature=0.0, repetition_penalty=1.5), prompt=(best,))
    assert repeated.sample(logits, position=1) == second
    frequent = make_sampler(SamplingParams(temperature=0.0, frequency_penalty=2.0), prompt=(best,))
    assert frequent.sample(logits, position=1) == best


def test_logprobs_are_the_models_own_whatever_the_temperature() -> None:
    logits = random_logits(8)
    sampler = make_sampler(SamplingParams(temperature=0.1, top_logprobs=3, logit_bias={4: 9.0}))
    entry = sampler.logprobs(logits, 42)
    expected = torch.log_softmax(logits, 0)
    assert entry.logprob == pytest.approx(float(expected[42]), abs=1e-6)
    assert [token for token, _ in entry.top] == expected.topk(3).indices.tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("seed", -1),
        ("max_output_tokens", 0),
        ("top_logprobs", 21),
    ],
)
def test_out_of_range_numbers_are_refused_with_the_number_and_the_range(
    name: str, value: float
) -> None:
    with pytest.raises(InvalidValue, match=rf"{name} is .*{value}.*it must be in"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-38, 1e-30])
def test_a_tiny_temperature_takes_the_likeliest_token_instead_of_overflowing(
    temperature: float,
) -> None:
    for seed in range(20):
        logits = random_logits(seed)
        sampler = make_sampler(SamplingParams(temperature=temperature), seed=seed)
        assert sampler.sample(logits, position=3) == sample_greedy(logits[None], VOCAB)[0]


def test_stops_that_would_hold_up_other_streams_are_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidValue, match="1025 characters, at most 1024"):
        SamplingParams(stop=("x" * 1025,))
    with pytest.raises(InvalidValue, match="1025 ids, at most 1024"):
        SamplingParams(stop_token_ids=(1,) * 1025)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num=st.sampled_from([1, 2, 60, VOCAB]),
    temperature=st.sampled_from([0.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    penalty=st.sampled_from([0.0, 0.9]),
)
def test_a_draft_among_some_tokens_is_the_choice_of_the_row_that_has_only_them(
    seed: int, num: int, temperature: float, top_k: int, penalty: float
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=top_k, presence_penalty=penalty, logit_bias={3: 2.0}
    )
    token_ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:num]
    logits = random_logits(seed)[:num]
    sampler = make_sampler(params, seed=seed)
    sampler.accept([int(token_ids[0])])
    row = torch.full((VOCAB,), -math.inf)
    row[token_ids] = logits
    before = [int(token_ids[-1])]
    for kind in (torch.int32, torch.int64):
        found = sampler.choose_among(
            logits, token_ids.to(kind), position=seed, drafts_before=before
        )
        assert found.token_id == sampler.sample(row, position=seed, drafts_before=before)
        probability = float(torch.softmax(logits, 0)[token_ids == found.token_id])
        assert found.probability == pytest.approx(probability, rel=1e-5)
