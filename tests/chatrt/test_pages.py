"""Tests of chatrt.pages."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chatrt.errors import OutOfPages
from chatrt.pages import PageAllocator

NUM_PAGES = 8


def test_release_returns_a_page_only_after_the_last_sharer() -> None:
    allocator = PageAllocator(2)
    (page_id,) = allocator.allocate(1)
    allocator.share(page_id)
    allocator.release(page_id)
    assert (allocator.num_free, allocator.num_sharers(page_id)) == (1, 1)
    allocator.release(page_id)
    assert (allocator.num_free, allocator.num_sharers(page_id)) == (2, 0)


def test_a_refused_allocation_takes_nothing_and_names_the_numbers() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(1)
    with pytest.raises(OutOfPages, match="need 4 pages, 3 free and 0 evictable of 4"):
        allocator.allocate(4)
    assert (allocator.num_free, allocator.num_held) == (3, 1)


def test_a_free_page_cannot_be_shared_or_released() -> None:
    allocator = PageAllocator(1)
    with pytest.raises(AssertionError):
        allocator.share(0)
    with pytest.raises(AssertionError):
        allocator.release(0)


def test_an_empty_allocation_is_allowed_when_all_is_held() -> None:
    allocator = PageAllocator(1)
    allocator.allocate(1)
    assert allocator.allocate(0) == []


class AllocatorMachine(RuleBasedStateMachine):
    """Compares the allocator with a multiset of holds."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.holds: Counter[int] = Counter()

    @rule(count=st.integers(0, NUM_PAGES))
    def allocate(self, count: int) -> None:
        if count > NUM_PAGES - len(self.holds):
            with pytest.raises(OutOfPages):
                self.allocator.allocate(count)
            return
        page_ids = self.allocator.allocate(count)
        assert len(set(page_ids)) == count
        assert not set(page_ids) & set(self.holds)
        self.holds.update(page_ids)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page_id = data.draw(st.sampled_from(sorted(self.holds)))
        self.allocator.share(page_id)
        self.holds[page_id] += 1

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page_id = data.draw(st.sampled_from(sorted(self.holds)))
        self.allocator.release(page_id)
        self.holds[page_id] -= 1
        self.holds += Counter()  # drops the zeros

    @invariant()
    def counts_agree(self) -> None:
        assert self.allocator.num_held == len(self.holds)
        assert self.allocator.num_free + self.allocator.num_held == self.allocator.num_pages
        for page_id in range(NUM_PAGES):
            assert self.allocator.num_sharers(page_id) == self.holds[page_id]


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
