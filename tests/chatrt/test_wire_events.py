from __future__ import annotations

import math
from typing import Any

import pytest
from openai.types.responses import Response
from openai.types.responses.responses_server_event import ResponsesServerEvent
from pydantic import TypeAdapter

from chatrt.errors import ChatrtError
from chatrt.params import SamplingParams
from chatrt.wire.encode import encode
from chatrt.wire.events import (
    AnswerEvents,
    ResponseFields,
    Usage,
    logprob_entry,
    message_item,
    response_body,
)
from chatrt.wire.ids import message_id
from chatrt.wire.log import DELTA, ResponseLog
from chatrt.wire.messages import ResponseCreate, decode

FIELDS = ResponseFields(model="m", created_at=1_700_000_000, temperature=0.5, top_p=0.9)
USAGE = Usage(input_tokens=7, output_tokens=2, cached_tokens=4, cache_write_tokens=3)
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
OPENING = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
CLOSING = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def answer(generates: bool = True) -> tuple[ResponseLog, AnswerEvents]:
    log = ResponseLog("resp_1", "key")
    return log, AnswerEvents(log, FIELDS, generates=generates)


def types(log: ResponseLog) -> list[str]:
    return [event["type"] for event in take_all(log)]


def take_all(log: ResponseLog) -> list[dict[str, Any]]:
    subscription = log.subscribe(lambda: None, stream_id="lane")
    events = []
    while (event := subscription.take()) is not None:
        events.append(event)
    return events


def check_with_the_sdk(events: list[dict[str, Any]]) -> None:
    for event in events:
        EVENTS.validate_json(encode(event), strict=True)
        if "response" in event:
            Response.model_validate_json(encode(event["response"]), strict=True)


def test_an_answer_has_the_documented_order_and_numbers() -> None:
    log, events = answer()
    events.start()
    events.delta("Hello")
    events.complete(USAGE)
    taken = take_all(log)
    assert [e["type"] for e in taken] == [*OPENING, DELTA, *CLOSING, "response.completed"]
    assert [e["sequence_number"] for e in taken] == list(range(9))


def test_the_sdks_types_accept_every_event_strictly() -> None:
    log, events = answer()
    events.start()
    events.delta("Hel", [logprob_entry(b"Hel", -0.5, [(b"Hel", -0.5), (b"Hi", -2.0)])])
    events.delta("lo", [logprob_entry(b"lo", -0.1)], {"t_ms": 3.5, "n": 1})
    events.complete(USAGE, lambda sent_ns: {"ttft_ms": 1.0, "clock": {"first_sent_ns": sent_ns}})
    check_with_the_sdk(take_all(log))


@pytest.mark.parametrize("how", ["incomplete", "cancelled", "failed"])
def test_the_sdks_types_accept_every_other_ending(how: str) -> None:
    log, events = answer()
    events.start()
    events.delta("Hel")
    if how == "incomplete":
        events.incomplete("max_output_tokens", USAGE)
    elif how == "cancelled":
        events.cancelled(USAGE)
    else:
        events.failed(ChatrtError("broken"), USAGE)
    taken = take_all(log)
    if how == "cancelled":
        # The SDK's type does not list the reason, which the protocol gives it.
        assert taken[-1]["response"]["incomplete_details"] == {"reason": "cancelled"}
        taken[-1]["response"]["incomplete_details"] = None
    check_with_the_sdk(taken)


def test_a_prefill_has_no_item_and_an_empty_output() -> None:
    log, events = answer(generates=False)
    events.start()
    events.complete(Usage(7, 0))
    taken = take_all(log)
    assert [e["type"] for e in taken] == [*OPENING[:2], "response.completed"]
    assert taken[-1]["response"]["output"] == []
    check_with_the_sdk(taken)


def test_the_terminal_response_has_the_whole_text_and_the_usage() -> None:
    log, events = answer()
    events.start()
    events.delta("Hel")
    events.delta("lo")
    events.complete(USAGE)
    response = take_all(log)[-1]["response"]
    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == "Hello"
    assert response["output"][0]["id"] == message_id("resp_1") == "msg_1"
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 3},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 9,
    }


def test_the_concatenated_deltas_are_the_text() -> None:
    log, events = answer()
    events.start()
    for text in ("a", "", "b", "c"):
        events.delta(text)
    events.complete(USAGE)
    taken = take_all(log)
    assert "".join(e["delta"] for e in taken if e["type"] == DELTA) == events.text == "abc"


def test_a_cancelled_answer_keeps_its_partial_output() -> None:
    log, events = answer()
    events.start()
    events.delta("Hel")
    events.cancelled(USAGE)
    terminal = take_all(log)[-1]
    assert terminal["type"] == "response.incomplete"
    assert terminal["response"]["status"] == "cancelled"
    assert terminal["response"]["output"][0]["status"] == "incomplete"
    assert terminal["response"]["output"][0]["content"][0]["text"] == "Hel"


def test_a_failed_answer_says_why() -> None:
    log, events = answer()
    events.start()
    events.failed(ChatrtError("the sentence", code="kv_exhausted"))
    terminal = take_all(log)[-1]
    assert terminal["type"] == "response.failed"
    assert terminal["response"]["error"] == {"code": "kv_exhausted", "message": "the sentence"}


def test_an_answer_cancelled_before_its_first_token_still_closes_its_item() -> None:
    log, events = answer()
    events.start()
    events.cancelled(Usage(7, 0))
    assert types(log) == [*OPENING, *CLOSING, "response.incomplete"]


def test_logprobs_of_a_token_without_text_go_out_with_the_next_text() -> None:
    log, events = answer()
    events.start()
    events.delta("", [logprob_entry(b"\xf0\x9f", -1.0)])
    assert log.num_events == len(OPENING)
    events.delta("🎉", [logprob_entry(b"\x8e\x89", -2.0)])
    events.delta("", [logprob_entry(b"", -3.0)])
    events.complete(USAGE)
    taken = take_all(log)
    sent = [e["logprob"] for event in taken if event["type"] == DELTA for e in event["logprobs"]]
    done = [entry["logprob"] for entry in taken[-4]["logprobs"]]
    assert sent == done == [-1.0, -2.0, -3.0]


def test_a_logprob_names_bytes_and_survives_json() -> None:
    entry = logprob_entry(b"\xf0a", -math.inf)
    assert entry["bytes"] == [0xF0, ord("a")]
    assert entry["token"] == "\\xf0a"
    assert entry["logprob"] == -9999.0
    assert entry["top_logprobs"] == []


def test_the_figures_are_made_when_the_terminal_event_goes_out() -> None:
    log, events = answer()
    events.start()
    events.delta("a")
    events.complete(USAGE, lambda sent_ns: {"first_sent_ns": sent_ns})
    log.mark_sent(42)
    assert take_all(log)[-1]["response"]["chatrt"] == {"first_sent_ns": 42}


def test_the_snapshot_follows_the_response() -> None:
    _, events = answer()
    events.start()
    assert events.snapshot()["status"] == "in_progress"
    events.delta("a")
    events.complete(USAGE)
    assert events.snapshot()["status"] == "completed"
    assert events.snapshot()["output"][0]["content"][0]["text"] == "a"


def test_the_fields_repeat_the_request() -> None:
    message = decode(
        '{"type":"response.create","input":"x","instructions":"be brief","temperature":0.5,'
        '"previous_response_id":"resp_0","metadata":{"a":"b"},"truncation":"auto","store":false}'
    )
    assert isinstance(message, ResponseCreate)
    sampling = message.sampling(SamplingParams(top_p=0.9))
    fields = ResponseFields.of(message, sampling, model="m", created_at=1, conversation_id="conv_1")
    body = response_body("resp_1", fields, status="completed", output=[message_item("resp_1", "x")])
    assert body["instructions"] == "be brief"
    assert (body["temperature"], body["top_p"]) == (0.5, 0.9)
    assert body["previous_response_id"] == "resp_0"
    assert body["conversation"] == {"id": "conv_1"}
    assert (body["metadata"], body["truncation"], body["store"]) == ({"a": "b"}, "auto", False)
    Response.model_validate_json(encode(body), strict=True)
