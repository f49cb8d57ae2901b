from __future__ import annotations

from typing import Any

import pytest

from chatrt.errors import UnsupportedParameter
from chatrt.wire.normalize import create_fields, deeper_than


def test_the_given_fields_are_not_changed() -> None:
    fields: dict[str, Any] = {"input": "a", "conversation": {"id": "c"}, "chatrt": {"stop": "x"}}
    create_fields(fields, 10)
    assert fields == {"input": "a", "conversation": {"id": "c"}, "chatrt": {"stop": "x"}}


def test_a_conversation_may_be_an_id_or_an_object() -> None:
    assert create_fields({"conversation": {"id": "c"}}, 10)["conversation"] == "c"
    assert create_fields({"conversation": "c"}, 10)["conversation"] == "c"


def test_plain_text_format_and_empty_tools_are_accepted() -> None:
    fields = {"text": {"format": {"type": "text"}, "verbosity": "low"}, "tools": []}
    assert create_fields(fields, 10)["input"] == []


def test_the_refusal_of_an_item_says_where_it_stands() -> None:
    items = [{"role": "user", "content": "a"}, {"type": "reasoning"}]
    with pytest.raises(UnsupportedParameter) as caught:
        create_fields({"input": items}, 10)
    assert caught.value.param == "input[1].type"


def test_depth_counts_lists_and_objects() -> None:
    assert not deeper_than({"a": [1, {"b": 2}]}, 3)
    assert deeper_than({"a": [1, {"b": 2}]}, 2)
    assert not deeper_than({}, 1)
