"""Any order of calls on sessions, checked against what each row of KV was computed from."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from chatrt.errors import OutOfPages
from chatrt.session import Attached, Session, SessionState
from tests.chatrt.session_support import PAGE_SIZE, Memory

token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class SessionMachine(RuleBasedStateMachine):
    """Any order of calls keeps every session's rows its own and every page accounted for."""

    active: Bundle[Session] = Bundle("active")
    parked: Bundle[Session] = Bundle("parked")

    @initialize(num_pages=st.sampled_from([5, 12, 40]))
    def start(self, num_pages: int) -> None:
        self.memory = Memory(num_pages)
        self.manager = self.memory.manager
        self.live: list[Session] = []

    @rule(target=active, salt=st.sampled_from(["", "other"]), token_ids=token_lists)
    def open(self, salt: str, token_ids: list[int]) -> Session:
        return self.attached(self.memory.open(token_ids, salt))

    @rule(target=active, source=st.one_of(active, parked), data=st.data())
    def fork(self, source: Session, data: st.DataObject) -> Session:
        num_tokens = data.draw(st.integers(1, len(source.token_ids)))
        return self.attached(self.memory.copied(self.manager.fork(source, num_tokens)))

    @rule(session=st.one_of(active, parked), token_ids=token_lists)
    def extend(self, session: Session, token_ids: list[int]) -> None:
        self.manager.extend(session, token_ids)

    @rule(session=active, num_rows=st.integers(1, 20), samples=st.booleans())
    def prefill(self, session: Session, num_rows: int, samples: bool) -> None:
        num_rows = min(num_rows, session.num_pending)
        if not self.fits(session, num_rows):
            return
        self.memory.compute(session, num_rows)
        end = session.num_computed + num_rows
        sampled = [1] if samples and end == len(session.token_ids) else []
        self.manager.commit(session, sampled, num_computed=end)

    @rule(session=active, drafts=st.lists(st.integers(0, 1), max_size=6), data=st.data())
    def decode(self, session: Session, drafts: list[int], data: st.DataObject) -> None:
        num_rows = session.num_pending + len(drafts)
        if session.num_pending == 0 or not self.fits(session, num_rows):
            return
        self.memory.compute(session, num_rows, drafts)
        num_accepted = data.draw(st.integers(0, len(drafts)))
        end = session.num_computed + session.num_pending + num_accepted
        self.manager.commit(session, [*drafts[:num_accepted], 0], num_computed=end)
        if data.draw(st.booleans()):
            self.manager.trim(session)

    @rule(session=st.one_of(active, parked), data=st.data())
    def rewind(self, session: Session, data: st.DataObject) -> None:
        num_tokens = data.draw(st.integers(1, len(session.token_ids)))
        self.memory.copy(self.manager.rewind(session, num_tokens))
        assert session.num_computed <= num_tokens - 1

    @rule(target=parked, session=consumes(active))
    def park(self, session: Session) -> Session:
        self.manager.park(session)
        return session

    @rule(target=active, session=consumes(parked))
    def resume(self, session: Session) -> Session:
        before = session.num_computed
        intact = self.is_intact(session)
        attached = self.memory.copied(self.manager.resume(session))
        assert attached.num_reused == session.num_computed < len(session.token_ids)
        if intact:
            assert session.num_computed >= min(before, len(session.token_ids) - 1)
        return session

    @rule(session=st.one_of(consumes(active), consumes(parked)), forget=st.booleans())
    def close(self, session: Session, forget: bool) -> None:
        (self.manager.forget if forget else self.manager.close)(session)
        self.live.remove(session)

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        evictable = self.manager.num_evictable
        assert self.manager.evict(count) == min(count, evictable)
        assert self.manager.num_evictable == evictable - min(count, evictable)

    @invariant()
    def every_page_is_accounted_for_and_every_row_its_own(self) -> None:
        self.manager.check_invariants()
        for session in self.live:
            if session.state is SessionState.ACTIVE:
                self.memory.check(session)
        for session_id, page_id in self.manager._pool.tails().items():
            (session,) = (s for s in self.live if s.session_id == session_id)
            start = session.num_computed // PAGE_SIZE * PAGE_SIZE
            for position in range(start, session.num_computed):
                row = self.memory.rows[page_id][position - start]
                assert row == tuple(session.token_ids[: position + 1])

    def teardown(self) -> None:
        for session in getattr(self, "live", []):
            self.manager.close(session)
        if hasattr(self, "memory"):
            self.manager.check_invariants()
            self.manager.evict(self.memory.allocator.num_pages)
            assert self.manager.num_free == self.memory.allocator.num_pages

    def attached(self, attached: Attached) -> Session:
        assert attached.num_reused == attached.session.num_computed
        assert attached.session.num_pending >= 1
        self.live.append(attached.session)
        return attached.session

    def is_intact(self, session: Session) -> bool:
        """Whether all pages of a parked session are still there and can be continued in place."""
        full, num_rows = divmod(session.num_computed, PAGE_SIZE)
        limit = full * PAGE_SIZE
        known = self.memory.tree.match(session.salt, session.token_ids, limit=limit).num_tokens
        if num_rows:
            return known == limit and self.manager._pool.has_tail(session.session_id)
        # Were the last token computed too, its published page would have to be copied.
        return known == limit < len(session.token_ids)

    def fits(self, session: Session, num_rows: int) -> bool:
        """Reserves, and checks that a refusal changes nothing."""
        free, page_ids = self.manager.num_free, list(session.page_ids)
        need = -(-(session.num_computed + num_rows) // PAGE_SIZE) - len(page_ids)
        if need <= free + self.manager.num_evictable:
            self.manager.reserve(session, num_rows)
            return True
        with pytest.raises(OutOfPages):
            self.manager.reserve(session, num_rows)
        assert (self.manager.num_free, session.page_ids) == (free, page_ids)
        return False


TestSessionMachine = SessionMachine.TestCase
TestSessionMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
