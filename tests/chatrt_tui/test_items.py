"""Reading the messages of a conversation as the server lists them."""

from __future__ import annotations

from typing import Any

from chatrt_tui.items import item_text, items_behind, newest_id, questions_of


def message(role: str, text: str, response_id: str | None) -> dict[str, Any]:
    return {"role": role, "content": [{"text": text}], "response_id": response_id}


ONE = [message("user", "q1", "r1"), message("assistant", "a1", "r1")]
TWO = [message("system", "be kind", "r2"), message("user", "q2", "r2")]


def test_the_text_of_a_message_is_all_of_its_parts() -> None:
    assert item_text({"content": [{"text": "a"}, {"type": "image"}, {"text": "b"}]}) == "ab"
    assert item_text({"content": None}) == ""


def test_the_newest_response_is_that_of_the_last_message_that_has_one() -> None:
    assert newest_id([*ONE, *TWO, message("user", "x", None)]) == "r2"
    assert newest_id([]) is None


def test_the_question_of_a_turn_is_what_the_person_said_in_it() -> None:
    assert questions_of([*ONE, *TWO], "r2") == ["q2"]
    assert questions_of(ONE, "r2") == []


def test_what_is_behind_a_turn_is_known_unless_it_is_on_another_branch() -> None:
    assert items_behind([*ONE, *TWO], "r1") == TWO
    assert items_behind([*ONE, *TWO], "r2") == []
    assert items_behind([*ONE, *TWO], None) == [*ONE, *TWO]
    assert items_behind(ONE, "r2") is None
    assert items_behind([], "r1") == []  # nothing is known of it
