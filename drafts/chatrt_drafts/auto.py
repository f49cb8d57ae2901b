"""The drafter of choice: n-gram where the text repeats itself, else another one.

Knows: two drafters. Does not know: how either drafts.
Invariant: both are told of everything, so either can take over at any step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt.drafter import Drafter, DraftRequest, TargetPass
    from chatrt.kvcache import KVCache
    from chatrt_drafts.ngram import NgramDrafter

# Tokens that must have occurred before, in a row; two recur by chance too often.
_LONG_MATCH = 3


class AutoDrafter:
    """`other` drafts, except where the last three tokens or more occurred before."""

    name = "auto"

    def __init__(self, ngram: NgramDrafter, other: Drafter) -> None:
        self._ngram = ngram
        self._other = other

    @property
    def kv(self) -> KVCache | None:
        """Keys and values of the other one."""
        return self._other.kv

    @property
    def paired(self) -> bool:
        """As the other one's."""
        return self._other.paired

    def source(self, session_id: int, token_ids: Sequence[int]) -> str:
        """The name of the one that would draft now."""
        if self._repeats(session_id, token_ids):
            return self._ngram.name
        return self._other.source(session_id, token_ids)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """One proposal for each request, by whoever is in charge of it."""
        repeats = [
            bool(r.max_tokens) and self._repeats(r.session_id, r.token_ids) for r in requests
        ]
        others = [r for r, repeated in zip(requests, repeats, strict=True) if not repeated]
        by_ngram = [r for r, repeated in zip(requests, repeats, strict=True) if repeated]
        from_other = iter(self._other.propose(others) if others else [])
        from_ngram = iter(self._ngram.propose(by_ngram) if by_ngram else [])
        return [next(from_ngram if repeated else from_other) for repeated in repeats]

    def observe(self, target_pass: TargetPass) -> Tensor | None:
        """The target is about to compute these rows."""
        self._ngram.observe(target_pass)
        return self._other.observe(target_pass)

    def commit(self, session_id: int, num_computed: int) -> None:
        """Positions `[0, num_computed)` of the session hold KV that counts."""
        self._other.commit(session_id, num_computed)
        self._ngram.commit(session_id, num_computed)

    def close(self, session_id: int) -> None:
        """The session ended."""
        self._other.close(session_id)
        self._ngram.close(session_id)

    def _repeats(self, session_id: int, token_ids: Sequence[int]) -> bool:
        match = self._ngram.find(session_id, token_ids)
        return match is not None and match.length >= _LONG_MATCH
