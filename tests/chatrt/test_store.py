from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatrt.errors import NotFound, StoreError
from chatrt.store import Store, StoredTurn
from chatrt.store.records import input_messages, pack_ids, unpack_ids

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = "key"
SECRET = "the cat sleeps under the staircase"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "conversations.sqlite3"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path) as store:
        yield store


def turn(
    response_id: str,
    parent_id: str | None = None,
    *,
    at: float = 1.0,
    conversation_id: str | None = None,
    key_id: str = KEY,
    asked: str = "hello",
    text: str = "hi",
) -> StoredTurn:
    return StoredTurn(
        response_id=response_id,
        parent_id=parent_id,
        conversation_id=conversation_id,
        key_id=key_id,
        model="tiny",
        instructions="be brief",
        input_json='[{"role": "user", "content": "' + asked + '"}]',
        prompt_ids=(1, 2, 3),
        output_ids=(4, 5),
        text=text,
        status="completed",
        usage_json='{"total_tokens": 5}',
        timing_json='{"ttft_ms": 1.5}',
        created_at=at,
        seed=2**63 - 1,
    )


def conversation_with_two_turns(store: Store, name: str = "conv", at: float = 1.0) -> None:
    store.create_conversation(name, KEY, created_at=at, title=f"about {name}").result()
    store.save_turn(turn(f"{name}1", at=at + 1, conversation_id=name)).result()
    store.save_turn(
        turn(f"{name}2", f"{name}1", at=at + 2, conversation_id=name, asked="more", text="done")
    ).result()


def bytes_of_all_files(path: Path) -> bytes:
    return b"".join(one.read_bytes() for one in sorted(path.parent.iterdir()))


# Turns


def test_a_saved_turn_comes_back_as_it_was(store: Store) -> None:
    saved = turn("resp_1")
    store.save_turn(saved).result()
    assert store.load_turn("resp_1", KEY) == saved
    assert store.load_turn("resp_2", KEY) is None


def test_a_chain_is_root_first_and_follows_one_branch(store: Store) -> None:
    for one in (turn("a"), turn("b", "a"), turn("c", "b"), turn("fork", "a")):
        store.save_turn(one).result()
    assert [one.response_id for one in store.chain("c", KEY)] == ["a", "b", "c"]
    assert [one.response_id for one in store.chain("fork", KEY)] == ["a", "fork"]


def test_a_chain_of_thousands_of_turns_is_whole(store: Store) -> None:
    names = [f"r{number}" for number in range(3000)]
    parents = [None, *names]
    done = [
        store.save_turn(turn(name, parent)) for name, parent in zip(names, parents, strict=False)
    ]
    wait(done)
    assert [one.response_id for one in store.chain(names[-1], KEY)] == names


def test_a_chain_with_a_deleted_turn_is_refused_by_name(store: Store) -> None:
    for one in (turn("a"), turn("b", "a"), turn("c", "b")):
        store.save_turn(one).result()
    store.delete_turn("b", KEY).result()
    with pytest.raises(NotFound, match="c builds on b, which was deleted"):
        store.chain("c", KEY)
    with pytest.raises(NotFound, match="b does not exist"):
        store.chain("b", KEY)


def test_a_turn_that_is_saved_twice_is_an_error_and_stays_as_it_was(store: Store) -> None:
    store.save_turn(turn("a", text="first")).result()
    with pytest.raises(StoreError, match="UNIQUE"):
        store.save_turn(turn("a", text="second")).result()
    kept = store.load_turn("a", KEY)
    assert kept is not None
    assert kept.text == "first"


def test_a_turn_saved_for_a_deleted_conversation_is_refused(store: Store) -> None:
    conversation_with_two_turns(store)
    store.delete_conversation("conv", KEY).result()
    with pytest.raises(NotFound, match="conv does not exist"):
        store.save_turn(turn("late", conversation_id="conv")).result()
    assert store.load_turn("late", KEY) is None


def test_turns_survive_closing_and_opening(path: Path) -> None:
    with Store.open(path) as store:
        store.save_turn(turn("a"))
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    with Store.open(path) as store:
        assert store.load_turn("a", KEY) == turn("a")


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_unpacking_packed_ids_gives_the_same_ids(token_ids: list[int]) -> None:
    assert unpack_ids(pack_ids(token_ids)) == tuple(token_ids)


def test_ids_lie_on_disk_as_little_endian_int32() -> None:
    assert pack_ids([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"


@pytest.mark.parametrize(
    ("input_json", "messages"),
    [
        ('"hello"', [("user", "hello")]),
        ('[{"role": "system", "content": "be kind"}]', [("system", "be kind")]),
        (
            '[{"type": "message", "role": "user", "content": '
            '[{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}]',
            [("user", "ab")],
        ),
        ('[{"type": "item_reference", "id": "x"}, 3]', []),
        ("null", []),
    ],
)
def test_input_is_read_in_each_form_of_the_api(
    input_json: str, messages: list[tuple[str, str]]
) -> None:
    assert input_messages(input_json) == messages


# Conversations


def test_conversations_are_listed_newest_first_with_their_figures(store: Store) -> None:
    conversation_with_two_turns(store, "old", at=1.0)
    conversation_with_two_turns(store, "new", at=5.0)
    store.create_conversation("empty", KEY, created_at=2.0).result()
    listed = store.list_conversations(KEY)
    assert [one.conversation_id for one in listed] == ["new", "old", "empty"]
    assert (listed[0].title, listed[0].num_turns, listed[0].last_response_id) == (
        "about new",
        2,
        "new2",
    )
    assert (listed[0].created_at, listed[0].updated_at) == (5.0, 7.0)
    assert (listed[2].num_turns, listed[2].last_response_id) == (0, None)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("ABOUT A", ["a"]),
        ("straße", ["b"]),
        ("STRASSE", ["b"]),
        ("100%", ["b"]),
        ("answer", ["a"]),
        ("role", []),
        ("%", ["b"]),
        ("_", []),
        ("  ", ["b", "a"]),
    ],
)
def test_search_finds_titles_questions_and_answers(
    store: Store, query: str, found: list[str]
) -> None:
    for name, at in (("a", 1.0), ("b", 2.0)):
        store.create_conversation(name, KEY, created_at=at, title=f"about {name}").result()
    store.save_turn(turn("r1", conversation_id="a", text="an Answer", at=1.0)).result()
    store.save_turn(turn("r2", conversation_id="b", asked="100% Straße", at=2.0)).result()
    assert [one.conversation_id for one in store.list_conversations(KEY, query)] == found


def test_a_renamed_conversation_shows_its_new_title(store: Store) -> None:
    conversation_with_two_turns(store)
    store.update_conversation("conv", KEY, title="another").result()
    assert store.list_conversations(KEY)[0].title == "another"
    with pytest.raises(NotFound):
        store.update_conversation("none", KEY, title="x").result()


def test_items_are_the_messages_of_the_newest_branch(store: Store) -> None:
    conversation_with_two_turns(store)
    regenerated = turn(
        "again", "conv1", at=9.0, conversation_id="conv", asked="more", text="redone"
    )
    store.save_turn(regenerated).result()
    items = store.items("conv", KEY)
    assert [(one.role, one.text, one.response_id) for one in items] == [
        ("user", "hello", "conv1"),
        ("assistant", "hi", "conv1"),
        ("user", "more", "again"),
        ("assistant", "redone", "again"),
    ]
    assert len({one.item_id for one in items}) == 4
    assert items[1].as_dict() == {
        "type": "message",
        "id": "msg_conv1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "hi"}],
        "response_id": "conv1",
    }


def test_items_of_a_conversation_with_a_deleted_turn_start_behind_it(store: Store) -> None:
    conversation_with_two_turns(store)
    store.delete_turn("conv1", KEY).result()
    assert [one.text for one in store.items("conv", KEY)] == ["more", "done"]


def test_items_of_an_empty_and_of_an_unknown_conversation(store: Store) -> None:
    store.create_conversation("empty", KEY, created_at=1.0).result()
    assert store.items("empty", KEY) == []
    with pytest.raises(NotFound, match="none does not exist"):
        store.items("none", KEY)


def test_a_deleted_conversation_leaves_none_of_its_text_in_any_file(
    store: Store, path: Path
) -> None:
    conversation_with_two_turns(store, "kept")
    store.create_conversation("conv", KEY, created_at=1.0, title=SECRET).result()
    store.save_turn(turn("r", conversation_id="conv", asked=SECRET, text=SECRET * 500)).result()
    assert SECRET.encode() in bytes_of_all_files(path)
    assert store.delete_conversation("conv", KEY).result() == ("r",)
    assert SECRET.encode() not in bytes_of_all_files(path)
    assert store.load_turn("r", KEY) is None
    assert [one.conversation_id for one in store.list_conversations(KEY)] == ["kept"]


def test_a_deleted_turn_leaves_none_of_its_text_in_any_file(store: Store, path: Path) -> None:
    store.save_turn(turn("r", text=SECRET)).result()
    store.delete_turn("r", KEY).result()
    assert SECRET.encode() not in bytes_of_all_files(path)


def test_another_key_sees_and_changes_nothing(store: Store) -> None:
    conversation_with_two_turns(store)
    other = "other"
    assert store.load_turn("conv1", other) is None
    assert store.list_conversations(other) == []
    assert store.list_conversations(other, "hello") == []
    assert not store.has_conversation("conv", other)
    for read in (
        lambda: store.chain("conv2", other),
        lambda: store.items("conv", other),
        lambda: store.newest_response_id("conv", other),
    ):
        with pytest.raises(NotFound):
            read()
    foreign = turn("x", conversation_id="conv", key_id=other)
    for write in (
        store.delete_turn("conv1", other),
        store.delete_conversation("conv", other),
        store.update_conversation("conv", other, title="mine"),
        store.save_turn(foreign),
    ):
        with pytest.raises(NotFound):
            write.result()
    assert len(store.chain("conv2", KEY)) == 2
    assert store.list_conversations(KEY)[0].title == "about conv"


def test_a_chain_does_not_lead_into_another_keys_turns(store: Store) -> None:
    store.save_turn(turn("theirs", key_id="other", text=SECRET)).result()
    store.save_turn(turn("mine", "theirs")).result()
    with pytest.raises(NotFound, match="mine builds on theirs"):
        store.chain("mine", KEY)


def test_a_clock_that_is_set_back_does_not_hide_the_last_turn(store: Store) -> None:
    conversation_with_two_turns(store, at=1000.0)
    store.save_turn(turn("late", "conv2", at=5.0, conversation_id="conv", text="last")).result()
    assert store.newest_response_id("conv", KEY) == "late"
    assert store.items("conv", KEY)[-1].text == "last"
