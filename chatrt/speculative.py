"""Speculation: verify drafted tokens against the target's own, row by row.

Knows: logits rows, drafts, the sampler. Does not know: who drafted, pages, events.
Invariant: the emitted tokens are those of plain decoding, whatever was drafted (sample-match).
Source: speculative decoding, arXiv 2211.17192 and 2302.01318; sample-match, arXiv 2408.07978.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chatrt.turn import SpeculationFigures, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt.drafter import Drafter, DraftRequest
    from chatrt.sampling import RowSampler


@dataclass(frozen=True, slots=True)
class Verified:
    """Tokens emitted by one target pass: `num_accepted` drafts, then the target's own next one."""

    token_ids: list[int]
    num_accepted: int


def verify(
    sampler: RowSampler, logits: Tensor, drafts: Sequence[int], *, position: int
) -> Verified:
    """Accept drafts while they equal the target's own tokens.

    Args:
        sampler: The turn's pipeline; its history is not changed here.
        logits: `[len(drafts) + 1, vocab]`; row i follows the history and `drafts[:i]`.
        drafts: What was proposed, possibly nothing.
        position: Absolute position of the first token that is chosen.
    """
    own = sampler.choose_rows(logits, drafts, position=position)
    return Verified(token_ids=own, num_accepted=len(own) - 1)


def row_logprobs(
    sampler: RowSampler, logits: Tensor, token_ids: Sequence[int]
) -> list[TokenLogprob]:
    """One entry for each emitted token, from the row that emitted it; empty unless asked for."""
    if sampler.params.top_logprobs is None:
        return []
    return [sampler.logprobs(logits[i], token_id) for i, token_id in enumerate(token_ids)]


def propose(drafter: Drafter | None, requests: Sequence[DraftRequest]) -> list[list[int]]:
    """Drafts for each request, never longer than it allows; nothing without a drafter."""
    if drafter is None or not any(request.max_tokens for request in requests):
        return [[] for _ in requests]
    proposals = drafter.propose(requests)
    return [p[: r.max_tokens] for p, r in zip(proposals, requests, strict=True)]


@dataclass(slots=True)
class SpeculationCounter:
    """Counts of one turn, from which its figures are made."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, *, num_drafts: int, num_accepted: int, num_emitted: int) -> None:
        """One target pass that drafted, accepted and emitted so many tokens."""
        self.steps += 1
        self.drafted += num_drafts
        self.accepted += num_accepted
        self.emitted += num_emitted
        while len(self.accepted_per_position) < num_drafts:
            self.accepted_per_position.append(0)
        for i in range(num_accepted):
            self.accepted_per_position[i] += 1

    def figures(self, drafter: Drafter | None) -> SpeculationFigures:
        """The figures for the turn's report."""
        return SpeculationFigures(
            drafter=drafter.name if drafter else "none",
            steps=self.steps,
            drafted=self.drafted,
            accepted=self.accepted,
            emitted=self.emitted,
            accepted_per_position=tuple(self.accepted_per_position),
        )
