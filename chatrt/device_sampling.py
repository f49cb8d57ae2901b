"""The sampling pipeline on a GPU: what goes to the host is one token a row.

Knows: a turn's parameters, logits on the device, the kernels.
Does not know: pages, events, who drafted.
Invariant: it chooses what `chatrt.sampling.Sampler` chooses of the same logits, except where sums
in another order move the edge of a nucleus. What the device cannot decide is decided there.
Cost: three small kernels and one copy of two numbers a row; a few more where filters are set. Not
timed on a GPU yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chatrt.params import SamplingParams
from chatrt.sampling import Sampler
from chatrt_kernels.triton.sample import Rules, choose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt.sampling import DraftChoice
    from chatrt.turn import TokenLogprob


# One request for each way in which kernels are compiled: noise or none, filters, bias, penalties.
_WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=40, top_p=0.9, min_p=0.05),
    SamplingParams(logit_bias={0: 1.0}),
    SamplingParams(frequency_penalty=0.5),
    SamplingParams(logit_bias={0: 1.0}, frequency_penalty=0.5),
)


def warm_up_sampling(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Choose in every way that there is, so that nothing is compiled for the first who asks."""
    logits = torch.zeros(2, vocab_size, dtype=dtype, device=device)
    for params in _WAYS:
        sampler = DeviceSampler(
            params, seed=0, vocab_size=vocab_size, prompt_ids=(0,), device=device
        )
        sampler.choose_rows(logits, [0], position=0)


class DeviceSampler:
    """`RowSampler` over the device's kernels.

    Args:
        params: What the turn asked for.
        seed: 64-bit seed of the noise; ignored when greedy.
        vocab_size: Ids at or above it (padding rows of the head) are never chosen.
        prompt_ids: Tokens before the answer; the repetition penalty counts them.
        device: Where logits lie.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        vocab_size: int,
        prompt_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        self.params = params
        self.seed = seed
        self._device = device
        self._host = Sampler(params, seed=seed, vocab_size=vocab_size, prompt_ids=prompt_ids)
        self._rules = self._made_rules(vocab_size, prompt_ids)

    def accept(self, token_ids: Sequence[int]) -> None:
        """Count emitted tokens for the penalties, each once."""
        self._host.accept(token_ids)
        if self._rules.counts is not None:
            ids = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
            ones = torch.ones_like(ids, dtype=torch.int32)
            self._rules.counts.index_add_(0, ids, ones)

    def choose_rows(self, logits: Tensor, drafts: Sequence[int], *, position: int) -> list[int]:
        """The target's own tokens, as `RowSampler` says."""
        proposed = torch.tensor(drafts, dtype=torch.int64, device=self._device)
        choice = choose(logits, proposed, self._rules, position=position)
        tokens, certain = torch.stack((choice.tokens, choice.certain)).tolist()
        own: list[int] = []
        for i in range(len(drafts) + 1):
            token = tokens[i]
            if not certain[i]:
                row, before = logits[i].cpu(), drafts[:i]
                token = self._host.sample(row, position=position + i, drafts_before=before)
            own.append(token)
            if i < len(drafts) and token != drafts[i]:
                break
        return own

    def choose_among(
        self,
        logits: Tensor,
        token_ids: Tensor,
        *,
        position: int,
        drafts_before: Sequence[int] = (),
    ) -> DraftChoice:
        """A draft among some tokens, as `RowSampler` says."""
        return self._host.choose_among(
            logits.cpu(), token_ids.cpu(), position=position, drafts_before=drafts_before
        )

    def logprobs(self, logits: Tensor, token_id: int) -> TokenLogprob:
        """Log-probabilities of one row under the model, before bias, penalties and temperature."""
        return self._host.logprobs(logits, token_id)

    def _made_rules(self, vocab_size: int, prompt_ids: Sequence[int]) -> Rules:
        params = self.params
        penalised = (
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )
        bias = counts = in_prompt = None
        if params.logit_bias:
            known = {t: b for t, b in params.logit_bias.items() if 0 <= t < vocab_size}
            bias = torch.zeros(vocab_size)
            bias[list(known)] = torch.tensor(list(known.values()), dtype=torch.float32)
            bias = bias.to(self._device)
        if penalised:
            counts = torch.zeros(vocab_size, dtype=torch.int32, device=self._device)
            in_prompt = torch.zeros(vocab_size, dtype=torch.int8)
            in_prompt[list(prompt_ids)] = 1
            in_prompt = in_prompt.to(self._device)
        return Rules(
            seed=self.seed,
            vocab_size=vocab_size,
            temperature=0.0 if params.greedy else params.temperature,
            top_k=params.top_k or 0,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bias=bias,
            counts=counts,
            in_prompt=in_prompt,
        )
