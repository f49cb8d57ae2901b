"""Tests of chatrt.prefix. Pages of 4 tokens; a letter is a token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatrt.pages import PageAllocator
from chatrt.prefix import PrefixNode, PrefixTree

PAGE_SIZE = 4


class World:
    """A tree, and holders that come and go."""

    def __init__(self, num_pages: int = 32) -> None:
        self.allocator = PageAllocator(num_pages)
        self.tree = PrefixTree(self.allocator, PAGE_SIZE)

    def cache(self, text: str, salt: str = "") -> list[int]:
        """Makes a text's full pages known and gives the own references back."""
        page_ids = self.allocator.allocate(len(text) // PAGE_SIZE)
        self.tree.insert(salt, ids(text), page_ids)
        for page_id in page_ids:
            self.allocator.release(page_id)
        return page_ids

    def tip(self, text: str, salt: str = "") -> PrefixNode:
        return self.tree.match(salt, ids(text), limit=len(text)).tip

    def num_known(self, text: str, salt: str = "") -> int:
        return self.tree.match(salt, ids(text), limit=len(text)).num_tokens


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_match_finds_full_pages_and_the_leading_rows_of_one_more() -> None:
    world = World()
    page_ids = world.cache("aaaabbbbcccc")
    match = world.tree.match("", ids("aaaabbbbccXX"), limit=12)
    assert match.page_ids == tuple(page_ids[:2])
    assert (match.partial_page_id, match.num_partial, match.num_tokens) == (page_ids[2], 2, 10)


def test_match_ends_at_the_limit_even_inside_a_page() -> None:
    world = World()
    page_ids = world.cache("aaaabbbb")
    match = world.tree.match("", ids("aaaabbbb"), limit=7)
    assert match.page_ids == tuple(page_ids[:1])
    assert (match.partial_page_id, match.num_partial) == (page_ids[1], 3)


def test_match_inside_a_page_takes_the_sibling_that_shares_most() -> None:
    world = World()
    world.cache("abxx")
    (best,) = world.cache("abcd")
    world.cache("azzz")
    match = world.tree.match("", ids("abcz"), limit=4)
    assert (match.partial_page_id, match.num_partial) == (best, 3)


def test_match_of_an_unknown_text_is_empty() -> None:
    world = World()
    world.cache("aaaa")
    match = world.tree.match("", ids("bbbb"), limit=4)
    assert (match.page_ids, match.partial_page_id, match.num_tokens) == ((), None, 0)


def test_one_salt_never_sees_the_pages_of_another() -> None:
    world = World()
    world.cache("aaaabbbb", salt="key 1")
    assert world.num_known("aaaabbbb", salt="key 2") == 0
    assert world.num_known("aaaabbbb", salt="key 1") == 8


def test_insert_keeps_the_known_page_and_leaves_the_duplicate_to_its_owner() -> None:
    world = World()
    known = world.cache("aaaabbbb")
    own = world.allocator.allocate(3)
    world.tree.insert("", ids("aaaabbbbcccc"), own)
    match = world.tree.match("", ids("aaaabbbbcccc"), limit=12)
    assert match.page_ids == (*known, own[2])
    assert [world.allocator.num_sharers(page_id) for page_id in own] == [1, 1, 2]


def test_insert_leaves_out_what_does_not_fill_a_page() -> None:
    world = World()
    own = world.allocator.allocate(2)
    world.tree.insert("", ids("aaaabbb"), own)
    assert world.tree.num_cached == 1
    assert not world.tree.knows(own[1])


def test_insert_continues_behind_the_pages_that_are_known() -> None:
    world = World()
    world.cache("aaaa")
    own = world.allocator.allocate(2)
    world.tree.insert("", ids("aaaabbbb"), own, start_page=1)
    assert world.num_known("aaaabbbb") == 8
    with pytest.raises(AssertionError):
        world.tree.insert("", ids("xxxxyyyy"), own, start_page=1)


def test_evict_takes_leaves_first_and_the_shared_prefix_last() -> None:
    world = World()
    world.cache("sysssysx" + "aaaa")
    world.cache("sysssysx" + "bbbb")
    assert world.tree.evict(2) == 2
    assert world.num_known("sysssysx") == 8
    assert world.tree.evict(10) == 2
    assert world.tree.num_cached == 0
    assert world.allocator.num_free == world.allocator.num_pages


def test_evict_takes_the_least_recently_used_leaf_first() -> None:
    world = World()
    for text in ("aaaa", "bbbb", "cccc"):
        world.cache(text)
    world.num_known("aaaa")
    world.tree.evict(1)
    assert world.num_known("bbbb") == 0
    world.tree.evict(1)
    assert world.num_known("cccc") == 0
    assert world.num_known("aaaa") == 4


def test_a_front_stays_as_young_as_the_page_that_was_forgotten_behind_it() -> None:
    world = World()
    world.cache("aaaabbbb")
    front = world.tip("aaaa")
    world.tree.mark(front)
    world.cache("cccc")
    world.num_known("aaaabbbb")
    assert world.tree.wipe("", ids("aaaabbbb")) == 1
    world.tree.evict(1)
    assert (world.num_known("aaaa"), world.num_known("cccc")) == (4, 0)


def test_a_held_path_is_not_evictable_and_what_hangs_below_it_is() -> None:
    world = World()
    world.cache("aaaabbbbcccc")
    middle = world.tip("aaaabbbb")
    world.tree.hold(middle)
    assert world.tree.num_evictable == 1
    assert world.tree.evict(3) == 1
    assert world.num_known("aaaabbbbcccc") == 8
    world.tree.unhold(middle)
    assert world.tree.num_evictable == 2
    assert world.tree.evict(3) == 2


def test_wipe_stops_where_another_path_branches_off() -> None:
    world = World()
    world.cache("aaaabbbbcccc")
    world.cache("aaaadddd")
    assert world.tree.wipe("", ids("aaaabbbbcccc")) == 2
    assert world.num_known("aaaadddd") == 8


@pytest.mark.parametrize("verb", ["hold", "mark"])
def test_wipe_stops_where_another_holds_or_marks_the_path(verb: str) -> None:
    world = World()
    world.cache("aaaabbbbcccc")
    getattr(world.tree, verb)(world.tip("aaaa"))
    assert world.tree.wipe("", ids("aaaabbbbcccc")) == 2
    assert world.num_known("aaaabbbb") == 4


def test_a_mark_moves_to_the_front_when_its_page_is_evicted() -> None:
    world = World()
    world.cache("aaaabbbb")
    tip = world.tip("aaaabbbb")
    world.tree.mark(tip)
    world.tree.evict(1)
    assert world.tree.wipe("", ids("aaaa")) == 0
    world.tree.unmark(tip)
    assert world.tree.wipe("", ids("aaaa")) == 1


def test_outdated_ages_do_not_pile_up() -> None:
    world = World()
    world.cache("aaaa")
    for _ in range(1000):
        world.num_known("aaaa")
    assert len(world.tree._leaves) <= 2 * world.tree.num_cached + 64


texts = st.text(alphabet="ab", max_size=14)


@settings(max_examples=100, deadline=None)
@given(known=st.lists(texts, max_size=8), asked=texts, limit=st.integers(0, 16))
def test_match_agrees_with_comparing_all_known_texts(
    known: list[str], asked: str, limit: int
) -> None:
    world = World(64)
    for text in known:
        world.cache(text)
    cut = asked[:limit]
    full = [text[: len(text) // PAGE_SIZE * PAGE_SIZE] for text in known]
    shared = [_num_shared(cut, text) for text in full]
    match = world.tree.match("", ids(asked), limit=limit)
    assert match.num_tokens == max(shared, default=0)
    assert match.num_partial == match.num_tokens - PAGE_SIZE * len(match.page_ids)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_num_evictable_is_exactly_what_repeated_eviction_frees(data: st.DataObject) -> None:
    world = World(128)
    held = []
    for text in data.draw(st.lists(texts, max_size=8)):
        world.cache(text)
        if data.draw(st.booleans()):
            held.append(world.tip(text))
            world.tree.hold(held[-1])
    for node in data.draw(st.lists(st.sampled_from(held), unique_by=id)) if held else []:
        world.tree.unhold(node)
        held.remove(node)
    world.tree.check_invariants()
    in_use = {id(node.ancestor(depth)) for node in held for depth in range(1, node.depth + 1)}
    unused = [node for node in world.tree.nodes() if id(node) not in in_use]
    assert world.tree.num_evictable == len(unused)
    assert world.tree.evict(1000) == len(unused)
    assert world.tree.num_evictable == 0
    world.tree.check_invariants()


def _num_shared(left: str, right: str) -> int:
    num = 0
    while num < min(len(left), len(right)) and left[num] == right[num]:
        num += 1
    return num
