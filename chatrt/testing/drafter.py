"""A drafter that says what a test tells it to, and notes what the engine told it.

Knows: the drafter protocol, whole sequences that it may look up. Does not know: models, logits.
Invariant: it asserts what the protocol promises a drafter: pages that reach far enough, and no word
of a session after its end.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from chatrt.drafter import DraftRequest, TargetPass

NUM_BYTES = 256


class ScriptedDrafter:
    """Proposes the known continuation of a session, right or wrong as scripted.

    Args:
        sequences: Whole sequences; one that begins with a session's ids is its continuation. More
            may be added to `sequences` later.
        num_right: How many tokens of each proposal are right, one number after the other, over
            again when they run out; the rest of the proposal is wrong.
        num_extra: Tokens that each proposal is too long.
        page_size: Of the engine, to check page tables by.

    `committed` holds the computed length told last for each session, `closed` those that ended.
    """

    name = "scripted"
    kv = None
    paired = False

    def __init__(
        self,
        sequences: Iterable[Sequence[int]] = (),
        *,
        num_right: Sequence[int] = (64,),
        num_extra: int = 0,
        page_size: int = 16,
    ) -> None:
        self.sequences = [list(sequence) for sequence in sequences]
        self.committed: dict[int, int] = {}
        self.closed: set[int] = set()
        self._num_right = itertools.cycle(num_right)
        self._num_extra = num_extra
        self._page_size = page_size

    def source(self, session_id: int, token_ids: Sequence[int]) -> str:
        """Its own name."""
        return self.name

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """One proposal for each request that may have one, `num_extra` tokens too long."""
        return [self._propose(r) if r.max_tokens else [] for r in requests]

    def observe(self, target_pass: TargetPass) -> None:
        """Passes of the target must be of sessions that have not ended."""
        assert not self.closed.intersection(target_pass.session_ids)

    def commit(self, session_id: int, num_computed: int) -> None:
        """Note the length."""
        assert session_id not in self.closed, f"session {session_id} has ended"
        self.committed[session_id] = num_computed

    def close(self, session_id: int) -> None:
        """Note the end."""
        self.closed.add(session_id)
        self.committed.pop(session_id, None)

    def _propose(self, request: DraftRequest) -> list[int]:
        assert request.session_id not in self.closed, f"session {request.session_id} has ended"
        length = len(request.token_ids)
        assert len(request.page_ids) * self._page_size >= length + request.max_tokens
        known = self._continuation(list(request.token_ids))
        num_tokens = request.max_tokens + self._num_extra
        num_right = next(self._num_right)
        proposal = known[:num_right]
        # Wrong wherever something is known; without it any token serves.
        wrong = [(token_id + 1) % NUM_BYTES for token_id in known[num_right:num_tokens]]
        proposal += wrong or [length % NUM_BYTES]
        return (proposal + [0] * num_tokens)[:num_tokens]

    def _continuation(self, token_ids: list[int]) -> list[int]:
        length = len(token_ids)
        found = (s[length:] for s in self.sequences if len(s) > length and s[:length] == token_ids)
        return next(found, [])
