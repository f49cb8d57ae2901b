"""Bad requests to a real server: a clear sentence each, and nothing else is harmed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from websockets.exceptions import InvalidStatus

from tests.e2e.conftest import TINY_CONTEXT
from tests.e2e.process import turn

if TYPE_CHECKING:
    from tests.e2e.process import ServerProcess

pytestmark = pytest.mark.slow

CREATE = {"type": "response.create", "input": "hello", "max_output_tokens": 4}
# what is sent, the error's code, what its sentence names
BAD: dict[str, tuple[object, str, str]] = {
    "no JSON": ("{", "invalid_value", "JSON"),
    "a JSON list": ("[1]", "invalid_value", "object"),
    "not UTF-8": (b'{"type": "\xff"}', "invalid_value", ""),
    "deep JSON": ("[" * 100_000, "invalid_value", "64"),
    "no type": ({"input": "x"}, "invalid_value", "type"),
    "unknown type": ({"type": "response.crate"}, "invalid_value", "response.crate"),
    "no input": ({"type": "response.create"}, "invalid_value", "input"),
    "a number as input": ({**CREATE, "input": 5}, "invalid_value", "input"),
    "a text as temperature": ({**CREATE, "temperature": "hot"}, "invalid_value", "temperature"),
    "temperature below 0": ({**CREATE, "temperature": -1}, "invalid_value", "-1"),
    "temperature of NaN": (
        '{"type": "response.create", "input": "x", "temperature": NaN}',
        "invalid_value",
        "",
    ),
    "top_p above 1": ({**CREATE, "top_p": 1.5}, "invalid_value", "1.5"),
    "no output token": ({**CREATE, "max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
    "a huge number": ({**CREATE, "max_output_tokens": 10**30}, "invalid_value", ""),
    "too many output tokens": ({**CREATE, "max_output_tokens": 10**6}, "invalid_value", "1000000"),
    "too many logprobs": ({**CREATE, "top_logprobs": 1000}, "invalid_value", "top_logprobs"),
    "unknown role": (
        {**CREATE, "input": [{"role": "robot", "content": "x"}]},
        "invalid_value",
        "role",
    ),
    "tools": ({**CREATE, "tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
    "unknown model": ({**CREATE, "model": "gpt-9"}, "model_not_found", "gpt-9"),
    "unknown parent": (
        {**CREATE, "previous_response_id": "resp_0"},
        "previous_response_not_found",
        "resp_0",
    ),
    "unknown conversation": ({**CREATE, "conversation": "conv_0"}, "not_found", "conv_0"),
    "bad lane": ({**CREATE, "stream_id": "a b"}, "invalid_stream_id", ""),
    "unknown response to cancel": (
        {"type": "response.cancel", "response_id": "resp_0"},
        "not_found",
        "resp_0",
    ),
    "a seed that is a text": (
        {**CREATE, "chatrt": {"seed": "x"}},
        "invalid_value",
        "seed",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request_gets_a_sentence_and_the_connection_goes_on(
    name: str, tiny_server: ServerProcess
) -> None:
    sent, code, named = BAD[name]
    async with tiny_server.caller() as caller:
        frame = sent if isinstance(sent, bytes | str) else json.dumps(sent)
        await caller.socket.send(frame, text=True)
        reply = (await caller.until())[-1]
        assert reply["type"] == "error", reply
        assert reply["error"]["code"] == code, reply
        assert named in reply["error"]["message"]
        assert reply["status"] in (400, 404)
        after = await turn(caller, "hello", max_output_tokens=2)
        assert after["response"]["usage"]["output_tokens"] == 2


async def test_a_bad_request_does_not_touch_the_answer_on_another_lane(
    tiny_server: ServerProcess,
) -> None:
    async with tiny_server.caller() as caller:
        await caller.create("hello", stream_id="good", temperature=0, max_output_tokens=100)
        for name in BAD:
            sent = BAD[name][0]
            await caller.socket.send(
                sent if isinstance(sent, bytes | str) else json.dumps(sent), text=True
            )
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] != "response.incomplete":
            events.append(await caller.receive())
    assert events[-1]["stream_id"] == "good"
    assert events[-1]["response"]["usage"]["output_tokens"] == 100


async def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(
    tiny_server: ServerProcess,
) -> None:
    async with tiny_server.caller() as caller:
        await caller.create("z" * (TINY_CONTEXT + 100))
        error = (await caller.until())[-1]["error"]
        assert error["code"] == "context_length_exceeded"
        assert str(TINY_CONTEXT) in error["message"]
        num_tokens = [int(word) for word in error["message"].split() if word.isdigit()]
        assert max(num_tokens) > TINY_CONTEXT + 100
        whole = await turn(caller, "z" * (TINY_CONTEXT - 40), max_output_tokens=2)
        assert whole["response"]["usage"]["output_tokens"] == 2


async def test_an_answer_ends_where_the_context_does(tiny_server: ServerProcess) -> None:
    async with tiny_server.caller() as caller:
        ended = await turn(caller, "z" * (TINY_CONTEXT - 40), max_output_tokens=200)
    usage = ended["response"]["usage"]
    assert ended["type"] == "response.incomplete"
    assert usage["total_tokens"] == TINY_CONTEXT


async def test_a_frame_of_more_than_4_mib_closes_only_its_own_connection_with_1009(
    tiny_server: ServerProcess,
) -> None:
    async with tiny_server.caller() as other, tiny_server.caller() as caller:
        await caller.create("x" * (4 * 2**20 + 1))
        assert await caller.until_closed() == 1009
        assert (await turn(other, "hello", max_output_tokens=2))["response"]["output"]


async def test_a_wrong_key_is_refused_before_the_upgrade_and_on_every_route(
    tiny_server: ServerProcess,
) -> None:
    headers = {"Authorization": "Bearer wrong"}
    with pytest.raises(InvalidStatus) as refused:
        async with tiny_server.caller(additional_headers=headers):
            pass
    assert refused.value.response.status_code == 401
    for path in ("/metrics", "/v1/models", "/v1/conversations", "/v1/responses/resp_0"):
        assert tiny_server.get(path, key="wrong").status == 401, path


async def test_a_web_page_of_another_origin_is_refused(tiny_server: ServerProcess) -> None:
    for origin in ("https://example.com", "null"):
        with pytest.raises(InvalidStatus) as refused:
            async with tiny_server.caller(origin=origin):
                pass
        assert refused.value.response.status_code == 403
