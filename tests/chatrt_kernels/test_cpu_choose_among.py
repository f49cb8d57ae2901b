"""Choosing among some tokens: what the whole row gives in which all others have no chance."""

from __future__ import annotations

import ctypes
import math
from array import array
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatrt_kernels.cpu.sampling import NativeSampling, SamplerState, TokenSubset
from tests.chatrt_kernels.test_cpu_sampling import (
    FILTERS,
    LARGEST,
    SHARED,
    Filters,
    near,
    random_logits,
    state_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from chatrt_kernels.cpu.sampling import Choice

SIZES = st.one_of(st.integers(1, 70), st.sampled_from([128, 129, 1000]))


@pytest.fixture(scope="module")
def sampling(native_library: Path) -> NativeSampling:
    return NativeSampling(ctypes.CDLL(str(native_library)), LARGEST)


def among(
    sampling: NativeSampling,
    state: SamplerState,
    token_ids: list[int],
    logits: Tensor,
    *,
    position: int = 0,
    drafts: tuple[int, ...] = (),
) -> Choice:
    subset = TokenSubset(token_ids)
    return sampling.choose_among(
        state, subset, logits.data_ptr(), drafts_before=drafts, position=position
    )


def of_whole_row(
    sampling: NativeSampling,
    state: SamplerState,
    token_ids: list[int],
    logits: Tensor,
    *,
    position: int = 0,
    drafts: tuple[int, ...] = (),
) -> int:
    """The same by way of a verify, whose rows before the last give the drafts."""
    rows = torch.full((len(drafts) + 1, state.vocab_size), -torch.inf)
    for row, draft in enumerate(drafts):
        rows[row, draft] = 1e30
    rows[-1, token_ids] = logits
    chosen = sampling.choose_rows(
        *(state, rows.data_ptr()),
        row_stride=state.vocab_size,
        drafts=drafts,
        position=position - len(drafts),
    )
    return chosen[-1]


def drawn_ids(seed: int, num: int, vocab_size: int) -> list[int]:
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    ids: list[int] = order[:num].tolist()
    return ids


@settings(max_examples=150, deadline=None, suppress_health_check=SHARED)
@given(
    st.integers(0, 10**6),
    SIZES,
    FILTERS,
    st.sampled_from([0.1, 1.0, 6.0, 500.0]),
    st.booleans(),
)
def test_the_choice_is_that_of_the_whole_row(
    sampling: NativeSampling, seed: int, num: int, filters: Filters, scale: float, greedy: bool
) -> None:
    vocab_size = (num, num + 5, LARGEST)[seed % 3]
    logits, token_ids = random_logits(seed, num, scale=scale), drawn_ids(seed, num, vocab_size)
    if greedy:
        filters["temperature"] = 0.0
    found = among(sampling, state_of(vocab_size, seed=seed, **filters), token_ids, logits)
    states = [state_of(vocab_size, seed=seed, **one) for one in near(filters)]
    allowed = [of_whole_row(sampling, state, token_ids, logits) for state in states]
    assert found.token_id in allowed
    probabilities = torch.softmax(logits.double(), 0)
    probability = float(probabilities[token_ids.index(found.token_id)])
    assert found.probability == pytest.approx(probability, rel=1e-4, abs=1e-12)


@settings(max_examples=100, deadline=None, suppress_health_check=SHARED)
@given(
    st.integers(0, 10**6),
    st.integers(1, 300),
    st.integers(1, 5),
    st.sampled_from([0, 1, 3, 30]),
    st.sampled_from([0.0, 1.0, 0.7]),
)
def test_of_equal_scores_the_lower_ids_stay_whatever_order_they_come_in(
    sampling: NativeSampling, seed: int, num: int, num_levels: int, top_k: int, temperature: float
) -> None:
    levels = torch.randint(num_levels, (num,), generator=torch.Generator().manual_seed(seed))
    logits, token_ids = levels.float() * 2.5, drawn_ids(seed, num, 400)
    state = state_of(400, seed=seed, top_k=top_k, temperature=temperature)
    for position in range(5):
        found = among(sampling, state, token_ids, logits, position=position)
        expected = of_whole_row(sampling, state, token_ids, logits, position=position)
        assert found.token_id == expected


@settings(max_examples=100, deadline=None, suppress_health_check=SHARED)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 0.8]),
    penalties=st.sampled_from([(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (0.8, 0.4, 0.2), (1.0, 0.9, 0.0)]),
    seen=st.lists(st.integers(0, 39), max_size=12),
    emitted=st.lists(st.integers(0, 39), max_size=12),
    drafts=st.lists(st.integers(0, 39), max_size=4),
    bias=st.dictionaries(st.integers(-2, 45), st.floats(-20, 20, width=16), max_size=4),
)
def test_penalties_and_bias_reach_the_tokens_that_are_there(
    sampling: NativeSampling,
    seed: int,
    temperature: float,
    penalties: tuple[float, float, float],
    seen: list[int],
    emitted: list[int],
    drafts: list[int],
    bias: dict[int, float],
) -> None:
    repetition, presence, frequency = penalties
    state = SamplerState(
        seed=seed,
        vocab_size=40,
        temperature=temperature,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        prompt_ids=seen,
    )
    state.accept(emitted)
    logits, token_ids = random_logits(seed, 25), drawn_ids(seed, 25, 40)
    before = logits.clone()
    found = among(sampling, state, token_ids, logits, position=9, drafts=tuple(drafts))
    expected = of_whole_row(sampling, state, token_ids, logits, position=9, drafts=tuple(drafts))
    assert found.token_id == expected
    assert torch.equal(logits, before)
    # the probability is that of the logits as they are
    probability = float(torch.softmax(logits, 0)[token_ids.index(found.token_id)])
    assert found.probability == pytest.approx(probability, rel=1e-4)


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_numbers_that_are_none_are_never_chosen(
    sampling: NativeSampling, filters: Filters, bad: float
) -> None:
    token_ids = drawn_ids(3, 130, 500)
    logits = torch.full((130,), bad)
    logits[77] = -5.0
    for position in range(20):
        found = among(sampling, state_of(500, **filters), token_ids, logits, position=position)
        assert found.token_id == token_ids[77]
        assert found.probability == pytest.approx(1.0)


def test_tokens_that_do_not_fit_are_refused_with_both_numbers(sampling: NativeSampling) -> None:
    logits = torch.zeros(3)
    with pytest.raises(ValueError, match="token 10, the vocabulary has 10"):
        among(sampling, state_of(10), [1, 10, 2], logits)
    with pytest.raises(ValueError, match=f"{LARGEST + 1} logits, scratch memory for {LARGEST}"):
        among(sampling, state_of(10), list(range(LARGEST + 1)), logits)
    for token_ids in ([], [3, 1, 3], [-1, 2]):
        with pytest.raises(ValueError, match=f"{len(token_ids)} token ids that are not distinct"):
            TokenSubset(array("i", token_ids))
