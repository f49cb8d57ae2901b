from __future__ import annotations

import pytest
from openai.types.responses.responses_server_event import ResponseWsError

from chatrt.errors import ChatrtError, InvalidValue, NotFound, OutOfPages, Overloaded
from chatrt.wire.encode import encode
from chatrt.wire.errors import error_event, internal_error


def test_an_error_event_has_status_type_code_message_and_param() -> None:
    assert error_event(InvalidValue("top_k is -1", param="top_k")) == {
        "type": "error",
        "status": 400,
        "error": {
            "type": "invalid_request_error",
            "code": "invalid_value",
            "message": "top_k is -1",
            "param": "top_k",
        },
    }


def test_the_stream_id_is_there_exactly_if_it_is_known() -> None:
    assert error_event(NotFound("x"), "lane")["stream_id"] == "lane"
    assert "stream_id" not in error_event(NotFound("x"))


def test_an_error_about_a_half_typed_prompt_says_so() -> None:
    assert error_event(NotFound("x"), "lane", partial=True)["chatrt"] == {"partial": True}
    assert "chatrt" not in error_event(NotFound("x"), "lane")


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (NotFound("x", code="previous_response_not_found"), "invalid_request_error", 404),
        (Overloaded("x"), "rate_limit_error", 429),
        (OutOfPages(1, 2, 3, 4), "rate_limit_error", 429),
        (internal_error(), "server_error", 500),
    ],
)
def test_the_sdks_type_accepts_every_kind(error: ChatrtError, kind: str, status: int) -> None:
    event = ResponseWsError.model_validate_json(encode(error_event(error)), strict=True)
    assert (event.error.type, event.status, event.error.code) == (kind, status, error.code)
