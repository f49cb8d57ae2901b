"""The tree of turns: paths, siblings, moves, and what the server tells of it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chatrt_tui.branches import Place, Tree, Turn


def body(name: str, parent: str | None = None, **more: Any) -> dict[str, Any]:
    def said(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}]}

    return {
        "id": name,
        "previous_response_id": parent,
        "status": "completed",
        "input": [said("user", f"ask {name}")],
        "output": [said("assistant", f"answer {name}")],
        **more,
    }


def tree_of(*bodies: dict[str, Any]) -> Tree:
    tree = Tree()
    tree.merge(bodies)
    return tree


def ids(turns: list[Turn]) -> list[str | None]:
    return [turn.id for turn in turns]


FORKED = (body("a"), body("b", "a"), body("c", "b"), body("d", "a"), body("e", "d"), body("f"))


def test_the_path_runs_from_a_first_turn_to_the_tip() -> None:
    tree = tree_of(*FORKED)
    assert tree.path == []
    tree.tip = tree.newest
    assert ids(tree.path) == ["f"]
    tree.tip = tree.find("c") or tree.root
    assert ids(tree.path) == ["a", "b", "c"]


def test_siblings_are_numbered_as_they_came() -> None:
    tree = tree_of(*FORKED)
    places = {turn.id: str(tree.place(turn)) for turn in map(tree.find, "abcdef") if turn}
    assert places == {"a": "1/2", "b": "1/2", "c": "1/1", "d": "2/2", "e": "1/1", "f": "2/2"}


def test_switching_shows_the_newest_branch_below_the_sibling() -> None:
    tree = tree_of(*FORKED)
    b = tree.find("b")
    assert b is not None
    other = tree.neighbour(b, 1)
    assert other is tree.find("d")
    assert other is not None
    assert ids(tree.path_to(tree.follow(other))) == ["a", "d", "e"]
    assert tree.neighbour(other, 1) is None
    assert tree.neighbour(other, -1) is b
    first = tree.find("a")
    assert first is not None
    assert tree.follow(first) is tree.find("e")  # the newest, not the deepest


def test_merging_takes_each_turn_once_and_moves_nobody() -> None:
    tree = tree_of(*FORKED[:3])
    tree.tip = tree.newest
    added = tree.merge(FORKED)
    assert ids(added) == ["d", "e", "f"]
    assert ids(tree.path) == ["a", "b", "c"]
    assert tree.merge(FORKED) == []
    assert len(tree) == 6


def test_merging_tells_a_known_turn_what_the_server_has_of_it() -> None:
    tree = Tree()
    turn = tree.add(Turn("(unknown)", tree.root, "a", status="in_progress"))
    tree.merge([body("a", status="cancelled")])
    assert (turn.question, turn.answer, turn.status) == ("ask a", "answer a", "cancelled")


def test_a_turn_behind_a_deleted_one_becomes_a_first_turn() -> None:
    tree = tree_of(body("c", "gone"), body("d", "c"))
    assert ids(tree.root.children) == ["c"]
    assert ids(tree.path_to(tree.newest)) == ["c", "d"]


def test_a_turn_that_no_history_has_is_dropped_and_the_tip_goes_before_it() -> None:
    tree = tree_of(*FORKED)
    tree.tip = tree.find("b") or tree.root
    refused = tree.add(Turn("too long", tree.tip))
    tree.tip = refused
    tree.drop(refused)
    assert tree.tip is tree.find("b")
    assert refused not in tree.tip.children
    assert len(tree) == 6


def test_a_turn_of_ours_is_found_once_it_has_a_name() -> None:
    tree = Tree()
    turn = tree.add(Turn("hi", tree.root))
    assert tree.find(None) is None
    tree.name(turn, "a")
    assert tree.find("a") is turn
    assert tree.merge([body("a")]) == []


def test_the_system_prompt_that_holds_is_the_last_one_said_on_the_way() -> None:
    tree = tree_of(*FORKED)
    a, c, e = (tree.find(name) or tree.root for name in "ace")
    assert tree.system_at(c) == ""
    a.system, c.system = "be brief", "be long"
    assert tree.system_at(c) == "be long"
    assert tree.system_at(e) == "be brief"
    assert tree.system_at(tree.root) == ""


def test_a_place_reads_as_people_count() -> None:
    assert str(Place(2, 3)) == "2/3"


@given(st.lists(st.integers(-1, 30), max_size=40), st.data())
def test_in_any_tree_following_a_turn_leads_to_a_leaf_through_it(
    parents: list[int], data: st.DataObject
) -> None:
    bodies = [
        body(str(n), None if parent < 0 else str(parent % max(n, 1)) if n else None)
        for n, parent in enumerate(parents)
    ]
    tree = tree_of(*bodies)
    assert len(tree) == len(parents)
    if not parents:
        return
    turn = tree.find(str(data.draw(st.integers(0, len(parents) - 1))))
    assert turn is not None
    tip = tree.follow(turn)
    assert not tip.children
    assert turn in tree.path
    newest = max(
        int(one.id or 0)
        for one in map(tree.find, map(str, range(len(parents))))
        if one and turn in tree.path_to(one)
    )
    assert tip.id == str(newest)
