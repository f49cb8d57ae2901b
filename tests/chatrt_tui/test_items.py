from __future__ import annotations

from typing import Any

from chatrt_tui.items import item_text, texts_of


def message(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def test_the_parts_of_a_message_are_one_text() -> None:
    assert item_text(message("user", "a", "b")) == "ab"
    assert item_text({"role": "user"}) == ""


def test_a_turn_says_what_each_role_said_in_it() -> None:
    turn = {
        "input": [message("system", "be brief"), message("user", "one"), message("user", "two")],
        "output": [message("assistant", "three")],
    }
    assert texts_of(turn, "user") == "one\n\ntwo"
    assert texts_of(turn, "system") == "be brief"
    assert texts_of(turn, "assistant", of="output") == "three"
    assert texts_of(turn, "assistant") == ""
    assert texts_of({}, "user") == ""
