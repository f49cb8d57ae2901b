"""Tests of chatrt.session, call by call; test_session_property has them in any order."""

from __future__ import annotations

import pytest

from chatrt.errors import InvalidValue, OutOfPages
from chatrt.session import PageCopy, SessionState
from tests.chatrt.session_support import Memory


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
    assert memory.tree.evict(2) == 2
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
