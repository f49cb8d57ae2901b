"""The native sampler chooses what the PyTorch one chooses."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatrt.native_sampling import NativeSampler
from chatrt.params import SamplingParams
from chatrt.sampling import MakeSampler, Sampler
from chatrt.speculative import row_logprobs, verify
from chatrt_kernels.cpu.sampling import NativeSampling
from tests.chatrt_kernels.cpu_support import NATIVE_PATH, compiled

LARGEST = 49_152


@pytest.fixture(scope="module")
def native() -> MakeSampler:
    kernel = NativeSampling(ctypes.CDLL(str(compiled(NATIVE_PATH))), LARGEST)
    return partial(NativeSampler, kernel=kernel)


def random_rows(seed: int, num_rows: int, vocab_size: int, *, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def near(params: SamplingParams) -> list[SamplingParams]:
    """The same request; with a nucleus, also those whose edge is the same to five digits."""
    if params.top_p == 1.0:
        return [params]
    changes = (-1e-5, 0.0, 1e-5)
    return [replace(params, top_p=min(1.0, params.top_p * (1 + change))) for change in changes]


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.5, 1e-300]),
    top_k=st.sampled_from([0, 0, 1, 5, 50, 2000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.95, 0.4]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.6]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.6, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    logit_bias=st.dictionaries(st.integers(-2, 80), st.floats(-100, 100, width=16), max_size=4),
)


@settings(max_examples=250, deadline=None)
@given(
    data=st.data(),
    params=PARAMS,
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**31),
    vocab_size=st.one_of(st.integers(1, 70), st.sampled_from([500, LARGEST])),
    scale=st.sampled_from([0.5, 3.0, 9.0]),
)
def test_the_native_sampler_chooses_what_the_plain_one_chooses(
    native: MakeSampler,
    data: st.DataObject,
    params: SamplingParams,
    seed: int,
    position: int,
    vocab_size: int,
    scale: float,
) -> None:
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=6)
    prompt, emitted, drafts = data.draw(tokens), data.draw(tokens), data.draw(tokens)
    padding = data.draw(st.sampled_from([0, 3, 64]))
    rows = random_rows(seed, len(drafts) + 1, vocab_size + padding, scale=scale)
    rows[:, vocab_size:] = 1000.0
    banned = data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=3))
    if len(set(banned)) < vocab_size:
        rows[:, banned] = -math.inf
    outcomes = []
    for one in near(params):
        plain = Sampler(one, seed=seed, vocab_size=vocab_size, prompt_ids=prompt)
        plain.accept(emitted)
        outcomes.append(plain.choose_rows(rows, drafts, position=position))
    sampler = native(params, seed=seed, vocab_size=vocab_size, prompt_ids=prompt)
    sampler.accept(emitted)
    assert sampler.choose_rows(rows, drafts, position=position) in outcomes


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    params=PARAMS,
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**31),
    num=st.one_of(st.integers(1, 70), st.just(8192)),
    scale=st.sampled_from([0.5, 3.0, 9.0]),
)
def test_drafts_among_some_tokens_are_the_plain_samplers_too(
    native: MakeSampler,
    data: st.DataObject,
    params: SamplingParams,
    seed: int,
    position: int,
    num: int,
    scale: float,
) -> None:
    vocab_size = LARGEST if num == 8192 else 90
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=6)
    prompt, emitted, drafts = data.draw(tokens), data.draw(tokens), data.draw(tokens)
    token_ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:num]
    logits = random_rows(seed, 1, num, scale=scale)[0]
    chosen = []
    for one in near(params):
        plain = Sampler(one, seed=seed, vocab_size=vocab_size, prompt_ids=prompt)
        plain.accept(emitted)
        chosen.append(
            plain.choose_among(logits, token_ids, position=position, drafts_before=drafts)
        )
    sampler = native(params, seed=seed, vocab_size=vocab_size, prompt_ids=prompt)
    sampler.accept(emitted)
    found = sampler.choose_among(logits, token_ids, position=position, drafts_before=drafts)
    assert found.token_id in [choice.token_id for choice in chosen]
    probability = next(c.probability for c in chosen if c.token_id == found.token_id)
    assert found.probability == pytest.approx(probability, rel=1e-4, abs=1e-12)


def test_a_draft_with_the_targets_logits_is_what_a_verify_accepts(native: MakeSampler) -> None:
    # penalties count drafts before the row in the draft and in the verify alike
    params = SamplingParams(temperature=0.9, frequency_penalty=0.8, repetition_penalty=1.2)
    rows, every_id = random_rows(7, 6, 300), torch.arange(300)
    sampler = native(params, seed=4, vocab_size=300, prompt_ids=(1, 2))
    sampler.accept([5, 6])
    drafts: list[int] = []
    for i in range(5):
        choice = sampler.choose_among(rows[i], every_id, position=40 + i, drafts_before=drafts)
        drafts.append(choice.token_id)
    assert sampler.choose_rows(rows, drafts, position=40)[:5] == drafts


def test_drafts_among_tokens_outside_the_vocabulary_are_refused(native: MakeSampler) -> None:
    sampler = native(SamplingParams(), seed=1, vocab_size=50, prompt_ids=())
    with pytest.raises(ValueError, match="token 50, the vocabulary has 50"):
        sampler.choose_among(torch.zeros(2), torch.tensor([50, 3]), position=0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    params=PARAMS,
    num_right=st.integers(0, 5),
)
def test_a_verify_emits_what_plain_decoding_emits(
    native: MakeSampler, seed: int, params: SamplingParams, num_right: int
) -> None:
    rows = random_rows(seed, 6, 40)
    plain = native(params, seed=seed, vocab_size=40, prompt_ids=(1, 2))
    tokens: list[int] = []
    for i, row in enumerate(rows):
        tokens += plain.choose_rows(row[None], (), position=i)
        plain.accept(tokens[-1:])
    drafts = tokens[:5]
    if num_right < 5:
        drafts[num_right] = (drafts[num_right] + 1) % 40
    sampler = native(params, seed=seed, vocab_size=40, prompt_ids=(1, 2))
    verified = verify(sampler, rows, drafts, position=0)
    assert verified.token_ids == tokens[: num_right + 1]
    assert verified.num_accepted == num_right


def test_logits_of_other_kinds_are_read_as_float32(native: MakeSampler) -> None:
    rows = random_rows(3, 2, 100)
    params = SamplingParams(temperature=0.9, top_k=10)
    for kind in (rows.bfloat16(), rows.double(), rows.T.contiguous().T):
        plain = Sampler(params, seed=1, vocab_size=100, prompt_ids=())
        sampler = native(params, seed=1, vocab_size=100, prompt_ids=())
        wanted = plain.choose_rows(kind, [7], position=5)
        assert sampler.choose_rows(kind, [7], position=5) == wanted


def test_choosing_leaves_the_logits_unchanged(native: MakeSampler) -> None:
    rows = random_rows(4, 1, 200)
    before = rows.clone()
    params = SamplingParams(temperature=0.5, repetition_penalty=1.5, logit_bias={3: 4.0})
    native(params, seed=1, vocab_size=200, prompt_ids=(1, 5)).choose_rows(rows, (), position=0)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("top_logprobs", [None, 0, 20])
def test_logprobs_are_those_of_the_plain_sampler(
    native: MakeSampler, top_logprobs: int | None
) -> None:
    rows = random_rows(5, 2, 1000)
    params = SamplingParams(temperature=0.1, top_logprobs=top_logprobs, logit_bias={4: 9.0})
    plain = Sampler(params, seed=1, vocab_size=990, prompt_ids=())
    sampler = native(params, seed=1, vocab_size=990, prompt_ids=())
    wanted = row_logprobs(plain, rows, [4, 9])
    found = row_logprobs(sampler, rows, [4, 9])
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        values = [value for _, value in other.top]
        assert [value for _, value in one.top] == pytest.approx(values, abs=1e-5)
