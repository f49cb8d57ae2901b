"""Choosing the next token: one pipeline for plain, verify and bonus rows.

bias → penalties → temperature → top-k → top-p → min-p → seeded Gumbel choice; temperature 0 takes
the argmax after the penalties instead.

Knows: logits, token ids, absolute positions. Does not know: sessions, drafts' origin, text.
Invariant: a row's choice depends on its logits, the parameters, the seed, its position and the
tokens before it, on nothing else; no generator carries state, so cancel and rollback need no undo.
Source: sample-match coupling with shared Gumbel noise, arXiv 2408.07978.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from chatrt.turn import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.params import SamplingParams

# Noise comes from 32-bit uniforms in the open interval, so Gumbel noise is bounded by this.
MAX_GUMBEL = -math.log(-math.log1p(-(2.0**-33)))
_NUM_FIRST_CANDIDATES = 64
# Divided by less, float32 scores overflow; the choice is greedy long before.
_LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Scores of the tokens that survived the filters; `token_ids` None means all of them."""

    scores: Tensor
    token_ids: Tensor | None


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A drafted token, and how probable the draft's own logits made it among those it may draft."""

    token_id: int
    probability: float


class RowSampler(Protocol):
    """What a turn needs of its sampler, whatever computes it."""

    @property
    def params(self) -> SamplingParams:
        """What the turn asked for."""
        ...

    @property
    def seed(self) -> int:
        """64-bit seed of the noise."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Count emitted tokens for the penalties, each once."""
        ...

    def choose_rows(self, logits: Tensor, drafts: Sequence[int], *, position: int) -> list[int]:
        """The target's own tokens, up to and including the first that differs from its draft.

        Args:
            logits: `[len(drafts) + 1, vocab]`, any float dtype; left unchanged. Row i follows the
                history and `drafts[:i]`.
            drafts: What was proposed, possibly nothing; penalties count them in the rows behind.
            position: Absolute position of the first token.
        """
        ...

    def choose_among(
        self,
        logits: Tensor,
        token_ids: Tensor,
        *,
        position: int,
        drafts_before: Sequence[int] = (),
    ) -> DraftChoice:
        """What a full row would give in which every other token had minus infinity.

        Noise, penalties and bias are those of the real token, so a draft proposes what the target
        would choose if it had the draft's logits.

        Args:
            logits: Float32 `[n]`, at least one of them finite; left unchanged.
            token_ids: Integers `[n]`, distinct and below the vocabulary's size: which tokens the
                logits are of. Pass the same tensor again and never change it: what is worked out
                from it is kept.
            position: Absolute position that the chosen token will have.
            drafts_before: Drafted tokens between the history and this one; penalties count them.

        The probability is the softmax of the logits as they are, at temperature 1.
        """
        ...

    def logprobs(self, logits: Tensor, token_id: int) -> TokenLogprob:
        """Log-probabilities of one row under the model, before bias, penalties and temperature."""
        ...


class MakeSampler(Protocol):
    """Makes the sampler of one turn; `Sampler` is one."""

    def __call__(
        self, params: SamplingParams, *, seed: int, vocab_size: int, prompt_ids: Sequence[int]
    ) -> RowSampler:
        """A sampler that has emitted nothing yet."""
        ...


class Sampler:
    """The pipeline in PyTorch with the parameters and the history of one turn.

    Args:
        params: What the turn asked for.
        seed: 64-bit seed of the noise; ignored when greedy.
        vocab_size: Ids at or above it (padding rows of the head) are never chosen.
        prompt_ids: Tokens before the answer; the repetition penalty counts them.
    """

    def __init__(
        self, params: SamplingParams, *, seed: int, vocab_size: int, prompt_ids: Sequence[int]
    ) -> None:
        self.params = params
        self.seed = seed
        self.vocab_size = vocab_size
        self._counts: Tensor | None = None
        self._in_prompt: Tensor | None = None
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            self._counts = torch.zeros(vocab_size)
            self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
            if prompt_ids:
                self._in_prompt[torch.tensor(prompt_ids)] = True
        bias = {t: b for t, b in params.logit_bias.items() if 0 <= t < vocab_size}
        self._bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self._bias_values = torch.tensor(list(bias.values()), dtype=torch.float32)

    @property
    def plain_greedy(self) -> bool:
        """Whether the choice is the argmax of the raw logits."""
        return self.params.greedy and self._counts is None and not len(self._bias_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Count emitted tokens for the penalties, each once."""
        if self._counts is not None:
            for token_id in token_ids:
                self._counts[token_id] += 1.0

    def choose_rows(self, logits: Tensor, drafts: Sequence[int], *, position: int) -> list[int]:
        """The target's own tokens, as `RowSampler` says."""
        greedy = sample_greedy(logits, self.vocab_size) if self.plain_greedy else None
        own: list[int] = []
        for i in range(len(drafts) + 1):
            if greedy is not None:
                own.append(greedy[i])
            else:
                before = drafts[:i]
                own.append(self.sample(logits[i], position=position + i, drafts_before=before))
            if i < len(drafts) and own[i] != drafts[i]:
                break
        return own

    def sample(self, logits: Tensor, *, position: int, drafts_before: Sequence[int] = ()) -> int:
        """The target's own token for one row.

        Args:
            logits: `[vocab]`, any float dtype; left unchanged.
            position: Absolute position that the chosen token will have.
            drafts_before: Drafted tokens between the history and this row; penalties count them.
        """
        row = logits[: self.vocab_size].float()
        if len(self._bias_ids):
            row = row.index_add(0, self._bias_ids, self._bias_values)
        if self._counts is not None:
            row = self._penalise(row, drafts_before)
        if self.params.greedy:
            return int(row.argmax())
        return self._choose(
            self._filter(row / max(self.params.temperature, _LEAST_TEMPERATURE)), position
        )

    def choose_among(
        self,
        logits: Tensor,
        token_ids: Tensor,
        *,
        position: int,
        drafts_before: Sequence[int] = (),
    ) -> DraftChoice:
        """A draft among some tokens, as `RowSampler` says."""
        ids = token_ids.to(torch.int64)
        row = torch.full((self.vocab_size,), -math.inf, device=logits.device)
        row[ids] = logits.float()
        chosen = self.sample(row, position=position, drafts_before=drafts_before)
        logprob = row[chosen] - torch.logsumexp(logits.float(), dim=0)
        return DraftChoice(chosen, math.exp(logprob))

    def logprobs(self, logits: Tensor, token_id: int) -> TokenLogprob:
        """Log-probabilities of one row under the model, before bias, penalties and temperature."""
        row = torch.log_softmax(logits[: self.vocab_size].float(), dim=-1)
        num_top = self.params.top_logprobs or 0
        top = torch.topk(row, num_top) if num_top else None
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else ()
        return TokenLogprob(token_id=token_id, logprob=float(row[token_id]), top=pairs)

    def _penalise(self, row: Tensor, drafts_before: Sequence[int]) -> Tensor:
        counts, in_prompt = self._counts, self._in_prompt
        assert counts is not None
        assert in_prompt is not None
        if drafts_before:
            drafts = torch.tensor(drafts_before)
            counts = counts.index_add(0, drafts, torch.ones(len(drafts_before)))
        emitted = counts > 0
        penalty = self.params.repetition_penalty
        if penalty != 1.0:
            changed = torch.where(row > 0, row / penalty, row * penalty)
            row = torch.where(in_prompt | emitted, changed, row)
        return (
            row
            - self.params.frequency_penalty * counts
            - self.params.presence_penalty * emitted.float()
        )

    def _filter(self, row: Tensor) -> _Candidates:
        """Top-k, then top-p over what is left, then min-p."""
        top_k = min(self.params.top_k, len(row)) if self.params.top_k else 0
        candidates = _Candidates(row, None)
        if top_k:
            top = torch.topk(row, top_k)
            candidates = _Candidates(top.values, top.indices)
        if self.params.top_p < 1.0:
            candidates = _nucleus(candidates, self.params.top_p)
        if self.params.min_p > 0.0:
            floor = candidates.scores.max() + math.log(self.params.min_p)
            candidates = _select(candidates, candidates.scores >= floor)
        return candidates

    def _choose(self, candidates: _Candidates, position: int) -> int:
        """argmax of score + Gumbel noise; candidates that no noise could lift are skipped."""
        scores = candidates.scores
        if len(scores) > _NUM_FIRST_CANDIDATES:
            first = _select(candidates, torch.topk(scores, _NUM_FIRST_CANDIDATES).indices)
            best = (first.scores + self._noise(first, position)).max()
            # Rounding of the float32 sum may not exclude a rival: leave a margin.
            candidates = _select(candidates, scores >= best - MAX_GUMBEL - 1e-3)
        noisy = candidates.scores.double() + self._noise(candidates, position)
        index = int(noisy.argmax())
        return index if candidates.token_ids is None else int(candidates.token_ids[index])

    def _noise(self, candidates: _Candidates, position: int) -> Tensor:
        ids = candidates.token_ids
        if ids is None:
            ids = torch.arange(len(candidates.scores), device=candidates.scores.device)
        return gumbel_noise(self.seed, position, ids)


def sample_greedy(logits: Tensor, vocab_size: int) -> list[int]:
    """The likeliest token of each row of `[rows, vocab]`."""
    tokens: list[int] = logits[:, :vocab_size].argmax(dim=-1).tolist()
    return tokens


def gumbel_noise(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64 `[n]`, a function of (seed, position, token id) alone.

    A counter-based generator: the SplitMix64 finaliser (Steele, Lea, Flood 2014) over a key made
    of seed and position, then over key plus token id; the upper 32 bits give a uniform in (0, 1).
    """
    key = _mix_int((seed + 0x9E3779B97F4A7C15 * (position + 1)) & _MASK)
    bits = _mix(token_ids.to(torch.int64) * _signed(0x9E3779B97F4A7C15) + _signed(key))
    uniform = ((bits >> 32) & 0xFFFFFFFF).double().add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()


_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix(x: Tensor) -> Tensor:
    """`_mix_int` on int64 tensors: wrapping products, logical shifts."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _select(candidates: _Candidates, index: Tensor) -> _Candidates:
    ids = candidates.token_ids
    if ids is None:
        ids = index.nonzero().squeeze(-1) if index.dtype == torch.bool else index
        return _Candidates(candidates.scores[ids], ids)
    return _Candidates(candidates.scores[index], ids[index])


def _nucleus(candidates: _Candidates, top_p: float) -> _Candidates:
    """The smallest set of likeliest tokens whose probability reaches `top_p`."""
    scores = candidates.scores
    total = torch.logsumexp(scores, dim=0)
    size = min(_NUM_FIRST_CANDIDATES, len(scores))
    while True:
        # Most nuclei are small: a full sort of the vocabulary is the last resort.
        top = torch.topk(scores, size)
        mass = torch.exp(top.values.double() - total.double()).cumsum(0)
        if size == len(scores) or float(mass[-1]) >= top_p:
            break
        size = min(size * 8, len(scores))
    kept = int((mass < top_p).sum()) + 1
    return _select(candidates, top.indices[:kept])
