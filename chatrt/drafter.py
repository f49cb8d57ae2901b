"""The protocol that every drafter implements. The engine knows none of them by name.

    # a step      plan → propose → observe → one pass of the target → verify → commit
    # told        propose: all that is committed; observe: the rows of the pass, with their drafts;
    #             commit: how many positions of a session hold KV that counts, and the same once
    #             more when its turn has ended, in front of whoever may read or take its pages

Knows: token ids, positions, session ids. Does not know: how a draft is made, or whether it
is kept.
Invariant: a draft never changes the text (sample-match, CORRECTNESS 1.1), only how fast it comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt.batch import BatchRows
    from chatrt.kvcache import KVCache
    from chatrt.sampling import RowSampler


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One decoding session that may be drafted for in this step.

    `token_ids` are all committed tokens, the last one not yet computed by the target; `page_ids` is
    its page table, already long enough for `max_tokens` further positions. `sampler` chooses among
    a drafter's logits as it will choose among the target's: same parameters, same noise. A chain
    of drafts whose probability has fallen below `floor` is not worth going on with.
    """

    session_id: int
    token_ids: Sequence[int]
    page_ids: Sequence[int]
    max_tokens: int
    sampler: RowSampler
    floor: float = 0.0


@dataclass(frozen=True, slots=True)
class TargetPass:
    """A pass of the target: `rows[s]` are those of session `session_ids[s]`, drafts included.

    It is number `part` of the `num_parts` passes of a step; no session has rows in two of them, and
    nothing is committed before the last of them has run.
    """

    session_ids: Sequence[int]
    rows: Sequence[BatchRows]
    part: int = 0
    num_parts: int = 1


class Drafter(Protocol):
    """Proposes up to `max_tokens` tokens for each session; an empty proposal is always allowed.

    `kv` holds keys and values of its own, indexed by the same page ids as the target's: whoever
    copies pages copies them there too. None for a drafter without. `paired` says that its rows of a
    full page lie there whenever the target's do: then both are kept and restored together.
    """

    name: str

    @property
    def paired(self) -> bool:
        """Whether `kv` is complete wherever the target's full pages are."""
        ...

    @property
    def kv(self) -> KVCache | None:
        """Its own paged keys and values, if it has any."""
        ...

    def source(self, session_id: int, token_ids: Sequence[int]) -> str:
        """Who would draft for the session now: its own name, or that of a drafter inside it."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """One proposal for each request, each at most `max_tokens` long."""
        ...

    def observe(self, target_pass: TargetPass) -> Tensor | None:
        """The target is about to compute these rows.

        Returns what the decoder's follower reads as the pass's `feature_rows`; None without one, or
        where the pass shall only be shown to it.
        """
        ...

    def commit(self, session_id: int, num_computed: int) -> None:
        """Positions `[0, num_computed)` of the session hold KV that counts, none behind them.

        Told behind each pass of the session, and again when its turn ends: rows of its own that a
        drafter has put off must then lie in `kv`. Those of a page that is full by `num_computed`
        must at once: others may share it.
        """
        ...

    def close(self, session_id: int) -> None:
        """The session ended; forget what belongs to it."""
        ...
