"""The trained head as a drafter: one small layer on the target's hidden states.

    # positions       [0, n)              n                    n + 1 …
    # head's rows     written behind the  drafted from the     drafted from the head's own
    #                 target's passes     feature of n - 1     state, one after the other
    # behind a verify rewritten from the target's own features, as far as rows were computed
    # nobody drafts   the rows wait, up to the end of their page, for a draft, a pass of more rows,
    #                 or the end of the turn

Knows: sessions' tokens and pages, which feature belongs to which position. Does not know: the
network's ops, logits of the target, how deep to draft.
Invariant: the head's rows `[0, num_computed)` of a session are written before anyone else can read
or take their page: full pages when the target's are, the last page when the turn ends. So they are
shared, copied and evicted with the same pages.
Cost: one row of `bases` for each session that was seen last; for a token of a session that does not
draft a copy of its features.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from chatrt.batch import BatchRows
from chatrt_drafts.deferred_rows import RowCopies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt.batch import BatchBuilder
    from chatrt.drafter import DraftRequest, TargetPass
    from chatrt.kvcache import KVCache
    from chatrt_drafts.head_network import HeadNetwork

_NOTHING = 0  # the row of `bases` that stays zero


@dataclass(slots=True)
class _Kept:
    """What a session's next row starts from: row `slot` of `bases`, made at `position`."""

    slot: int
    position: int


# Not frozen: that takes three times as long to make, and one is made for each session of each step.
@dataclass(slots=True)
class _Seen:
    """A session's rows in the last step, from row `first_row` of their pass on.

    `written` if the pass wrote the head's too; what they give to their next is then in `bases` from
    row `first_base` on.
    """

    first_row: int
    first_base: int
    rows: BatchRows
    written: bool


@dataclass(slots=True)
class _Waiting:
    """Rows of a session from position `start` on, within one page, that are not written yet.

    Their features lie from `first_place` on. `page_ids` is the session's page table, which grows.
    """

    first_place: int
    start: int
    page_ids: Sequence[int]
    token_ids: list[int]


class Chains(Protocol):
    """How chains of drafts are run: all that a proposal does once it is known where rows start."""

    def run(self, requests: Sequence[DraftRequest], base_rows: Sequence[int]) -> list[list[int]]:
        """The drafts of each request.

        `base_rows[i]` is the row of the network's `bases` that the first row of request i starts
        from. A chain has one more draft while it has fewer than `max_tokens` and its probability is
        not below `floor`.
        """
        ...


class HeadDrafter:
    """Drafts with a `HeadNetwork`.

    Args:
        network: The head over its own pages.
        kv: Those pages, of one layer, with the same ids as the target's.
        chains: What runs it for drafts.
    """

    name = "head"
    paired = True

    def __init__(self, network: HeadNetwork, kv: KVCache, chains: Chains) -> None:
        self._network = network
        self._kv = kv
        self._chains = chains
        self._base_copies = RowCopies(network.bases, network.bases)
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._free_slots = list(range(network.num_slots - 1, _NOTHING, -1))
        self._seen: dict[int, _Seen] = {}
        self._in_last_pass: list[_Seen] = []
        self._num_put_by = 0
        deferred = network.deferred
        self._waiting: dict[int, _Waiting] = {}
        last = deferred.num_places - deferred.max_rows
        self._free_places = list(range(last, -1, -deferred.max_rows))
        self._max_waiting = len(self._free_places)

    @property
    def kv(self) -> KVCache:
        """The head's own pages."""
        return self._kv

    def source(self, session_id: int, token_ids: Sequence[int]) -> str:
        """Its own name."""
        return self.name

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Chains of the head's likeliest tokens, all sessions' next ones in one pass."""
        self._seen = {}  # chains replace what the last pass left
        for request in requests:
            if request.max_tokens:
                self._write_waiting(request.session_id)
        return self._chains.run(requests, [self._start_of(request) for request in requests])

    def observe(self, target_pass: TargetPass) -> Tensor | None:
        """Which row of `bases` each row of the pass starts from; None if rows are to wait.

        They do where each session has a single one: where nobody drafts.
        """
        session_ids, rows = target_pass.session_ids, target_pass.rows
        if target_pass.part:
            self._put_by()
        else:
            self._seen, self._num_put_by = {}, 0
        is_alone = target_pass.num_parts == 1
        may_wait = is_alone and len(rows) <= self._max_waiting
        waits = may_wait and all(len(one.token_ids) == 1 for one in rows)
        base_rows: list[int] = []
        self._in_last_pass = []
        for session_id, one in zip(session_ids, rows, strict=True):
            first_row, count = len(base_rows), len(one.token_ids)
            following = self._network.num_slots + first_row
            if not waits:
                self._write_waiting(session_id)
            base_rows.append(_NOTHING if waits else self._base_of(session_id, one.start))
            base_rows.extend(range(following, following + count - 1))
            seen = _Seen(first_row, following, one, written=not waits)
            self._seen[session_id] = seen
            self._in_last_pass.append(seen)
        return None if waits else self._network.choose_bases(base_rows)

    def _put_by(self) -> None:
        """Keep what the step's last pass left, since the next one writes there."""
        num_rows = sum(len(seen.rows.token_ids) for seen in self._in_last_pass)
        first = self._network.put_by(num_rows, self._num_put_by)
        self._num_put_by += num_rows
        for seen in self._in_last_pass:
            seen.first_base = first + seen.first_row

    def commit(self, session_id: int, num_computed: int) -> None:
        """Behind a pass, keep what the next row starts from, or let the pass's only row wait.

        Told without a new row that may wait, all that waits is written: so it is at a turn's end.
        """
        seen = self._seen.get(session_id)
        if seen is not None and not seen.written:
            del self._seen[session_id]
            if seen.rows.start == num_computed - 1:
                self._wait(session_id, seen)
                if num_computed % self._kv.page_size:
                    return
        self._drop_waiting(session_id, num_computed)
        self._write_waiting(session_id)
        self._keep_start(session_id, num_computed - 1)

    def close(self, session_id: int) -> None:
        """Forget what waits of the session, and what its next row would start from."""
        self._drop_waiting(session_id, 0)
        self._forget_start(session_id)

    def _wait(self, session_id: int, seen: _Seen) -> None:
        """Have a row of the pass wait behind those of its session that do already."""
        deferred, waiting = self._network.deferred, self._waiting.get(session_id)
        if waiting is not None and len(waiting.token_ids) == deferred.max_rows:
            self._write_waiting(session_id)
            waiting = None
        if waiting is None:
            if not self._free_places:
                self._write_waiting(next(iter(self._waiting)))
            place = self._free_places.pop()
            waiting = _Waiting(place, seen.rows.start, seen.rows.page_ids, [])
            self._waiting[session_id] = waiting
        num_before = len(waiting.token_ids)
        assert waiting.start + num_before == seen.rows.start, (waiting, seen)
        deferred.keep(seen.first_row, waiting.first_place + num_before)
        waiting.token_ids += seen.rows.token_ids

    def _write_waiting(self, session_id: int) -> None:
        """Write the rows of the session that wait."""
        waiting = self._waiting.pop(session_id, None)
        if waiting is None:
            return
        self._free_places.append(waiting.first_place)
        rows = BatchRows(waiting.token_ids, waiting.start, waiting.page_ids)
        base_row = self._base_of(session_id, waiting.start)
        following = self._network.deferred.write(rows, waiting.first_place, base_row)
        self._keep(session_id, following, waiting.start + len(waiting.token_ids) - 1)

    def _drop_waiting(self, session_id: int, num_computed: int) -> None:
        """Rows of the session from position `num_computed` on wait no longer."""
        waiting = self._waiting.get(session_id)
        if waiting is None:
            return
        del waiting.token_ids[max(0, num_computed - waiting.start) :]
        if not waiting.token_ids:
            del self._waiting[session_id]
            self._free_places.append(waiting.first_place)

    def _keep_start(self, session_id: int, position: int) -> None:
        """Keep what the row behind `position` starts from, if the last pass gave it or it is kept.

        Otherwise forget what is kept.
        """
        seen, kept = self._seen.get(session_id), self._kept.get(session_id)
        if seen is not None and 0 <= position - seen.rows.start < len(seen.rows.token_ids):
            base_row = seen.first_base + position - seen.rows.start
            self._keep(session_id, base_row, position)
        elif kept is not None and kept.position != position:
            self._forget_start(session_id)

    def _keep(self, session_id: int, base_row: int, position: int) -> None:
        slot = self._slot(session_id)
        self._base_copies.copy(base_row, slot)
        self._kept[session_id] = _Kept(slot, position)

    def _forget_start(self, session_id: int) -> None:
        kept = self._kept.pop(session_id, None)
        if kept is not None:
            self._free_slots.append(kept.slot)

    def _start_of(self, request: DraftRequest) -> int:
        return self._base_of(request.session_id, len(request.token_ids) - 1)

    def _base_of(self, session_id: int, position: int) -> int:
        """The row of `bases` that a session's row at `position` starts from."""
        kept = self._kept.get(session_id)
        return kept.slot if kept is not None and kept.position == position - 1 else _NOTHING

    def _slot(self, session_id: int) -> int:
        """The session's slot; where none is free, that of the session not seen for longest."""
        kept = self._kept.pop(session_id, None)
        if kept is not None:
            return kept.slot
        if not self._free_slots:
            _, oldest = self._kept.popitem(last=False)
            return oldest.slot
        return self._free_slots.pop()


@dataclass(slots=True)
class _Chain:
    """Drafts of one session in the making."""

    request: DraftRequest
    base_row: int
    token_ids: list[int]
    likelihood: float = 1.0

    @property
    def next_row(self) -> BatchRows:
        """The row that drafts the next token."""
        tokens = self.request.token_ids
        token_id = self.token_ids[-1] if self.token_ids else tokens[-1]
        position = len(tokens) - 1 + len(self.token_ids)
        return BatchRows([token_id], position, self.request.page_ids)

    @property
    def goes_on(self) -> bool:
        """Whether one more draft is allowed and likely enough."""
        request = self.request
        return len(self.token_ids) < request.max_tokens and self.likelihood >= request.floor


class SteppedChains:
    """Implements `Chains` with a pass of the network after the other, on any executor.

    Args:
        network: The head over its own pages.
        token_ids: The tokens that its logits are of, int64 `[n]` in main memory.
        batches: A builder of its own: the target's is in use between a pass and its `observe`.
    """

    def __init__(self, network: HeadNetwork, token_ids: Tensor, batches: BatchBuilder) -> None:
        self._network = network
        self._token_ids = token_ids
        self._batches = batches

    def run(self, requests: Sequence[DraftRequest], base_rows: Sequence[int]) -> list[list[int]]:
        """The drafts of each request, all sessions' next ones in one pass."""
        chains = [_Chain(r, row, []) for r, row in zip(requests, base_rows, strict=True)]
        going = [chain for chain in chains if chain.goes_on]
        while going:
            batch = self._batches.build([chain.next_row for chain in going])
            logits = self._network.step(batch, [chain.base_row for chain in going]).cpu()
            for row, chain in enumerate(going):
                self._extend(chain, logits[row])
                chain.base_row = self._network.num_slots + row
            going = [chain for chain in going if chain.goes_on]
        return [chain.token_ids for chain in chains]

    def _extend(self, chain: _Chain, logits: Tensor) -> None:
        tokens = chain.request.token_ids
        choice = chain.request.sampler.choose_among(
            logits,
            self._token_ids,
            position=len(tokens) + len(chain.token_ids),
            drafts_before=chain.token_ids,
        )
        chain.token_ids.append(choice.token_id)
        chain.likelihood *= choice.probability
