"""Pages on their way out of the device and back: written behind, restored in front of a prefill.

    # a turn ended      its full pages → a backlog → copies → a page at a time → the archive
    # a turn starts     pages known here, then those of the archive; the rest is computed

Knows: sessions, nodes of the prefix tree, the archive, who copies pages. Does not know: files,
turns' text, when a turn ends, whether a copy takes time.
Invariant: only full pages that the tree knows are written, as they were when their copy began; a
page comes back into a session that nobody else sees until its ids were compared. No step waits for
a copy. Cost: 50 µs for a page each way; while answers run, one page in `_BUSY_STEPS` steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.archive import PageRecord, child_key, path_keys, root_key
from chatrt.errors import OutOfPages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from chatrt.archive import Archive, Loaded, PageKey
    from chatrt.page_bytes import CopyOut, PageCopier, Payload
    from chatrt.prefix import PrefixNode
    from chatrt.session import Session
    from chatrt.session_manager import SessionManager

# Beside running answers a page is copied only this often: its write takes time on a core of theirs.
_BUSY_STEPS = 8
# A page that takes longer to come than this, from a disk that hangs, is computed instead.
_PATIENCE_NS = 2 * 10**9
# How soon to look again, where no turn runs, for pages that come from disk, and for copies.
_RESTORING_POLL_S = 0.25
_COPYING_POLL_S = 0.0005


@dataclass(slots=True)
class _Restore:
    """Pages `[first, …)` of a session that are on their way; `num_arrived` are in place.

    `tier` is where the last of them came from.
    """

    session: Session
    first: int
    num_pages: int
    waits_since_ns: int
    num_arrived: int = 0
    tier: str = ""


@dataclass(slots=True)
class _Leaving:
    """Pages of which a copy is under way, in its order; None: this one was deleted meanwhile."""

    records: list[PageRecord | None]
    copy: CopyOut


@dataclass(frozen=True, slots=True)
class Restored:
    """A session whose pages have all arrived, or will not; `num_tokens` more are computed now."""

    session: Session
    num_tokens: int
    page_size: int
    tier: str


class Archiving:
    """Moves pages between a session manager's page ids and an archive.

    Args:
        archive: Where pages are kept.
        copier: Copies them out of, and into, all caches that hold rows of the same ids.
        sessions: The pages' bookkeeping.
        fingerprint: What the bytes depend on: weights, formats, layout.
    """

    def __init__(
        self,
        archive: Archive,
        copier: PageCopier,
        sessions: SessionManager,
        *,
        fingerprint: str,
    ) -> None:
        self._archive = archive
        self._copier = copier
        self._sessions = sessions
        self._fingerprint = fingerprint
        self._backlog: deque[PrefixNode] = deque()
        self._leaving: deque[_Leaving] = deque()
        self._restores: dict[int, _Restore] = {}
        self._num_steps = 0
        self._may_have_more = False  # that the archive has read, and that was not taken

    def keep(self, session: Session) -> None:
        """A turn ended: what is not kept yet of its session's full pages will be written.

        All of them are looked up: a page in the middle that was lost would hide all behind it.
        """
        node, missing = session.tip, []
        self._key_of(node, session.salt)
        while node.parent is not None:
            if not self._archive.knows(node.key):
                missing.append(node)
            node = node.parent
        self._backlog.extend(reversed(missing))
        if len(self._backlog) > 2 * self._sessions.num_pages:
            # Answers that never pause add pages faster than one in some steps is written.
            self._backlog = deque(dict.fromkeys(one for one in self._backlog if one.linked))
        if session.tip.parent is not None:
            self._archive.touch([session.tip.key])

    def save(self, *, busy: bool) -> bool:
        """Hand one page of the backlog over; whether there was one, and room for it.

        Where copies take time, one of those that are done, else the next copy begins. While answers
        run (`busy`) only now and then.
        """
        self._num_steps += 1
        if not (self._backlog or self._leaving) or (busy and self._num_steps % _BUSY_STEPS):
            return False
        if self._leaving and self._leaving[0].copy.is_done():
            return self._hand_over()
        nodes = self._next_nodes(self._num_room())
        if not nodes:
            return False
        records, page_ids = [], []
        for node in nodes:
            assert node.page_id is not None
            assert node.parent is not None
            records.append(PageRecord(node.key, node.parent.key, node.token_ids))
            page_ids.append(node.page_id)
        self._leaving.append(_Leaving([*records], self._copier.copy_out(page_ids)))
        return self._hand_over() if self._leaving[0].copy.is_done() else True

    def finish(self, clock: Callable[[], int], *, time_ms: float) -> None:
        """Hand over the whole backlog, waiting for room; what time does not allow is given up.

        So is what there is no room for when all is written: a full disk makes none.
        """
        deadline_ns = clock() + int(time_ms * 1e6)
        while self._backlog or self._leaving:
            left_s = (deadline_ns - clock()) / 1e9
            if left_s <= 0:
                return
            if self.save(busy=False):
                continue
            if self._leaving:
                self._leaving[0].copy.wait()  # at the end there is no step that it could hold up
            elif not self._archive.flush(left_s) or self._archive.num_room == 0:
                return

    @property
    def poll_s(self) -> float | None:
        """How soon a step is due though nothing asks for one; None: none is."""
        if self._may_have_more:
            return 0.0
        if self._leaving or self._copier.is_busy:
            return _COPYING_POLL_S
        return _RESTORING_POLL_S if self._restores else None

    def begin_restore(self, session: Session, now_ns: int) -> bool:
        """Ask for the pages behind those that the session has; whether any is on its way.

        The session must not be planned until `take_restored` names it.
        """
        size, ids = self._sessions.page_size, session.token_ids
        first = session.num_computed // size
        records = self._known_behind(session, first, (len(ids) - 1) // size)
        num_rows = (first + len(records)) * size - session.num_computed
        if not records or num_rows <= 0:
            return False
        try:
            self._sessions.reserve(session, num_rows)
        except OutOfPages:
            return False
        ticket = self._archive.load(records)
        self._restores[ticket] = _Restore(session, first, len(records), now_ns)
        return True

    def take_restored(self, now_ns: int) -> list[Restored]:
        """Put pages that arrived in their place; the sessions that wait for no more."""
        done: list[Restored] = []
        self._copier.poll()
        num_taken = self._copier.num_in
        arrived = self._archive.take_loaded(num_taken) if num_taken else []
        self._may_have_more = 0 < num_taken == len(arrived)
        self._put(arrived)
        for loaded in arrived:
            restore = self._restores[loaded.ticket]
            restore.waits_since_ns = now_ns
            if loaded.payload is not None:
                restore.num_arrived += 1
                restore.tier = loaded.tier
            if loaded.payload is None or restore.num_arrived == restore.num_pages:
                done.append(self._end_restore(loaded.ticket))
        for ticket, restore in list(self._restores.items()):
            if now_ns - restore.waits_since_ns > _PATIENCE_NS:
                self._archive.abandon(ticket)
                done.append(self._end_restore(ticket))
        return done

    def abandon(self, session: Session) -> None:
        """The session's turn ended: nothing arrives for it any more."""
        for ticket in [t for t, one in self._restores.items() if one.session is session]:
            self._archive.abandon(ticket)
            self._settle(self._restores.pop(ticket))

    def wipe(self, salt: str, token_ids: Sequence[int]) -> None:
        """Delete the end of a sequence's path that no other kept sequence shares.

        What waits to be written of it is not, whoever else still holds its pages.
        """
        root, size = root_key(self._fingerprint, salt), self._sessions.page_size
        self._archive.wipe(self._drop_waiting(path_keys(root, token_ids, size)))
        self._archive.wipe_elsewhere(salt, token_ids)

    def _drop_waiting(self, keys: list[PageKey]) -> list[PageKey]:
        """Take the end of a path out of the backlog, up to where another waiting path branches off.

        Copies of it that are under way are dropped when they are done. Returns the keys of that
        end.
        """
        own = set(keys)
        others = [node for node in self._backlog if node.linked and node.key not in own]
        needed = {node.parent.key for node in others if node.parent is not None}
        needed |= {one.parent for one in self._records_leaving() if one.key not in own}
        num_kept = max((index + 1 for index, key in enumerate(keys) if key in needed), default=0)
        end = set(keys[num_kept:])
        self._backlog = deque(node for node in self._backlog if node.key not in end)
        for leaving in self._leaving:
            leaving.records = [
                None if one is not None and one.key in end else one for one in leaving.records
            ]
        return keys[num_kept:]

    def _num_room(self) -> int:
        """Pages whose copy may begin now, and that the archive takes when it is done."""
        num_out = self._copier.num_out
        if num_out == 0:
            return 0
        num_leaving = sum(len(leaving.records) for leaving in self._leaving)
        return min(num_out, self._archive.num_room - num_leaving)

    def _next_nodes(self, most: int) -> list[PrefixNode]:
        """Take pages that are to be kept from the front of the backlog, at most so many."""
        nodes: list[PrefixNode] = []
        leaving = {one.key for one in self._records_leaving()}
        while self._backlog and len(nodes) < most:
            node = self._backlog.popleft()
            # else evicted or forgotten meanwhile, or kept for another turn
            if node.linked and node.key not in leaving and not self._archive.knows(node.key):
                leaving.add(node.key)
                nodes.append(node)
        return nodes

    def _hand_over(self) -> bool:
        """Give the archive the next page of the first copy, which is done; whether that went on."""
        leaving = self._leaving[0]
        record, payload = leaving.records.pop(0), leaving.copy.take()
        if not leaving.records:
            self._leaving.popleft()
        return record is None or self._archive.save(record, payload)

    def _records_leaving(self) -> Iterator[PageRecord]:
        return (one for leaving in self._leaving for one in leaving.records if one is not None)

    def _put(self, arrived: Sequence[Loaded]) -> None:
        """Copy payloads to the pages of the sessions that asked for them."""
        pages: list[tuple[int, Payload]] = []
        for loaded in arrived:
            if loaded.payload is not None:
                restore = self._restores[loaded.ticket]
                page_id = restore.session.page_ids[restore.first + loaded.index]
                pages.append((page_id, loaded.payload))
        if pages:
            self._copier.copy_in(pages)

    def _end_restore(self, ticket: int) -> Restored:
        restore = self._restores.pop(ticket)
        num_tokens, size = self._settle(restore), self._sessions.page_size
        return Restored(restore.session, num_tokens, size, restore.tier)

    def _settle(self, restore: _Restore) -> int:
        """What arrived counts as computed; how many tokens more than before."""
        session, before = restore.session, restore.session.num_computed
        num_computed = (restore.first + restore.num_arrived) * self._sessions.page_size
        if num_computed <= before:
            return 0
        self._sessions.commit(session, (), num_computed=num_computed)
        return num_computed - before

    def _known_behind(self, session: Session, first: int, end: int) -> list[PageRecord]:
        """Pages `[first, …)` of the session, at most up to `end`, that the archive knows."""
        size, parent = self._sessions.page_size, self._key_of(session.tip, session.salt)
        records: list[PageRecord] = []
        for index in range(first, end):
            ids = tuple(session.token_ids[index * size : (index + 1) * size])
            key = child_key(parent, ids)
            if not self._archive.knows(key):
                break
            records.append(PageRecord(key, parent, ids))
            parent = key
        return records

    def _key_of(self, node: PrefixNode, salt: str) -> PageKey:
        """The archive's name of a node, noted in it and in those above it."""
        path: list[PrefixNode] = []
        while not node.key and node.parent is not None:
            path.append(node)
            node = node.parent
        if not node.key:
            node.key = root_key(self._fingerprint, salt)
        for below in reversed(path):
            below.key = child_key(node.key, below.token_ids)
            node = below
        return node.key
