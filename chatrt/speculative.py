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


@dataclass(slots=True)
class SpeculationCounter:
    """Counts of one turn, from which its figures are made.

    `depths[k]` counts the passes that verified k drafts, `drafted_by` drafts by who made them.
    """

    emitted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    drafted_by: dict[str, int] = field(default_factory=dict)
    draft_ms: float = 0.0
    verify_ms: float = 0.0

    def add(
        self, *, num_drafts: int, num_accepted: int, num_emitted: int, source: str = ""
    ) -> None:
        """One target pass that verified, accepted and emitted so many tokens."""
        self.emitted += num_emitted
        self.accepted += num_accepted
        while len(self.depths) <= num_drafts:
            self.depths.append(0)
        self.depths[num_drafts] += 1
        while len(self.accepted_per_position) < num_drafts:
            self.accepted_per_position.append(0)
        for i in range(num_accepted):
            self.accepted_per_position[i] += 1
        if num_drafts:
            self.drafted_by[source] = self.drafted_by.get(source, 0) + num_drafts

    def add_times(self, *, draft_ms: float, verify_ms: float) -> None:
        """What a step took to draft and to verify, of all that were in it together."""
        self.draft_ms += draft_ms
        self.verify_ms += verify_ms

    def figures(self) -> SpeculationFigures:
        """The figures for the turn's report."""
        drafted = sum(self.drafted_by.values())
        by_drafts = sorted(self.drafted_by, key=self.drafted_by.__getitem__, reverse=True)
        return SpeculationFigures(
            drafter="+".join(by_drafts) if by_drafts else "none",
            steps=sum(self.depths),
            drafted=drafted,
            accepted=self.accepted,
            emitted=self.emitted,
            accepted_per_position=tuple(self.accepted_per_position),
            depths=tuple(self.depths),
            draft_ms=self.draft_ms,
            verify_ms=self.verify_ms,
        )
