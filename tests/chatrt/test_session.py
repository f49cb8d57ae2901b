"""Tests of chatrt.session. Pages of 4 tokens; `Memory` stands in for the KV tensors."""

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

from chatrt.errors import InvalidValue, OutOfPages
from chatrt.pages import PageAllocator
from chatrt.prefix import PrefixTree
from chatrt.session import Attached, PageCopy, Session, SessionManager, SessionState

PAGE_SIZE = 4


class Memory:
    """Page contents: each row remembers the whole token prefix that it was computed from."""

    def __init__(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.tree = PrefixTree(self.allocator, PAGE_SIZE)
        self.manager = SessionManager(self.allocator, self.tree, page_size=PAGE_SIZE)
        self.rows: list[list[tuple[int, ...] | None]] = [
            [None] * PAGE_SIZE for _ in range(num_pages)
        ]

    def open(self, token_ids: list[int], salt: str = "") -> Attached:
        return self.copied(self.manager.open(salt, token_ids))

    def copied(self, attached: Attached) -> Attached:
        self.copy(attached.copies)
        return attached

    def copy(self, copies: tuple[PageCopy, ...]) -> None:
        for copy in copies:
            self.rows[copy.dst][: copy.num_rows] = self.rows[copy.src][: copy.num_rows]

    def compute(self, session: Session, num_rows: int, drafts: list[int] | None = None) -> None:
        """Reserves and writes rows for pending tokens and drafts, as a forward pass does."""
        self.manager.reserve(session, num_rows)
        tokens = session.token_ids + (drafts or [])
        for position in range(session.num_computed, session.num_computed + num_rows):
            page_id = session.page_ids[position // PAGE_SIZE]
            assert self.allocator.num_sharers(page_id) == 1, "wrote into a shared page"
            assert not self.tree.knows(page_id), "wrote into a published page"
            self.rows[page_id][position % PAGE_SIZE] = tuple(tokens[: position + 1])

    def run(self, session: Session, *answer: int) -> None:
        """Prefills what is pending, then decodes `answer`, one token a step."""
        for token_id in answer:
            num_rows = session.num_pending
            self.compute(session, num_rows)
            end = session.num_computed + num_rows
            self.manager.commit(session, [token_id], num_computed=end)

    def check(self, session: Session) -> None:
        """The canary: every computed position holds exactly the session's own prefix."""
        for position in range(session.num_computed):
            row = self.rows[session.page_ids[position // PAGE_SIZE]][position % PAGE_SIZE]
            assert row == tuple(session.token_ids[: position + 1])


def test_open_computes_at_least_the_last_token() -> None:
    memory = Memory(8)
    first = memory.open([1, 2, 3, 4, 5, 6, 7, 8]).session
    memory.run(first, 9)
    again = memory.open([1, 2, 3, 4, 5, 6, 7, 8])
    assert again.num_reused == 7
    memory.check(again.session)


def test_open_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidValue):
        Memory(1).open([])


def test_a_match_inside_a_page_is_copied_into_a_page_of_its_own() -> None:
    memory = Memory(8)
    first = memory.open([1, 2, 3, 4, 5, 6, 7, 8]).session
    memory.run(first, 9)
    edited = memory.open([1, 2, 3, 4, 5, 6, 0, 0])
    assert edited.copies == (PageCopy(first.page_ids[1], edited.session.page_ids[1], 2),)
    assert edited.num_reused == 6
    memory.check(edited.session)
    memory.check(first)


def test_a_match_inside_a_page_is_left_when_no_page_is_to_be_had() -> None:
    memory = Memory(2)
    first = memory.open([1, 2, 3, 4, 5, 6, 7, 8]).session
    memory.compute(first, 8)
    memory.manager.commit(first, [], num_computed=8)
    edited = memory.open([1, 2, 3, 4, 5, 6, 0, 0])
    assert (edited.num_reused, edited.copies) == (4, ())
    memory.manager.check_invariants()


def test_the_source_of_a_copy_is_not_evicted_for_its_own_copy() -> None:
    memory = Memory(3)
    first = memory.open([1, 2, 3, 4, 5, 6, 7, 8]).session
    memory.run(first, 9)
    memory.manager.close(first)
    other = memory.open([7]).session
    memory.run(other, 7)
    edited = memory.open([1, 2, 3, 4, 5, 6, 0, 0])
    assert (edited.num_reused, edited.copies) == (4, ())
    memory.manager.check_invariants()


def test_salts_share_nothing() -> None:
    memory = Memory(8)
    memory.run(memory.open([1, 2, 3, 4, 5], salt="a").session, 6)
    assert memory.open([1, 2, 3, 4, 5], salt="b").num_reused == 0


def test_resume_continues_in_the_tail_page_and_recomputes_nothing() -> None:
    memory = Memory(8)
    session = memory.open([1, 2, 3, 4, 5]).session
    memory.run(session, 6, 7)
    tail = session.page_ids[1]
    memory.manager.park(session)
    assert (session.state, session.page_ids) == (SessionState.PARKED, [])
    memory.manager.extend(session, [8, 9])
    attached = memory.manager.resume(session)
    assert attached.copies == ()
    assert attached.num_reused == session.num_computed == 6
    assert session.page_ids[1] == tail
    memory.check(session)


def test_resume_of_a_session_with_every_token_computed_leaves_the_last_to_compute() -> None:
    memory = Memory(8)
    for prompt in ([1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]):
        session = memory.open(prompt, salt=str(prompt)).session
        memory.compute(session, len(prompt))
        memory.manager.commit(session, [], num_computed=len(prompt))
        memory.manager.park(session)
        memory.copied(memory.manager.resume(session))
        assert session.num_computed == len(prompt) - 1
        memory.manager.check_invariants()
        memory.run(session, 0)
        memory.check(session)


def test_resume_after_eviction_falls_back_to_the_longest_known_prefix() -> None:
    memory = Memory(8)
    session = memory.open(list(range(10))).session
    memory.run(session, 10)
    memory.manager.park(session)
    assert memory.manager.evict(2) == 2  # the tail, then the second page
    assert memory.manager.resume(session).num_reused == 4
    assert memory.allocator.num_held == 1


def test_a_tail_without_its_front_is_released_on_resume() -> None:
    memory = Memory(8)
    session = memory.open(list(range(10))).session
    memory.run(session, 10)
    memory.manager.park(session)
    memory.tree.drop("")
    assert memory.allocator.num_held == 1
    assert memory.manager.resume(session).num_reused == 0
    assert memory.allocator.num_held == 0


def test_resume_prefers_what_others_computed_beyond_the_tail() -> None:
    memory = Memory(8)
    session = memory.open([1, 2, 3, 4, 5]).session
    memory.run(session, 6)
    memory.manager.park(session)
    other = memory.open([1, 2, 3, 4, 5, 6, 7, 8, 9]).session
    memory.run(other, 0)
    memory.manager.extend(session, [7, 8, 0])
    attached = memory.copied(memory.manager.resume(session))
    assert attached.num_reused == 8
    memory.check(session)
    memory.manager.check_invariants()


def test_resume_prefers_a_longer_match_inside_the_page_that_its_tail_began() -> None:
    memory = Memory(8)
    session = memory.open([1, 2, 3, 4, 5]).session
    memory.run(session, 6)
    memory.manager.park(session)
    memory.run(memory.open([1, 2, 3, 4, 5, 6, 7, 8]).session, 9)
    memory.manager.extend(session, [7, 0])
    assert memory.copied(memory.manager.resume(session)).num_reused == 7
    memory.check(session)
    memory.manager.check_invariants()


def test_the_least_recently_parked_tail_goes_first_then_its_path_from_the_end() -> None:
    memory = Memory(16)
    old, young = (memory.open([n] * 9).session for n in (1, 2))
    for session in (old, young):
        memory.run(session, 0)
        memory.manager.park(session)
    assert memory.manager.num_evictable == 6
    num_cached = []
    for _ in range(4):
        memory.manager.evict(1)
        num_cached.append(memory.tree.num_cached)
    # the old one's tail, its second page, its first page; then the young one's tail
    assert num_cached == [4, 3, 2, 2]
    assert memory.copied(memory.manager.resume(young)).num_reused == 8


def test_fork_shares_full_pages_and_copies_the_rows_behind_them() -> None:
    memory = Memory(8)
    source = memory.open([1, 2, 3, 4, 5]).session
    memory.run(source, 6, 7, 8)
    fork = memory.copied(memory.manager.fork(source, 7))
    assert fork.num_reused == 6
    assert fork.session.page_ids[0] == source.page_ids[0]
    assert fork.copies == (PageCopy(source.page_ids[1], fork.session.page_ids[1], 2),)
    assert memory.manager.num_shared_pages(fork.session) == 1
    memory.run(fork.session, 0, 0, 0)
    memory.run(source, 9, 9)
    memory.check(source)
    memory.check(fork.session)
    memory.manager.check_invariants()


def test_fork_of_a_parked_session_copies_its_tail_and_leaves_it_there() -> None:
    memory = Memory(8)
    source = memory.open([1, 2, 3, 4, 5]).session
    memory.run(source, 6, 7)
    memory.manager.park(source)
    fork = memory.copied(memory.manager.fork(source, 7))
    assert fork.num_reused == 6
    memory.run(fork.session, 0)
    assert memory.manager.resume(source).num_reused == 6
    memory.check(source)
    memory.check(fork.session)


def test_a_parked_tail_is_not_evicted_for_the_copy_of_itself() -> None:
    memory = Memory(2)
    source = memory.open([1, 2, 3, 4, 5]).session
    memory.run(source, 6)
    memory.manager.park(source)
    fork = memory.manager.fork(source, 6)
    assert (fork.num_reused, fork.copies) == (4, ())
    memory.manager.check_invariants()
    assert memory.manager.resume(source).num_reused == 5


def test_regenerating_recomputes_one_token() -> None:
    memory = Memory(8)
    session = memory.open([1, 2, 3, 4, 5, 6]).session
    memory.run(session, 7, 8, 9, 9, 9, 9)
    memory.copy(memory.manager.rewind(session, 6))
    assert (session.num_computed, session.num_pending) == (5, 1)
    memory.check(session)
    memory.run(session, 0, 0, 0)
    memory.check(session)
    memory.manager.check_invariants()


def test_rewind_replaces_a_published_page_before_it_is_continued() -> None:
    memory = Memory(8)
    session = memory.open([1, 2, 3, 4, 5, 6, 7]).session
    memory.run(session, 8, 9)
    published = session.page_ids[1]
    copies = memory.manager.rewind(session, 7)
    assert copies == (PageCopy(published, session.page_ids[1], 2),)
    memory.copy(copies)
    memory.check(session)
    memory.manager.check_invariants()


def test_rewind_without_a_page_for_the_copy_recomputes_the_rows() -> None:
    memory = Memory(2)
    session = memory.open([1, 2, 3, 4, 5, 6, 7]).session
    memory.compute(session, 7)
    memory.manager.commit(session, [8], num_computed=7)
    memory.run(session, 9)
    assert memory.manager.rewind(session, 7) == ()
    assert (session.num_computed, memory.tree.num_cached) == (4, 1)
    memory.run(session, 0)
    memory.check(session)


def test_rewind_out_of_range_is_refused_without_effect() -> None:
    memory = Memory(4)
    session = memory.open([1, 2, 3]).session
    with pytest.raises(InvalidValue, match=r"4 tokens asked for, it must be in \[0, 3\]"):
        memory.manager.rewind(session, 4)
    with pytest.raises(InvalidValue, match=r"0 tokens asked for, it must be in \[1, 3\]"):
        memory.manager.fork(session, 0)
    assert session.token_ids == [1, 2, 3]


@pytest.mark.parametrize("num_tokens", [3, 5])
def test_rewind_of_a_parked_session_gives_up_a_tail_that_lies_behind(num_tokens: int) -> None:
    memory = Memory(8)
    session = memory.open([1, 2, 3, 4, 5, 6]).session
    memory.run(session, 7)
    memory.manager.park(session)
    assert memory.manager.rewind(session, num_tokens) == ()
    memory.manager.check_invariants()
    assert memory.manager.num_free == 7
    assert memory.copied(memory.manager.resume(session)).num_reused == num_tokens - 1
    memory.check(session)


def test_reserve_evicts_what_is_cached_and_names_the_numbers_when_that_is_too_little() -> None:
    memory = Memory(4)
    cached = memory.open([1, 2, 3, 4, 5]).session
    memory.run(cached, 6)
    memory.manager.park(cached)
    session = memory.open([9] * 20).session
    with pytest.raises(OutOfPages, match="need 5 pages, 2 free and 2 evictable of 4"):
        memory.manager.reserve(session, 20)
    assert (memory.manager.num_free, session.page_ids) == (2, [])
    memory.manager.reserve(session, 16)
    assert memory.manager.num_free == memory.manager.num_evictable == 0


def test_reserve_evicts_no_more_than_it_needs() -> None:
    memory = Memory(4)
    cached = memory.open([1, 2, 3, 4, 5]).session
    memory.run(cached, 6)
    memory.manager.park(cached)
    session = memory.open([9] * 20).session
    memory.manager.reserve(session, 12)
    assert (memory.manager.num_free, memory.manager.num_evictable) == (0, 1)


def test_rejected_drafts_give_their_pages_back() -> None:
    memory = Memory(8)
    session = memory.open([1, 2, 3]).session
    memory.run(session, 4)
    memory.compute(session, 1 + 6, drafts=[9] * 6)
    memory.manager.commit(session, [5], num_computed=4)
    assert len(session.page_ids) == 3
    memory.manager.trim(session)
    assert len(session.page_ids) == 2
    memory.run(session, 6, 7)
    memory.check(session)


def test_after_a_turn_prompt_and_answer_but_one_token_are_cached() -> None:
    memory = Memory(8)
    session = memory.open([1, 2, 3, 4, 5, 6]).session
    memory.run(session, 7, 8, 9)
    memory.manager.close(session)
    assert memory.open([1, 2, 3, 4, 5, 6, 7, 8, 9]).num_reused == 8


def test_two_that_compute_the_same_keep_one_page_when_both_have_gone() -> None:
    memory = Memory(8)
    sessions = [memory.open([1, 2, 3, 4, 5]).session for _ in range(2)]
    for session in sessions:
        memory.run(session, 6)
    assert memory.allocator.num_held == 4
    memory.manager.check_invariants()
    for session in sessions:
        memory.manager.close(session)
    assert memory.allocator.num_held == memory.tree.num_cached == 1


def test_forget_drops_only_what_no_other_conversation_runs_through() -> None:
    memory = Memory(16)
    kept = memory.open([1, 2, 3, 4, 5, 6, 7, 8, 9]).session
    memory.run(kept, 0)
    memory.manager.park(kept)
    gone = memory.copied(memory.manager.fork(kept, 9)).session
    memory.run(gone, *range(20, 28))
    memory.manager.park(gone)
    memory.manager.forget(gone)
    assert memory.tree.num_cached == 2
    assert memory.manager.resume(kept).num_reused == 9
    memory.manager.forget(kept)
    assert memory.manager.num_free == 16


def test_closing_twice_releases_once() -> None:
    memory = Memory(4)
    session = memory.open([1, 2, 3, 4, 5]).session
    memory.run(session, 6)
    memory.manager.close(session)
    memory.manager.close(session)
    assert (session.state, memory.manager.num_free) == (SessionState.CLOSED, 3)
    memory.manager.check_invariants()


def test_figures_add_up_and_count_pages_of_two_sessions_as_shared() -> None:
    memory = Memory(8)
    source = memory.open([1, 2, 3, 4, 5]).session
    memory.run(source, 6)
    memory.manager.fork(source, 5)
    figures = memory.manager.figures()
    assert (figures.free + figures.held, figures.total) == (8, 8)
    assert (figures.cached, figures.shared) == (1, 1)


def test_idle_sessions_larger_than_the_pool_still_chat() -> None:
    memory = Memory(8)
    parked = []
    for n in range(10):
        session = memory.open([n] * 10).session
        memory.run(session, n, n)
        memory.manager.park(session)
        parked.append(session)
    for session in parked:
        memory.copied(memory.manager.resume(session))
        memory.run(session, 0, 0)
        memory.check(session)
        memory.manager.park(session)
        memory.manager.check_invariants()


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
