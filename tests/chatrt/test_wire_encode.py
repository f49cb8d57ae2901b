from __future__ import annotations

import json

import pytest

from chatrt.wire.encode import encode
from chatrt.wire.messages import ResponseCancel


def test_an_event_is_one_line_of_utf8_json() -> None:
    frame = encode({"type": "x", "delta": "é\n🎉"})
    assert b"\n" not in frame
    assert json.loads(frame.decode()) == {"type": "x", "delta": "é\n🎉"}


def test_a_message_carries_its_type_and_leaves_out_defaults() -> None:
    assert json.loads(encode(ResponseCancel(response_id="r"))) == {
        "type": "response.cancel",
        "response_id": "r",
    }


def test_numbers_that_json_lacks_become_null() -> None:
    assert json.loads(encode({"x": float("inf")})) == {"x": None}


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        encode({"x": "\ud800"})
