"""The sessions and their pages: open, park, resume, fork, rewind, commit, close.

    # tokens      [0, shared)      [shared, computed)    [computed, computed + k + 1)
    # written by  an earlier turn  this session          this step, not yet verified
    # on commit   stay shared      full pages → tree     kept up to accepted + 1

Knows: token ids, page ids, counters. Does not know: tensors, models, turns, time.
Invariant: full computed pages are known to the tree and never written again; the page at position
`num_computed` and all behind it belong to one session alone. Each method leaves this true, or
raises without effect.
Cost: `reserve`, `commit`, `trim` O(1) a step; the others O(pages of the session).
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from chatrt.errors import InvalidValue, OutOfPages
from chatrt.prefix import num_common_tokens
from chatrt.reclaim import PagePool, Tail
from chatrt.session import Attached, PageCopy, Session, SessionState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.pages import PageAllocator
    from chatrt.prefix import PrefixMatch, PrefixNode, PrefixTree
    from chatrt.reclaim import PoolFigures


class SessionManager:
    """Gives sessions their pages, shares what is known, reclaims what nobody uses."""

    def __init__(self, allocator: PageAllocator, tree: PrefixTree, *, page_size: int) -> None:
        assert tree.page_size == page_size
        self.page_size = page_size
        self._allocator = allocator
        self._tree = tree
        self._sessions: dict[int, Session] = {}
        self._pool = PagePool(allocator, tree)
        self._session_ids = itertools.count(1)

    @property
    def num_pages(self) -> int:
        """All pages."""
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._allocator.num_free

    @property
    def num_evictable(self) -> int:
        """Pages that could be freed at once: unused cached pages and the tails of the parked."""
        return self._pool.num_evictable

    def open(
        self, salt: str, token_ids: Sequence[int], *, beside: Session | None = None
    ) -> Attached:
        """A new session; reuses all that is known of its tokens but the last.

        Known is what the tree holds, and behind it the tail of a parked session or of `beside`.
        Rows of a page that matches in part are reused if a page for their copy can be had.

        Raises:
            InvalidValue: There is no token.
        """
        if not token_ids:
            raise InvalidValue("a session needs at least 1 token, it was given 0")
        match = self._tree.match(salt, token_ids, limit=len(token_ids) - 1)
        session = Session(next(self._session_ids), salt, list(token_ids), match.tip)
        self._sessions[session.session_id] = session
        self._attach(session, match.tip, match.page_ids)
        copies = self._copy_rows(session, match, beside)
        return Attached(session, session.num_computed, copies)

    def num_known(
        self, salt: str, token_ids: Sequence[int], *, beside: Session | None = None
    ) -> int:
        """How many leading tokens `open` would reuse now."""
        limit = len(token_ids) - 1
        match = self._tree.match(salt, token_ids, limit=limit)
        rest = token_ids[len(match.page_ids) * self.page_size : limit]
        tail = self._pool.find_tail(match.tip, rest)
        own = self._own_rows(beside, match, rest)
        num_rows = max(match.num_partial, tail[1] if tail else 0, own)
        return len(match.page_ids) * self.page_size + num_rows

    def park(self, session: Session) -> None:
        """The turn ended: only the partly filled tail page stays with the session."""
        assert session.state is SessionState.ACTIVE
        full, num_rows = divmod(session.num_computed, self.page_size)
        self._tree.mark(session.tip)
        self._tree.unhold(session.tip)
        if num_rows:
            # As old as the path in front of it, so that the tail goes first.
            rows = session.token_ids[full * self.page_size : session.num_computed]
            page_id, age = session.page_ids.pop(full), session.tip.last_used
            self._pool.keep_tail(session.session_id, Tail(page_id, age, session.tip, tuple(rows)))
        self._release_behind(session, 0)
        session.state = SessionState.PARKED

    def pin(self, session: Session, rank: int) -> None:
        """Eviction takes the pages of an active session after all of lower rank, until `unpin`."""
        assert session.state is SessionState.ACTIVE
        self._tree.pin(session.tip, rank)

    def unpin(self, session: Session) -> None:
        """The session's pages are as others are, and were used just now."""
        self._tree.unpin(session.tip)
        tail = self._pool.take_tail(session.session_id)
        if tail is not None:
            self._pool.keep_tail(session.session_id, replace(tail, age=tail.tip.last_used))

    def resume(self, session: Session) -> Attached:
        """Gives a parked session its pages back, as far as they still exist.

        All of them: `num_computed` is as before, at most all tokens but the last. Otherwise the
        longest known prefix is attached, and a tail without its front is released.
        """
        assert session.state is SessionState.PARKED
        limit = max(len(session.token_ids) - 1, 0)
        num_rows = min(session.num_computed, limit)
        match = self._tree.match(session.salt, session.token_ids, limit=limit)
        full = session.num_computed // self.page_size
        continues = match.tip.depth == full == num_rows // self.page_size
        tail = self._pool.take_tail(session.session_id)
        self._tree.unmark(session.tip)
        self._attach(session, match.tip, match.page_ids)
        if tail is not None and continues and match.num_tokens <= num_rows:
            session.page_ids.append(tail.page_id)
            session.num_computed = num_rows
            return Attached(session, num_rows, ())
        if tail is not None:
            self._allocator.release(tail.page_id)
        copies = self._copy_rows(session, match, None)
        return Attached(session, session.num_computed, copies)

    def extend(self, session: Session, token_ids: Sequence[int]) -> None:
        """Appends prompt tokens; they are computed later."""
        assert session.state is not SessionState.CLOSED
        session.token_ids.extend(token_ids)

    def fork(self, source: Session, num_tokens: int) -> Attached:
        """A new active session with the first `num_tokens` tokens of an active or parked one.

        `num_reused` is min(source's `num_computed`, num_tokens - 1) if there is a page for the copy
        of its tail, and what is still known of a parked one. The source goes on as before.

        Raises:
            InvalidValue: `num_tokens` is not in [1, source's tokens].
        """
        assert source.state is not SessionState.CLOSED
        _check_num_tokens(num_tokens, 1, len(source.token_ids))
        return self.open(source.salt, source.token_ids[:num_tokens], beside=source)

    def rewind(self, session: Session, num_tokens: int) -> tuple[PageCopy, ...]:
        """Drops the tokens behind the first `num_tokens`, and the pages behind what stays computed.

        `num_computed` becomes at most `num_tokens - 1`. A page that has to be continued but that
        others may read is replaced by a copy, or its rows are computed again if there is no page.

        Raises:
            InvalidValue: `num_tokens` is not in [0, the session's tokens].
        """
        assert session.state is not SessionState.CLOSED
        _check_num_tokens(num_tokens, 0, len(session.token_ids))
        old_ids = session.token_ids.copy()
        del session.token_ids[num_tokens:]
        full_before = session.num_computed // self.page_size
        session.num_computed = min(session.num_computed, max(num_tokens - 1, 0))
        full, num_rows = divmod(session.num_computed, self.page_size)
        if session.state is SessionState.PARKED:
            if full < full_before or num_rows == 0:
                self._pool.release_tail(session.session_id)
            return ()
        self._release_behind(session, full + (num_rows > 0))
        copies: tuple[PageCopy, ...] = ()
        if num_rows and self._allocator.num_sharers(session.page_ids[full]) > 1:
            # Its own node stays held meanwhile: the source must not be reclaimed for its copy.
            self._move_tip(session, session.tip.ancestor(min(full + 1, session.tip.depth)))
            page_id = session.page_ids.pop()
            session.num_computed -= num_rows
            copies = self._continue_in_copy(session, page_id, num_rows)
            self._allocator.release(page_id)
        self._move_tip(session, session.tip.ancestor(full))
        # What was cut will not be asked for again, and could not be deleted with the session later.
        self._tree.wipe(session.salt, old_ids)
        return copies

    def reserve(self, session: Session, num_rows: int) -> None:
        """Makes sure that positions [num_computed, num_computed + num_rows) have pages.

        Raises:
            OutOfPages: Even without all that is evictable there are too few; nothing changes then.
        """
        assert session.state is SessionState.ACTIVE
        missing = -(-(session.num_computed + num_rows) // self.page_size) - len(session.page_ids)
        if missing > 0:
            session.page_ids += self._pool.allocate(missing)

    def commit(self, session: Session, new_token_ids: Sequence[int], *, num_computed: int) -> None:
        """Appends tokens; positions below `num_computed` are now written, full pages known."""
        assert session.state is SessionState.ACTIVE
        num_slots = len(session.page_ids) * self.page_size
        num_tokens = len(session.token_ids) + len(new_token_ids)
        assert session.num_computed <= num_computed <= min(num_slots, num_tokens)
        session.token_ids += new_token_ids
        session.num_computed = num_computed
        full = num_computed // self.page_size
        if full > session.tip.depth:
            tip = self._tree.insert(
                session.salt,
                session.token_ids,
                session.page_ids[:full],
                start_page=session.tip.depth,
                parent=session.tip,
            )
            self._move_tip(session, tip)

    def trim(self, session: Session) -> None:
        """Releases the pages behind the last token: those that rejected drafts needed."""
        assert session.state is SessionState.ACTIVE
        self._release_behind(session, -(-len(session.token_ids) // self.page_size))

    def close(self, session: Session) -> None:
        """Releases all that the session holds, once; what the tree knows stays cached."""
        if session.state is SessionState.PARKED:
            self._pool.release_tail(session.session_id)
            self._tree.unmark(session.tip)
        elif session.state is SessionState.ACTIVE:
            self._release_behind(session, 0)
            self._tree.unhold(session.tip)
        session.state = SessionState.CLOSED
        self._sessions.pop(session.session_id, None)

    def forget(self, session: Session) -> None:
        """Closes a session and drops from the tree the end of its path that is only its own."""
        self.close(session)
        self._tree.wipe(session.salt, session.token_ids)

    def evict(self, count: int) -> int:
        """Frees up to `count` pages that nobody uses now, oldest first; returns how many."""
        return self._pool.evict(count)

    def num_shared_pages(self, session: Session) -> int:
        """Pages of the session that other sessions use at this moment too."""
        return sum(self._pool.num_users(page_id) > 1 for page_id in session.page_ids)

    def figures(self) -> PoolFigures:
        """How the pool is used now. Cost: 50 ns a page in use; for metrics, not for steps."""
        sessions = self._sessions.values()
        tables = [one.page_ids for one in sessions if one.state is SessionState.ACTIVE]
        parked = len(sessions) - len(tables)
        states = {SessionState.ACTIVE.value: len(tables), SessionState.PARKED.value: parked}
        return self._pool.figures(_in_several(tables), states=states)

    def check_invariants(self) -> None:
        """Asserts what the module promises; for tests, O(pages)."""
        in_use: Counter[int] = Counter()
        tails = self._pool.tails()
        for session in self._sessions.values():
            self._check_session(session, tails.pop(session.session_id, None))
            in_use.update(session.page_ids)
        assert not tails, "a tail page without a parked session"
        assert self.figures().shared == sum(number > 1 for number in in_use.values())
        self._pool.check_invariants(in_use)

    def _check_session(self, session: Session, tail_page_id: int | None) -> None:
        full, num_rows = divmod(session.num_computed, self.page_size)
        assert session.num_computed <= len(session.token_ids)
        if session.state is SessionState.PARKED:
            assert not session.page_ids
            own_page_ids = [] if tail_page_id is None else [tail_page_id]
            assert num_rows or not own_page_ids
        else:
            own_page_ids = session.page_ids[full:]
            assert tail_page_id is None
            assert len(session.page_ids) * self.page_size >= session.num_computed
            assert session.tip.linked
            assert session.tip.depth == full
        for page_id in own_page_ids:
            assert self._allocator.num_sharers(page_id) == 1
            assert not self._tree.knows(page_id)

    def _attach(self, session: Session, tip: PrefixNode, page_ids: Sequence[int]) -> None:
        """Shares full pages, the path of which ends at `tip`, with a session that has none."""
        self._tree.hold(tip)
        for page_id in page_ids:
            self._allocator.share(page_id)
        session.tip = tip
        session.page_ids = list(page_ids)
        session.num_computed = len(page_ids) * self.page_size
        session.state = SessionState.ACTIVE

    def _copy_rows(
        self, session: Session, match: PrefixMatch, beside: Session | None
    ) -> tuple[PageCopy, ...]:
        """Goes on behind the matched pages in a copy of the page with most of the next rows."""
        start = len(match.page_ids) * self.page_size
        rest = session.token_ids[start : min(start + self.page_size, len(session.token_ids) - 1)]
        num_own = self._own_rows(beside, match, rest)
        session_id, num_tail = self._pool.find_tail(match.tip, rest) or (0, 0)
        if num_own > max(match.num_partial, num_tail):
            assert beside is not None
            return self._continue_in_copy(session, beside.page_ids[len(match.page_ids)], num_own)
        if num_tail > match.num_partial:
            tail = self._pool.take_tail(session_id)
            assert tail is not None
            copies = self._continue_in_copy(session, tail.page_id, num_tail)
            # As old as the path in front of it, which the match made young.
            self._pool.keep_tail(session_id, replace(tail, age=tail.tip.last_used))
            return copies
        if match.partial is None or match.partial_page_id is None:
            return ()
        self._tree.hold(match.partial)
        copies = self._continue_in_copy(session, match.partial_page_id, match.num_partial)
        self._tree.unhold(match.partial)
        return copies

    def _own_rows(self, beside: Session | None, match: PrefixMatch, rest: Sequence[int]) -> int:
        """How many of `rest` the tail of a running session holds behind the matched pages."""
        if beside is None or beside.state is not SessionState.ACTIVE:
            return 0
        if beside.tip is not match.tip:
            return 0
        start = beside.tip.depth * self.page_size
        return num_common_tokens(beside.token_ids[start : beside.num_computed], rest)

    def _continue_in_copy(
        self, session: Session, page_id: int, num_rows: int
    ) -> tuple[PageCopy, ...]:
        """Appends a fresh page for the first rows of a page that must survive the allocation.

        Without a page to be had the rows are computed again later: slower, and not an error.
        """
        try:
            (fresh_page_id,) = self._pool.allocate(1)
        except OutOfPages:
            return ()
        session.page_ids.append(fresh_page_id)
        session.num_computed += num_rows
        return (PageCopy(page_id, fresh_page_id, num_rows),)

    def _release_behind(self, session: Session, num_pages: int) -> None:
        for page_id in session.page_ids[num_pages:]:
            self._allocator.release(page_id)
        del session.page_ids[num_pages:]

    def _move_tip(self, session: Session, tip: PrefixNode) -> None:
        self._tree.hold(tip)
        self._tree.unhold(session.tip)
        session.tip = tip


def _in_several(tables: Sequence[Sequence[int]]) -> set[int]:
    """The pages that stand in two tables or more; whole tables at once, at the speed of sets."""
    seen: set[int] = set()
    several: set[int] = set()
    for page_ids in tables:
        own = set(page_ids)
        several |= seen & own
        seen |= own
    return several


def _check_num_tokens(num_tokens: int, low: int, high: int) -> None:
    if not low <= num_tokens <= high:
        raise InvalidValue(f"{num_tokens} tokens asked for, it must be in [{low}, {high}]")
