"""Verification: what is emitted is what plain decoding would have emitted."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatrt.params import SamplingParams
from chatrt.sampling import Sampler
from chatrt.speculative import SpeculationCounter, row_logprobs, verify

VOCAB = 40


def logits_after(tokens: list[int]) -> torch.Tensor:
    """A stand-in for a model: logits that depend on the last two tokens only."""
    key = tokens[-1] * 1009 + (tokens[-2] if len(tokens) > 1 else 0)
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(key)) * 2


def decode_plainly(params: SamplingParams, prompt: list[int], num_tokens: int) -> list[int]:
    sampler = Sampler(params, seed=5, vocab_size=VOCAB, prompt_ids=prompt)
    tokens = list(prompt)
    for _ in range(num_tokens):
        token = sampler.sample(logits_after(tokens), position=len(tokens))
        sampler.accept([token])
        tokens.append(token)
    return tokens[len(prompt) :]


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    temperature=st.sampled_from([0.0, 0.5, 1.5]),
    penalty=st.sampled_from([0.0, 0.8]),
    top_p=st.sampled_from([0.7, 1.0]),
)
def test_any_drafts_leave_the_text_as_it_is(
    data: st.DataObject, temperature: float, penalty: float, top_p: float
) -> None:
    params = SamplingParams(temperature=temperature, frequency_penalty=penalty, top_p=top_p)
    prompt = [1, 2, 3]
    expected = decode_plainly(params, prompt, 24)
    sampler = Sampler(params, seed=5, vocab_size=VOCAB, prompt_ids=prompt)
    tokens = list(prompt)
    while len(tokens) - len(prompt) < 24:
        done = len(tokens) - len(prompt)
        num_right = data.draw(st.integers(0, 4))
        drafts = expected[done : done + num_right]
        drafts += data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))
        rows = torch.stack([logits_after(tokens + drafts[:i]) for i in range(len(drafts) + 1)])
        verified = verify(sampler, rows, drafts, position=len(tokens))
        assert verified.num_accepted >= min(num_right, len(expected) - done)
        sampler.accept(verified.token_ids)
        tokens += verified.token_ids
    assert tokens[len(prompt) :][:24] == expected


def test_all_accepted_drafts_are_followed_by_the_bonus_token() -> None:
    sampler = Sampler(
        SamplingParams(temperature=0.0), seed=0, vocab_size=VOCAB, prompt_ids=(1, 2, 3)
    )
    expected = decode_plainly(SamplingParams(temperature=0.0), [1, 2, 3], 4)
    rows = torch.stack([logits_after([1, 2, 3, *expected[:i]]) for i in range(4)])
    verified = verify(sampler, rows, expected[:3], position=3)
    assert verified.token_ids == expected
    assert verified.num_accepted == 3


def test_logprobs_come_from_the_row_that_emitted_each_token() -> None:
    params = SamplingParams(temperature=0.0, top_logprobs=0)
    sampler = Sampler(params, seed=0, vocab_size=VOCAB, prompt_ids=())
    rows = torch.stack([logits_after([i, i + 1]) for i in range(2)])
    entries = row_logprobs(sampler, rows, [4, 9])
    assert [entry.token_id for entry in entries] == [4, 9]
    assert entries[1].logprob == float(torch.log_softmax(rows[1], 0)[9])


def test_counts_add_up_over_steps() -> None:
    counter = SpeculationCounter()
    counter.add(num_drafts=3, num_accepted=2, num_emitted=3, source="head")
    counter.add(num_drafts=0, num_accepted=0, num_emitted=1)
    counter.add(num_drafts=4, num_accepted=4, num_emitted=5, source="ngram")
    counter.add_times(draft_ms=0.5, verify_ms=3.0)
    figures = counter.figures()
    assert (figures.steps, figures.drafted, figures.accepted, figures.emitted) == (3, 7, 6, 9)
    assert figures.accepted_per_position == (2, 2, 1, 1)
    assert figures.drafted_per_position == (2, 2, 2, 1)
    assert figures.depths == (1, 0, 0, 1, 1)
    assert figures.drafter == "ngram+head"
    assert figures.mean_accepted_length == 3.0
    assert (figures.draft_ms, figures.verify_ms) == (0.5, 3.0)
