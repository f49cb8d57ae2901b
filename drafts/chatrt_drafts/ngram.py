"""The n-gram drafter: continue as the conversation continued the last time these tokens occurred.

Knows: a session's own token ids. Does not know: models, pages, logits.
Invariant: every n-gram that ends before the last token is indexed once, by its latest occurrence.
Cost: O(longest n-gram) per token and per proposal; nothing is rescanned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt.drafter import DraftRequest


@dataclass(slots=True)
class _Index:
    """Where each n-gram last ended: the position of the token that followed it."""

    follows: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0


class NgramDrafter:
    """Looks up the longest suffix of `max_ngram` down to `min_ngram` tokens."""

    name = "ngram"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2) -> None:
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._indexes: dict[int, _Index] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """One proposal for each request; empty where no suffix occurred before."""
        return [self._propose(request) for request in requests]

    def observe(self, features: Tensor, slots: Tensor) -> None:
        """Hidden states are not used."""

    def commit(self, session_id: int, num_tokens: int) -> None:
        """Forget the index when the session was rewound behind what it covers."""
        index = self._indexes.get(session_id)
        if index is not None and num_tokens < index.num_indexed:
            del self._indexes[session_id]

    def close(self, session_id: int) -> None:
        """Forget the session."""
        self._indexes.pop(session_id, None)

    def _propose(self, request: DraftRequest) -> list[int]:
        tokens = request.token_ids
        if not request.max_tokens:
            return []
        follows = self._extend(request.session_id, tokens).follows
        for length in range(min(self._max_ngram, len(tokens)), self._min_ngram - 1, -1):
            position = follows.get(tuple(tokens[-length:]))
            if position is not None:
                return list(tokens[position : position + request.max_tokens])
        return []

    def _extend(self, session_id: int, tokens: Sequence[int]) -> _Index:
        """Index the n-grams that are followed by a token that was not there before."""
        index = self._indexes.setdefault(session_id, _Index())
        for end in range(max(index.num_indexed, self._min_ngram), len(tokens)):
            for length in range(self._min_ngram, min(self._max_ngram, end) + 1):
                index.follows[tuple(tokens[end - length : end])] = end
        index.num_indexed = max(index.num_indexed, len(tokens))
        return index
