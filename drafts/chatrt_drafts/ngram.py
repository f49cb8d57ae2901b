"""The n-gram drafter: continue as the conversation continued the last time these tokens occurred.

Knows: a session's own token ids. Does not know: models, pages, logits.
Invariant: every n-gram that ends before the last token is indexed once, by its latest occurrence.
Cost: O(longest n-gram) per token and per proposal; nothing is rescanned, and a long history is
indexed over several steps so that none of them is held up. An index takes about 0.4 kB for each
token; those of the sessions that were drafted for last are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.drafter import DraftRequest, TargetPass

_MAX_TOKENS_PER_STEP = 512  # about half a millisecond


@dataclass(slots=True)
class _Index:
    """Where each n-gram last ended: the position of the token that followed it.

    `match` is what was found for the first `num_asked` tokens: a step asks more than once.
    """

    follows: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0
    num_asked: int = -1
    match: Match | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """The last `length` tokens occurred before; `position` is that of the token behind them."""

    length: int
    position: int


class NgramDrafter:
    """Looks up the longest suffix of `max_ngram` down to `min_ngram` tokens.

    `max_sessions` indexes are kept, at least as many as sessions decode at once: one that comes
    back later is indexed anew.
    """

    name = "ngram"
    kv = None
    paired = False

    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2, max_sessions: int = 128) -> None:
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._max_sessions = max_sessions
        self._indexes: OrderedDict[int, _Index] = OrderedDict()

    def source(self, session_id: int, token_ids: Sequence[int]) -> str:
        """Its own name."""
        return self.name

    def find(self, session_id: int, token_ids: Sequence[int]) -> Match | None:
        """The longest suffix that occurred before; indexes what is new."""
        index = self._index_of(session_id)
        if index.num_asked != len(token_ids):
            self._extend(index, token_ids)
            index.num_asked, index.match = len(token_ids), self._longest(index, token_ids)
        return index.match

    def _longest(self, index: _Index, token_ids: Sequence[int]) -> Match | None:
        if index.num_indexed < len(token_ids):
            return None
        longest = min(self._max_ngram, len(token_ids))
        for length in range(longest, self._min_ngram - 1, -1):
            position = index.follows.get(tuple(token_ids[-length:]))
            if position is not None:
                return Match(length, position)
        return None

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """One proposal for each request; empty where no suffix occurred before."""
        return [self._propose(request) for request in requests]

    def observe(self, target_pass: TargetPass) -> None:
        """Passes of the target are not looked at."""

    def commit(self, session_id: int, num_computed: int) -> None:
        """Forget the index when the session was rewound behind what it covers."""
        index = self._indexes.get(session_id)
        if index is not None and num_computed < index.num_indexed:
            del self._indexes[session_id]

    def close(self, session_id: int) -> None:
        """Forget the session."""
        self._indexes.pop(session_id, None)

    def _index_of(self, session_id: int) -> _Index:
        """The session's index, new if need be, at the cost of the one not used for longest."""
        index = self._indexes.get(session_id)
        if index is None:
            index = self._indexes[session_id] = _Index()
            if len(self._indexes) > self._max_sessions:
                self._indexes.popitem(last=False)
        else:
            self._indexes.move_to_end(session_id)
        return index

    def _propose(self, request: DraftRequest) -> list[int]:
        if not request.max_tokens:
            return []
        match = self.find(request.session_id, request.token_ids)
        if match is None:
            return []
        return list(request.token_ids[match.position : match.position + request.max_tokens])

    def _extend(self, index: _Index, tokens: Sequence[int]) -> None:
        """Index the n-grams that are followed by a token that was not there before."""
        last = min(len(tokens), index.num_indexed + _MAX_TOKENS_PER_STEP)
        for end in range(max(index.num_indexed, self._min_ngram), last):
            for length in range(self._min_ngram, min(self._max_ngram, end) + 1):
                index.follows[tuple(tokens[end - length : end])] = end
        index.num_indexed = max(index.num_indexed, last)
