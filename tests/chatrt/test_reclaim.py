"""Tests of chatrt.reclaim: what is given up first, and what never. Pages of 2 tokens."""

from __future__ import annotations

import pytest

from chatrt.errors import OutOfPages
from chatrt.pages import PageAllocator
from chatrt.prefix import PrefixTree
from chatrt.reclaim import PagePool, PoolFigures, Tail


class World:
    """A pool over some pages."""

    def __init__(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.tree = PrefixTree(self.allocator, 2)
        self.pool = PagePool(self.allocator, self.tree)

    def cache(self, *token_ids: int) -> list[int]:
        """Makes full pages of these tokens known, and lets go of them; returns their ids."""
        page_ids = self.pool.allocate(len(token_ids) // 2)
        self.tree.insert("", token_ids, page_ids)
        for page_id in page_ids:
            self.allocator.release(page_id)
        return page_ids

    def keep_tail(self, session_id: int, *token_ids: int) -> int:
        """A tail page as old as this moment, behind no other."""
        (page_id,) = self.pool.allocate(1)
        root = self.tree.match("", token_ids, limit=0).tip
        self.pool.keep_tail(session_id, Tail(page_id, self.tree.age(0), root, token_ids))
        return page_id


def test_free_pages_are_taken_before_anything_is_given_up() -> None:
    world = World(4)
    world.cache(1, 2)
    world.keep_tail(7)
    world.pool.allocate(2)
    assert (world.allocator.num_free, world.pool.num_evictable) == (0, 2)


def test_the_older_goes_first_whether_a_tail_or_a_cached_page() -> None:
    world = World(3)
    old_page = world.cache(1, 2)
    tail_page = world.keep_tail(7)
    young_page = world.cache(3, 4)
    assert [world.pool.allocate(1) for _ in range(3)] == [old_page, [tail_page], young_page]
    assert not world.pool.has_tail(7)


def test_the_end_of_a_path_goes_before_its_front() -> None:
    world = World(2)
    front, end = world.cache(1, 2, 3, 4)
    assert world.pool.allocate(1) == [end]
    assert world.pool.allocate(1) == [front]


def test_a_page_in_use_is_never_taken_and_a_refusal_changes_nothing() -> None:
    world = World(3)
    used = world.pool.allocate(1)
    world.cache(1, 2)
    with pytest.raises(OutOfPages, match="need 3 pages, 1 free and 1 evictable of 3"):
        world.pool.allocate(3)
    assert (world.allocator.num_free, world.pool.num_evictable) == (1, 1)
    assert set(world.pool.allocate(2)).isdisjoint(used)


def test_a_held_path_is_not_evictable() -> None:
    world = World(2)
    page_ids = world.cache(1, 2, 3, 4)
    node = world.tree.match("", [1, 2, 3, 4], limit=4).tip
    world.tree.hold(node)
    assert (world.pool.num_evictable, world.pool.evict(2)) == (0, 0)
    world.tree.unhold(node)
    assert sorted(world.pool.allocate(2)) == sorted(page_ids)


def test_a_tail_that_is_taken_back_keeps_its_page_and_a_released_one_frees_it() -> None:
    world = World(2)
    first, second = world.keep_tail(1), world.keep_tail(2)
    tail = world.pool.take_tail(1)
    assert tail is not None
    assert tail.page_id == first
    assert world.pool.take_tail(1) is None
    assert world.allocator.num_sharers(first) == 1
    world.pool.release_tail(2)
    world.pool.release_tail(2)
    assert world.allocator.num_sharers(second) == 0


def test_evict_says_how_many_pages_it_freed() -> None:
    world = World(4)
    world.cache(1, 2, 3, 4)
    world.keep_tail(1)
    assert world.pool.evict(2) == 2
    assert world.pool.evict(9) == 1
    assert world.allocator.num_free == 4


def test_figures_add_up_and_do_not_count_the_tree_as_a_user() -> None:
    world = World(5)
    (mine,) = world.pool.allocate(1)
    (ours,) = world.pool.allocate(1)
    world.allocator.share(ours)
    world.cache(1, 2)
    figures = world.pool.figures({mine, ours}, states={"active": 1})
    assert figures == PoolFigures(
        free=2, held=3, cached=1, shared=1, total=5, sessions={"active": 1}
    )
    world.tree.insert("", [3, 4], [mine])
    assert world.pool.num_users(mine) == 1


def test_a_tail_is_found_by_its_tokens_and_the_one_that_shares_most_wins() -> None:
    world = World(4)
    world.keep_tail(1, 5)
    world.keep_tail(2, 5, 6)
    world.keep_tail(3, 8, 6)
    root = world.tree.match("", [], limit=0).tip
    assert world.pool.find_tail(root, [5, 6, 7]) == (2, 2)
    assert world.pool.find_tail(root, [9]) is None
    world.pool.release_tail(2)
    assert world.pool.find_tail(root, [5, 6, 7]) == (1, 1)
    world.pool.check_invariants({})


def test_an_evicted_tail_is_not_found() -> None:
    world = World(1)
    world.keep_tail(1, 5)
    root = world.tree.match("", [], limit=0).tip
    world.pool.allocate(1)
    assert world.pool.find_tail(root, [5]) is None
