"""Native sampling on every path, against a plain reading of the same rules in float64."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, TypedDict, Unpack

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatrt_kernels.cpu.sampling import MAX_TOP, NativeSampling, SamplerState

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

LARGEST = 20_000
_MASK = (1 << 64) - 1


class Filters(TypedDict, total=False):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float


@pytest.fixture(scope="module")
def sampling(native_library: Path) -> NativeSampling:
    return NativeSampling(ctypes.CDLL(str(native_library)), LARGEST)


def state_of(vocab_size: int, *, seed: int = 7, **filters: Unpack[Filters]) -> SamplerState:
    return SamplerState(seed=seed, vocab_size=vocab_size, logit_bias={}, **filters)


def choose(
    sampling: NativeSampling, state: SamplerState, logits: Tensor, *, position: int = 0
) -> int:
    (token,) = sampling.choose_rows(
        state, logits.data_ptr(), row_stride=len(logits), drafts=(), position=position
    )
    return token


def random_logits(seed: int, num: int, *, scale: float = 3.0) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed)) * scale


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def noise(seed: int, position: int, token_id: int) -> float:
    key = mix((seed + 0x9E3779B97F4A7C15 * (position + 1)) & _MASK)
    bits = mix((token_id * 0x9E3779B97F4A7C15 + key) & _MASK) >> 32
    return -math.log(-math.log((bits + 0.5) * 2.0**-32))


def candidates(scores: list[float], filters: Filters) -> list[int]:
    """Ids that the filters leave: prefixes of "higher score first, then lower id"."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    order = order[: filters.get("top_k", 0) or len(order)]
    best = scores[order[0]]
    if filters.get("top_p", 1.0) < 1.0:
        masses = [math.exp(scores[i] - best) for i in order]
        target, sum_, num_kept = filters["top_p"] * math.fsum(masses), 0.0, 0
        while num_kept < len(order) and sum_ < target:
            sum_ += masses[num_kept]
            num_kept += 1
        order = order[:num_kept]
    if filters.get("min_p", 0.0) > 0.0:
        floor = float(torch.tensor(best) + math.log(filters["min_p"]))
        order = [i for i in order if scores[i] >= floor]
    return order


def near(filters: Filters) -> list[Filters]:
    """The same filters, and those with a nucleus whose edge is the same to five digits."""
    nearby: list[Filters] = []
    for change in (-1e-5, 0.0, 1e-5):
        one = filters.copy()
        one["top_p"] = min(1.0, filters["top_p"] * (1 + change))
        nearby.append(one)
    return nearby


def expected(logits: Tensor, filters: Filters, *, seed: int, position: int) -> int:
    scores = (logits / filters.get("temperature", 1.0)).tolist()
    left = candidates(scores, filters)
    return max(left, key=lambda i: (scores[i] + noise(seed, position, i), -i))


FILTERS = st.builds(
    Filters,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 40, 500]),
    top_p=st.sampled_from([1.0, 0.9999, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 1000, LARGEST]))
SHARED = [HealthCheck.function_scoped_fixture]


@settings(max_examples=150, deadline=None, suppress_health_check=SHARED)
@given(st.integers(0, 10**6), SIZES, FILTERS, st.sampled_from([0.1, 1.0, 6.0, 500.0]))
def test_the_choice_is_the_best_noisy_score_of_what_the_filters_leave(
    sampling: NativeSampling, seed: int, num: int, filters: Filters, scale: float
) -> None:
    logits = random_logits(seed, num, scale=scale)
    state = state_of(num, seed=seed, **filters)
    for position in (0, seed):
        allowed = [expected(logits, one, seed=seed, position=position) for one in near(filters)]
        assert choose(sampling, state, logits, position=position) in allowed


@settings(max_examples=100, deadline=None, suppress_health_check=SHARED)
@given(
    st.integers(0, 10**6),
    st.integers(1, 300),
    st.integers(1, 5),
    st.sampled_from([0, 1, 3, 30]),
    st.sampled_from([1.0, 0.9, 0.33]),
)
def test_of_equal_scores_the_lower_ids_stay(
    sampling: NativeSampling, seed: int, num: int, num_levels: int, top_k: int, top_p: float
) -> None:
    levels = torch.randint(num_levels, (num,), generator=torch.Generator().manual_seed(seed))
    logits = levels.float() * 2.5
    filters = Filters(top_k=top_k, top_p=top_p)
    state = state_of(num, seed=seed, **filters)
    for position in range(5):
        allowed = [expected(logits, one, seed=seed, position=position) for one in near(filters)]
        assert choose(sampling, state, logits, position=position) in allowed


def test_top_k_finds_its_tokens_where_most_logits_are_minus_infinity(
    sampling: NativeSampling,
) -> None:
    logits = torch.full((4096,), -torch.inf)
    logits[1024:1344] = 1.0
    state = state_of(4096, top_k=20, temperature=2.0)
    chosen = {choose(sampling, state, logits, position=position) for position in range(400)}
    assert chosen == set(range(1024, 1044))
    found = sampling.log_probs(logits.data_ptr(), 4096, 1024, 20)
    assert [token_id for token_id, _ in found.top] == list(range(1024, 1044))


def test_greedy_takes_the_first_of_the_highest(sampling: NativeSampling) -> None:
    for num in (1, 2, 63, 64, 65, LARGEST):
        logits = random_logits(num, num)
        assert choose(sampling, state_of(num, temperature=0.0), logits) == int(logits.argmax())
    logits = torch.zeros(300)
    logits[[70, 299]] = 1.0
    assert choose(sampling, state_of(300, temperature=0.0), logits) == 70


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_numbers_that_are_none_are_never_chosen(
    sampling: NativeSampling, filters: Filters, bad: float
) -> None:
    for num in (2, 17, 64, 130):
        logits = torch.full((num,), bad)
        assert choose(sampling, state_of(num, **filters), logits) == 0
        logits[num - 1] = -5.0
        for position in range(20):
            assert choose(sampling, state_of(num, **filters), logits, position=position) == num - 1


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}])
def test_an_infinite_logit_is_chosen(sampling: NativeSampling, filters: Filters) -> None:
    logits = random_logits(1, 100)
    logits[[40, 80]] = math.inf
    assert choose(sampling, state_of(100, **filters), logits) == 40


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_scores_near_the_end_of_float32_are_compared(
    sampling: NativeSampling, top_p: float
) -> None:
    logits = torch.tensor([1e38, -3e38, 3e38, 2.9e38, -math.inf, math.nan])
    assert choose(sampling, state_of(6, top_p=top_p), logits) == 2
    assert choose(sampling, state_of(6, top_p=top_p, temperature=5e-324), logits * 1e-31) == 2


def test_ids_behind_the_vocabulary_are_never_chosen(sampling: NativeSampling) -> None:
    logits = torch.cat([random_logits(2, 500), torch.full((76,), 100.0)])
    for filters in (Filters(), Filters(temperature=0.0), Filters(top_k=20), Filters(top_p=0.9)):
        state = state_of(500, **filters)
        assert all(choose(sampling, state, logits, position=i) < 500 for i in range(50))


def test_frequencies_follow_the_softmax(sampling: NativeSampling) -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5, 1.5, -2.0, 0.2])
    num_draws, state = 20_000, state_of(8, seed=11)
    counts = [0] * 8
    for position in range(num_draws):
        counts[choose(sampling, state, logits, position=position)] += 1
    means = (torch.softmax(logits.double(), 0) * num_draws).tolist()
    statistic = sum((n - mean) ** 2 / mean for n, mean in zip(counts, means, strict=True))
    assert statistic < 24.3  # 1 in 1,000 of chi-square with 7 degrees of freedom


@settings(max_examples=50, deadline=None, suppress_health_check=SHARED)
@given(st.integers(0, 10**6), FILTERS, st.integers(0, 6))
def test_a_verify_chooses_row_by_row_up_to_the_first_mismatch(
    sampling: NativeSampling, seed: int, filters: Filters, num_right: int
) -> None:
    num, width = 90, 96
    rows = random_logits(seed, 7 * width).view(7, width)
    state = state_of(num, seed=seed, **filters)
    own = [choose(sampling, state, row, position=50 + i) for i, row in enumerate(rows)]
    drafts = own[:6]
    if num_right < 6:
        drafts[num_right] = (drafts[num_right] + 1) % num
    chosen = sampling.choose_rows(
        state, rows.data_ptr(), row_stride=width, drafts=drafts, position=50
    )
    assert chosen == own[: num_right + 1]


def test_penalties_and_bias_change_the_logits_of_their_ids_only(sampling: NativeSampling) -> None:
    state = SamplerState(
        seed=0,
        vocab_size=6,
        temperature=0.0,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={4: 1.5, 9: 100.0, -1: 100.0},
        prompt_ids=(0, 0, 1),
    )
    state.accept([2, 2])
    # Behind draft 3: 4 / 2, -1 * 2, 8 / 2 - 0.5 - 0.5, 7 / 2 - 0.5 - 0.25, 0 + 1.5, 2.5
    rows = torch.tensor([[0.0, 0.0, 0.0, 99.0, 0.0, 0.0], [4.0, -1.0, 8.0, 7.0, 0.0, 2.5]])
    order = []
    for i in range(6):
        chosen = sampling.choose_rows(state, rows.data_ptr(), row_stride=6, drafts=(3,), position=0)
        order.append(chosen[1])
        rows[1, chosen[1]] = -1000.0 - i
    assert order == [2, 3, 5, 0, 4, 1]


def test_a_turn_may_emit_any_number_of_different_tokens(sampling: NativeSampling) -> None:
    state = state_of(1000, temperature=0.0, presence_penalty=2.0)
    logits = torch.zeros(1000)
    for token in range(1000):
        assert choose(sampling, state, logits) == token
        state.accept([token])


@settings(max_examples=40, deadline=None, suppress_health_check=SHARED)
@given(st.integers(0, 10**6), SIZES, st.sampled_from([0, 1, 20]), st.sampled_from([0.1, 3.0, 40.0]))
def test_log_probs_are_those_of_the_softmax(
    sampling: NativeSampling, seed: int, num: int, num_top: int, scale: float
) -> None:
    logits = random_logits(seed, num, scale=scale)
    whole = torch.log_softmax(logits.double(), 0)
    num_top = min(num_top, num)
    found = sampling.log_probs(logits.data_ptr(), num, seed % num, num_top)
    assert found.logprob == pytest.approx(float(whole[seed % num]), abs=1e-4)
    best = sorted(range(num), key=lambda i: (-float(logits[i]), i))[:num_top]
    assert [token for token, _ in found.top] == best
    assert [value for _, value in found.top] == pytest.approx(whole[best].tolist(), abs=1e-4)


def test_rows_that_do_not_fit_are_refused_with_both_numbers(sampling: NativeSampling) -> None:
    logits = torch.zeros(10)
    with pytest.raises(ValueError, match=f"{LARGEST + 1} logits, scratch memory for {LARGEST}"):
        choose(sampling, state_of(LARGEST + 1), logits)
    with pytest.raises(ValueError, match="token 10, the vocabulary has 10"):
        sampling.log_probs(logits.data_ptr(), 10, 10, 0)
    with pytest.raises(ValueError, match=f"top 40 of a row, at most {min(MAX_TOP, 10)}"):
        sampling.log_probs(logits.data_ptr(), 10, 0, 40)
    state = state_of(10, presence_penalty=1.0)
    with pytest.raises(ValueError, match="token 10, the vocabulary has 10"):
        state.accept([3, 10])
    with pytest.raises(ValueError, match="prompt ids from 3 to 12, the vocabulary has 10"):
        SamplerState(
            seed=0, vocab_size=10, repetition_penalty=1.1, logit_bias={}, prompt_ids=(3, 12)
        )
