"""Keys, and the order in which a tier gives its pages up."""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatrt.archive import child_key, root_key
from chatrt.archive.host import HostPages
from chatrt.archive.index import IndexEntry, PageIndex
from tests.chatrt.archive_support import path_of


def test_a_key_is_a_hash_of_its_parent_and_the_exact_ids() -> None:
    parent = bytes(range(16))
    packed = b"\x01\0\0\0\xff\xff\xff\xff\0\0\1\0"
    assert child_key(parent, [1, -1, 65536]) == blake2b(parent + packed, digest_size=16).digest()
    assert child_key(parent, [1, 2]) != child_key(parent, [2, 1])
    assert len(root_key("m", "")) == 16
    with pytest.raises(struct.error):
        child_key(parent, [2**31])


def test_salts_and_models_never_meet() -> None:
    names = ["", "a", "ab", "b", "a\0b"]
    roots = {root_key(model, salt) for model in names for salt in names}
    assert len(roots) == len(names) ** 2


def test_the_end_of_the_sequence_that_was_used_last_long_ago_goes_first() -> None:
    index = PageIndex()
    old, new = path_of(1, 2, 3), path_of(4, 5)
    for now, record in enumerate([*old, *new]):
        index.add(IndexEntry(record.key, record.parent, 10, float(now)))
    order = []
    while (leaf := index.oldest_leaf()) is not None:
        order.append(leaf.key)
        index.remove(leaf.key)
    assert order == [r.key for r in [*reversed(old), *reversed(new)]]
    assert index.num_bytes == 0


def test_a_touched_page_is_young_and_a_clock_that_goes_back_makes_nothing_old() -> None:
    index = PageIndex()
    one, other = path_of(1)[0], path_of(2)[0]
    index.add(IndexEntry(one.key, one.parent, 1, 1.0))
    index.add(IndexEntry(other.key, other.parent, 1, 2.0))
    index.touch(one.key, 3.0)
    index.touch(one.key, 0.0)
    index.touch(b"unknown", 9.0)
    leaf = index.oldest_leaf()
    assert leaf is not None
    assert leaf.key == other.key
    assert index.oldest_leaf(spare=other.key) is index.get(one.key)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 15), st.integers(0, 99)),
        min_size=1,
        max_size=60,
    )
)
def test_the_offered_leaf_is_the_oldest_of_all_leaves(steps: list[tuple[int, int, int]]) -> None:
    index = PageIndex()
    # A binary tree of pages by number; parents need not be held.
    names = [bytes([number]) * 16 for number in range(16)]
    for action, number, now in steps:
        key, parent = names[number], names[number // 2]
        if action == 0 and key not in index and number:
            index.add(IndexEntry(key, parent, 1, float(now)))
        elif action == 1:
            index.touch(key, float(now))
        elif action == 2:
            index.remove(key)
        entries = [entry for key in index if (entry := index.get(key)) is not None]
        parents = {entry.parent for entry in entries}
        leaves = [entry for entry in entries if entry.key not in parents]
        leaf = index.oldest_leaf()
        assert (leaf is None) == (not leaves)
        if leaf is not None:
            assert leaf in leaves
            assert leaf.last_used_s == min(entry.last_used_s for entry in leaves)
            spared = index.oldest_leaf(spare=leaf.key)
            rest = [entry.last_used_s for entry in leaves if entry is not leaf]
            assert (spared is None) == (not rest)
            assert spared is None or spared.last_used_s == min(rest)
        assert index.num_bytes == len(entries)


def test_touching_the_same_leaf_often_does_not_grow_the_index() -> None:
    index = PageIndex()
    (record,) = path_of(1)
    index.add(IndexEntry(record.key, record.parent, 1, 0.0))
    for now in range(1000):
        index.touch(record.key, float(now))
    assert len(index._leaves) < 100


def test_host_memory_keeps_the_front_of_a_sequence_that_is_longer_than_it() -> None:
    host = HostPages(35)
    other = path_of(9)[0]
    assert host.add(other.key, other.parent, bytes(10), now_s=0.0)
    records = path_of(1, 2, 3, 4, 5)
    kept = [
        host.add(record.key, record.parent, bytes(10), now_s=float(now))
        for now, record in enumerate(records, 1)
    ]
    assert kept == [True, True, True, False, False]
    assert other.key not in host
    assert host.num_evicted == 1
    assert host.index.num_bytes == 30


def test_a_page_larger_than_host_memory_is_not_kept() -> None:
    host = HostPages(9)
    (record,) = path_of(1)
    assert not host.add(record.key, record.parent, bytes(10), now_s=0.0)
    assert host.get(record.key) is None
