"""The protocol that every drafter implements. The engine knows none of them by name.

Knows: token ids, positions, session ids. Does not know: how a draft is made, or whether it is kept.
Invariant: a draft never changes the text (sample-match, CORRECTNESS 1.1), only how fast it comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One decoding session that may be drafted for in this step.

    `token_ids` are all committed tokens, the last one not yet computed by the target; `page_ids` is
    its page table, already long enough for `max_tokens` further positions.
    """

    session_id: int
    token_ids: Sequence[int]
    page_ids: Sequence[int]
    max_tokens: int


class Drafter(Protocol):
    """Proposes up to `max_tokens` tokens for each session; an empty proposal is always allowed."""

    name: str
    feature_layers: tuple[int, ...]  # target layers whose hidden states `observe` wants; often none

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """One proposal for each request, each at most `max_tokens` long."""
        ...

    def observe(self, features: torch.Tensor, slots: torch.Tensor) -> None:
        """Hidden states `[rows, len(feature_layers), hidden]` of a target pass, with KV slots."""
        ...

    def commit(self, session_id: int, num_tokens: int) -> None:
        """The session now has `num_tokens` committed tokens: trim what was drafted beyond them."""
        ...

    def close(self, session_id: int) -> None:
        """The session ended; forget what belongs to it."""
        ...
