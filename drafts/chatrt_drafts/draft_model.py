"""The draft-model drafter: a smaller model of the same vocabulary runs ahead of the target.

    # tokens       [0, right)       [right, length)          [length, length + k - 1)
    # their rows   lie in the draft's pages                  written by the chain of drafts;
    #              as computed      fed before the drafts    right where a draft is accepted

Knows: a decoder, its pages, notes of what they hold, the sampler of a turn. Does not know: where
pages come from, whether a draft is kept.
Invariant: a row of the draft's pages is read only where it was computed from exactly the tokens of
the session that reads it. The last draft of a chain is not fed, so behind a full acceptance two
tokens are fed; behind a reused prefix that the draft does not know, more, and meanwhile none is
drafted.
Cost: one pass of the draft model for each draft of the longest chain, of all sessions together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatrt.batch import NO_SAMPLES, BatchRows
from chatrt.kvcache import KVCache
from chatrt_drafts.page_notes import PageNotes
from chatrt_kernels.ops import KVLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from chatrt.batch import BatchBuilder
    from chatrt.drafter import DraftRequest, TargetPass
    from chatrt.kvcache import PageContents
    from chatrt.models.decoder import Decoder
    from chatrt.session import PageCopy
    from chatrt_drafts.page_notes import PageNote

# What is fed behind every verified pass: the target's own token, and the last draft if it was kept.
_NUM_REGULAR_ROWS = 2


class NotedCache(KVCache):
    """A KV cache that keeps notes of what its pages were computed from, through copies too."""

    __slots__ = ("notes",)

    def __init__(
        self, data: Tensor, scales: Tensor | None = None, *, layout: KVLayout = KVLayout.ROWS
    ) -> None:
        super().__init__(data, scales, layout=layout)
        self.notes = PageNotes(self.num_pages, self.page_size)

    def copy_rows(self, copies: Iterable[PageCopy]) -> None:
        """Do the copies in order; the notes of their sources go with them."""
        copies = tuple(copies)
        super().copy_rows(copies)
        for copy in copies:
            self.notes.copy(copy.src, copy.dst, copy.num_rows)

    def scatter(self, page_ids: Sequence[int], contents: PageContents) -> None:
        """Write pages whose tokens are not known here."""
        self.notes.forget(page_ids)
        super().scatter(page_ids, contents)


@dataclass(slots=True)
class _Chain:
    """What is fed next for one session: `token_ids` from position `start` on.

    `drafts` grows with every pass that ends at the session's last token or draft; a session that
    is still behind has `drafting` False. `probability` is that of all its drafts together.
    """

    request: DraftRequest
    start: int
    token_ids: Sequence[int]
    drafting: bool
    drafts: list[int]
    probability: float = 1.0


class ModelDrafter:
    """Drafts with a decoder of its own, over pages of its own under the target's page ids.

    Args:
        decoder: The draft model.
        kv: As many pages of as many slots as the target's.
        batches: For the draft's passes; its rows and sequences bound what one pass serves.
        vocab_size: Ids from it on are never proposed: those that only one of the two models has.
        max_context: Tokens that the draft model can look back on; longer sessions get no drafts.
        max_catch_up_rows: The most rows of one call that sessions may take whose KV is short by
            more than the two that every session needs; those that it does not bring up to date
            get no drafts yet.
    """

    name = "model"
    paired = False

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        batches: BatchBuilder,
        *,
        vocab_size: int,
        max_context: int,
        max_catch_up_rows: int = 64,
    ) -> None:
        assert batches.max_rows <= decoder.max_rows, (batches.max_rows, decoder.max_rows)
        assert vocab_size <= decoder.config.vocab_size, (vocab_size, decoder.config.vocab_size)
        self._decoder = decoder
        self._kv = NotedCache(kv.data, kv.scales, layout=kv.layout)
        self._kv.moves = kv.moves
        self._batches = batches
        self._ids = torch.arange(vocab_size)
        self._max_context = max_context
        self._max_catch_up_rows = max_catch_up_rows
        self._seen: dict[int, list[PageNote]] = {}

    @property
    def kv(self) -> KVCache:
        """The draft model's pages; who copies pages in it keeps what is known of them."""
        return self._kv

    def source(self, session_id: int, token_ids: Sequence[int]) -> str:
        """The drafter's own name."""
        return self.name

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """One proposal for each request; none where the session is still behind.

        Pending tokens of all sessions are fed in one pass, which gives the first drafts; each
        further pass feeds the last draft of every chain that goes on.
        """
        proposals: list[list[int]] = [[] for _ in requests]
        chains = self._first_chains(requests, proposals)
        while chains:
            rows = self._forward(chains)
            chains = [
                chain
                for chain, logits in zip(chains, rows, strict=True)
                if chain.drafting and self._extend(chain, logits[0])
            ]
        return proposals

    def num_right(self, request: DraftRequest) -> int:
        """How many of the session's first positions need not be fed; less than its tokens.

        After a round with a of k drafts accepted: all tokens but the last, or but the last two
        where a = k.
        """
        seen = self._seen.setdefault(request.session_id, [])
        length = len(request.token_ids)
        num_pages = -(-length // self._kv.page_size)
        right = self._kv.notes.num_right(request.page_ids[:num_pages], request.token_ids, seen)
        return min(right, length - 1)

    def observe(self, target_pass: TargetPass) -> None:
        """What the target computes anew may be other tokens than were seen there."""
        for session_id, rows in zip(target_pass.session_ids, target_pass.rows, strict=True):
            self._unsee(session_id, rows.start)

    def commit(self, session_id: int, num_computed: int) -> None:
        """Rejected drafts and cut tokens were behind `num_computed`."""
        self._unsee(session_id, num_computed)

    def close(self, session_id: int) -> None:
        """Forget the session; what its pages hold stays known for whoever shares them."""
        self._seen.pop(session_id, None)

    def _unsee(self, session_id: int, num_tokens: int) -> None:
        seen = self._seen.get(session_id)
        if seen:
            del seen[num_tokens // self._kv.page_size :]

    def _first_chains(
        self, requests: Sequence[DraftRequest], proposals: Sequence[list[int]]
    ) -> list[_Chain]:
        """What the first pass feeds, within its rows and those that may be caught up on."""
        chains: list[_Chain] = []
        rows_left, late_rows_left = self._batches.max_rows, self._max_catch_up_rows
        for request, drafts in zip(requests, proposals, strict=True):
            if not self._num_drafts(request) or len(chains) == self._batches.max_sequences:
                continue
            start, length = self.num_right(request), len(request.token_ids)
            late = length - start > _NUM_REGULAR_ROWS
            num_rows = min(length - start, rows_left, late_rows_left if late else rows_left)
            token_ids = request.token_ids[start : start + num_rows]
            if not num_rows or max(token_ids) >= self._decoder.config.vocab_size:
                continue
            rows_left -= num_rows
            late_rows_left -= num_rows if late else 0
            drafting = start + num_rows == length
            chains.append(_Chain(request, start, token_ids, drafting, drafts))
        return chains

    def _num_drafts(self, request: DraftRequest) -> int:
        """As many as may be proposed; the last one is not fed and needs no position."""
        return min(request.max_tokens, max(self._max_context - len(request.token_ids) + 1, 0))

    def _forward(self, chains: Sequence[_Chain]) -> list[Tensor]:
        """One pass over what the chains feed; `[1, vocab]` logits of those that draft."""
        notes, rows = self._kv.notes, []
        for chain in chains:
            end = chain.start + len(chain.token_ids)
            page_ids = chain.request.page_ids[: -(-end // self._kv.page_size)]
            last = len(chain.token_ids) - 1
            wanted = range(last, last + 1) if chain.drafting else NO_SAMPLES
            rows.append(BatchRows(chain.token_ids, chain.start, page_ids, wanted))
            notes.clear(page_ids, chain.start, end)
        batch = self._batches.build(rows)
        logits = self._decoder.forward(batch, self._kv).values.cpu()  # where the sampler works
        for row in rows:
            notes.write(row.page_ids, row.start, row.token_ids)
        return [logits[r.start : r.stop] for r in batch.logit_ranges]

    def _extend(self, chain: _Chain, logits: Tensor) -> bool:
        """Draft one more token from `[vocab]` logits; whether the chain goes on behind it."""
        request, drafts = chain.request, chain.drafts
        choice = request.sampler.choose_among(
            logits[: len(self._ids)],
            self._ids,
            position=len(request.token_ids) + len(drafts),
            drafts_before=drafts,
        )
        chain.start += len(chain.token_ids)
        chain.token_ids = [choice.token_id]
        drafts.append(choice.token_id)
        chain.probability *= choice.probability
        return len(drafts) < self._num_drafts(request) and chain.probability >= request.floor
