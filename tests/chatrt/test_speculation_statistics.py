"""Sampled tokens follow the target's distribution, whoever drafts: chi-square over many draws.

A chain of eight states stands in for a model: each token's logits depend on the one before it, so
every draw has a known distribution, and what a draft changed in the draws behind it would show.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt.native_sampling import NativeSampler
from chatrt.params import SamplingParams
from chatrt.sampling import MakeSampler, Sampler
from chatrt.speculative import verify
from chatrt_kernels.cpu.sampling import NativeSampling
from tests.chatrt_kernels.cpu_support import NATIVE_PATH, compiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from chatrt.sampling import RowSampler

VOCAB = 8
NUM_DRAWS = 20_000
NUM_PER_SEED = 50
NUM_DRAFTS = 2
LEAST_P = 0.001
LEAST_EXPECTED = 5.0  # draws in a cell; the chi-square distribution is an approximation
EVERY_ID = torch.arange(VOCAB)

PARAMS = {
    "plain": SamplingParams(),
    "filtered": SamplingParams(temperature=0.8, top_k=6, min_p=0.03, logit_bias={2: 1.0, 5: -0.3}),
    "nucleus": SamplingParams(temperature=1.3, top_p=0.9),
}


def table(seed: int) -> Tensor:
    """Logits `[last token, next token]` of a chain; no transition is rarer than 1 %."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(VOCAB, VOCAB, generator=generator) * 2.5


TARGET, OTHER = table(1), table(2)


@dataclass(frozen=True)
class Draft:
    """Proposes tokens behind `last`, the first of them at `position`."""

    sampler: RowSampler
    last: int
    position: int

    def nothing(self) -> list[int]:
        return []

    def with_the_same_noise(self) -> list[int]:
        """As the product's drafters do it, with logits of their own."""
        drafts: list[int] = []
        for i in range(NUM_DRAFTS):
            row = OTHER[drafts[-1] if drafts else self.last]
            choice = self.sampler.choose_among(
                row, EVERY_ID, position=self.position + i, drafts_before=drafts
            )
            drafts.append(choice.token_id)
        return drafts

    def the_likeliest(self) -> list[int]:
        """Always the target's favourites: whoever accepted these too often would show."""
        drafts: list[int] = []
        for _ in range(NUM_DRAFTS):
            drafts.append(int(TARGET[drafts[-1] if drafts else self.last].argmax()))
        return drafts

    def the_second_likeliest(self) -> list[int]:
        return [int(TARGET[self.last].argsort()[-2])]


DRAFTS: dict[str, Callable[[Draft], list[int]]] = {
    "no drafts": Draft.nothing,
    "the same noise": Draft.with_the_same_noise,
    "the likeliest": Draft.the_likeliest,
    "the second likeliest": Draft.the_second_likeliest,
}
# Tensor operations take a hundred times as long as the kernel that chooses the same tokens.
CASES = [
    ("reference", "no drafts", "plain"),
    ("reference", "the same noise", "plain"),
    *(("native", drafts, name) for drafts in DRAFTS for name in PARAMS),
]


@dataclass(frozen=True)
class Drawn:
    """How often each token followed each other one, and how many drafts were kept."""

    counts: Tensor
    num_accepted: int


def draw(
    make: MakeSampler, params: SamplingParams, propose: Callable[[Draft], list[int]], first: int
) -> Drawn:
    """`NUM_DRAWS` tokens in sequences of `NUM_PER_SEED`, each with a seed and place of its own."""
    counts = torch.zeros(VOCAB, VOCAB)
    num_accepted = 0
    for seed in range(first, first + NUM_DRAWS // NUM_PER_SEED):
        sampler = make(params, seed=seed, vocab_size=VOCAB, prompt_ids=())
        start = 37 * seed % 5000
        tokens = [seed % VOCAB]
        while len(tokens) <= NUM_PER_SEED:
            position = start + len(tokens)
            drafts = propose(Draft(sampler, tokens[-1], position))
            rows = TARGET[[tokens[-1], *drafts]]
            verified = verify(sampler, rows, drafts, position=position)
            num_accepted += verified.num_accepted
            tokens += verified.token_ids
        # Of a run that went past the end the last tokens count no more than others would have.
        for last, token_id in pairwise(tokens[: NUM_PER_SEED + 1]):
            counts[last, token_id] += 1
    return Drawn(counts, num_accepted)


def probabilities(params: SamplingParams) -> Tensor:
    """The target's distribution `[last token, next token]`, by the definitions of its filters."""
    rows = TARGET.double().clone()
    for token_id, bias in params.logit_bias.items():
        rows[:, token_id] += bias
    rows /= params.temperature
    order = rows.argsort(dim=1, descending=True)
    for row, ids in zip(rows, order, strict=True):
        if params.top_k:
            row[ids[params.top_k :]] = -math.inf
        before = torch.softmax(row, 0)[ids].cumsum(0) - torch.softmax(row, 0)[ids]
        row[ids[before >= params.top_p]] = -math.inf
        shares = torch.softmax(row, 0)
        row[shares < params.min_p * shares.max()] = -math.inf
    return torch.softmax(rows, dim=1)


def chance(drawn: Drawn, expected_shares: Tensor) -> float:
    """The probability of counts at least as far from the expected ones as these."""
    expected = drawn.counts.sum(1, keepdim=True) * expected_shares
    possible = expected_shares > 0
    assert not drawn.counts[~possible].any(), "a token was drawn that the filters exclude"
    assert float(expected[possible].min()) >= LEAST_EXPECTED
    statistic = ((drawn.counts - expected)[possible].square() / expected[possible]).sum()
    freedom = torch.tensor(float(possible.sum()) - VOCAB, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def sampler_maker(name: str) -> MakeSampler:
    if name == "reference":
        return Sampler
    kernel = NativeSampling(ctypes.CDLL(str(compiled(NATIVE_PATH))), VOCAB)
    return partial(NativeSampler, kernel=kernel)


@pytest.mark.parametrize(("sampler", "drafts", "name"), CASES)
def test_draws_follow_the_targets_distribution(sampler: str, drafts: str, name: str) -> None:
    first = 1000 * (1 + list(DRAFTS).index(drafts))  # other seeds for each drafter
    drawn = draw(sampler_maker(sampler), PARAMS[name], DRAFTS[drafts], first)
    assert drawn.counts.sum() == NUM_DRAWS
    assert chance(drawn, probabilities(PARAMS[name])) > LEAST_P
    assert (drawn.num_accepted > 0) == (drafts != "no drafts")


def test_another_distribution_would_be_noticed() -> None:
    drawn = draw(sampler_maker("native"), PARAMS["plain"], Draft.nothing, 0)
    warmer = probabilities(SamplingParams(temperature=1.2))
    assert chance(drawn, warmer) < LEAST_P / 1000


def test_the_draws_themselves_are_the_same_with_drafts_and_without() -> None:
    make = sampler_maker("native")
    plain = draw(make, PARAMS["plain"], Draft.nothing, 7)
    for propose in list(DRAFTS.values())[1:]:
        assert torch.equal(draw(make, PARAMS["plain"], propose, 7).counts, plain.counts)


def test_the_same_noise_makes_more_drafts_right_than_noise_of_its_own_would() -> None:
    # two independent draws are equal by the sum of products, however the last token fell
    target, other = torch.softmax(TARGET, 1), torch.softmax(OTHER, 1)
    at_most = float((target * other).sum(1).max())
    drawn = draw(sampler_maker("native"), PARAMS["plain"], Draft.with_the_same_noise, 3)
    # a round drafts twice; the rate of the first draft alone is higher still
    num_rounds = NUM_DRAWS - drawn.num_accepted
    assert drawn.num_accepted / (NUM_DRAFTS * num_rounds) > 1.5 * at_most
