"""The lane sessions of the unmodified openai SDK, asynchronous and threaded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.lib.responses_websocket import (
    AsyncResponsesWebSocketSession,
    ResponsesWebSocketError,
    ResponsesWebSocketSession,
)

from tests.clients.lanes import LIMITS, create
from tests.support import time_scale

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from openai.lib.responses_websocket import AsyncResponsesWebSocketLane

    from tests.e2e.process import ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def cancel(response_id: str) -> Any:
    """A message that the SDK carries though its types do not know it."""
    return {"type": "response.cancel", "response_id": response_id}


@pytest.fixture
async def session(server: ServerProcess) -> AsyncIterator[AsyncResponsesWebSocketSession]:
    async with (
        AsyncOpenAI(api_key=server.api_key, base_url=server.base_url) as client,
        client.responses.connect() as connection,
        AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        yield session


async def read(lane: AsyncResponsesWebSocketLane, order: list[str | None]) -> Any:
    """The terminal event of a lane's answer; whose delta came when goes into `order`."""
    while True:
        event: Any = await lane.recv()
        if event.type == "response.output_text.delta":
            order.append(event.stream_id)
        if event.type in ENDS:
            return event


async def test_two_lanes_fork_one_tip_and_their_answers_interleave(
    session: AsyncResponsesWebSocketSession,
) -> None:
    lanes = [session.lane(name) for name in ("source", "fork")]
    await lanes[0].send(create("My name is Ada. Say hello."))
    root = await lanes[0].get_final_response()
    assert root.usage is not None
    for lane in lanes:
        await lane.send(create("What is my name?", previous_response_id=root.id))
    order: list[str | None] = []
    ended = await asyncio.gather(*(read(lane, order) for lane in lanes))
    texts = [event.response.output_text for event in ended]
    assert texts[0] == texts[1] != ""
    assert order.index("fork") < len(order) - 1 - order[::-1].index("source")
    assert order.index("source") < len(order) - 1 - order[::-1].index("fork")
    for event in ended:
        cached = event.response.usage.input_tokens_details.cached_tokens
        assert cached >= root.usage.total_tokens - 1


async def test_a_stop_on_one_lane_leaves_the_other_whole(
    session: AsyncResponsesWebSocketSession,
) -> None:
    stopped, whole = session.lane("stopped"), session.lane("whole")
    endless = {"ignore_eos": True}
    await stopped.send(create("Count to fifty.", max_output_tokens=700, chatrt=endless))
    await whole.send(create("What is the capital of France?"))
    event: Any = await stopped.recv()
    while event.type != "response.output_text.delta":
        event = await stopped.recv()
    response_id = event.response_id
    await stopped.send(cancel(response_id))
    partial = await stopped.get_final_response()
    assert partial.id == response_id
    assert partial.status == "cancelled"
    assert partial.output_text
    assert "Paris" in (await whole.get_final_response()).output_text
    await stopped.send(create("Go on.", previous_response_id=partial.id))
    assert (await stopped.get_final_response()).output_text


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (create("x", previous_response_id="resp_nowhere"), "previous_response_not_found"),
        (create("x", model="gpt-0"), "model_not_found"),
        (create("word " * 2000), "context_length_exceeded"),
        (create("x", tools=[{"type": "web_search"}]), "unsupported_parameter"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_refusal_is_raised_on_its_own_lane_which_goes_on(
    session: AsyncResponsesWebSocketSession, refused: Any, code: str
) -> None:
    lane, other = session.lane("lane"), session.lane("other")
    await other.send(create("What is the capital of France?"))
    await lane.send(refused)
    with pytest.raises(ResponsesWebSocketError) as raised:
        await lane.get_final_response()
    event: Any = raised.value.event
    assert event.error.code == code
    assert event.stream_id == "lane"
    await lane.send(create("What is the capital of Germany?"))
    assert "Berlin" in (await lane.get_final_response()).output_text
    assert "Paris" in (await other.get_final_response()).output_text


async def test_nothing_that_nobody_asked_for_arrives_on_the_default_lane(
    session: AsyncResponsesWebSocketSession,
) -> None:
    lane = session.lane("lane")
    for _ in range(2):
        await lane.send(create("What is the capital of France?"))
        await lane.get_final_response()
    await session.default.send(create("What is the capital of Germany?"))
    first: Any = await session.default.recv()  # events of one connection come in order
    assert first.type == "response.created"
    assert "Berlin" in (await session.default.get_final_response()).output_text


async def test_a_warm_up_generates_nothing_and_its_answer_computes_only_the_question(
    session: AsyncResponsesWebSocketSession,
) -> None:
    lane = session.lane("lane")
    text = "Ada Lovelace wrote about the analytical engine. " * 10
    await lane.send(create(text, generate=False))
    warm = await lane.get_final_response()
    assert warm.usage is not None
    assert (warm.status, warm.output, warm.usage.output_tokens) == ("completed", [], 0)
    await lane.send(create("Who wrote?", previous_response_id=warm.id))
    answer = await lane.get_final_response()
    assert answer.usage is not None
    cached = answer.usage.input_tokens_details.cached_tokens
    assert answer.output_text
    assert cached >= warm.usage.total_tokens - 1


async def test_options_of_ours_travel_as_metadata_or_as_they_are(
    session: AsyncResponsesWebSocketSession,
) -> None:
    lane = session.lane("lane")
    asked = "What is the capital of France?"
    texts = []
    for more in ({}, {"metadata": {"chatrt.stop": '[" Paris"]'}}, {"chatrt": {"stop": [" Paris"]}}):
        await lane.send(create(asked, **more))
        texts.append((await lane.get_final_response()).output_text)
    assert texts[1] == texts[2] == texts[0][: texts[0].index(" Paris")]


# The SDK opens its connection in a way that newer websockets warn about.
@pytest.mark.filterwarnings("ignore:connect\\(\\) must be used as a context manager")
def test_lanes_of_the_threaded_session_answer_side_by_side(server: ServerProcess) -> None:
    limit_s = 60 * time_scale()
    with (
        OpenAI(api_key=server.api_key, base_url=server.base_url) as client,
        client.responses.connect() as connection,
        ResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        asked = {"a": "What is the capital of France?", "b": "What is the capital of Germany?"}
        lanes = {name: session.lane(name) for name in asked}
        for name, lane in lanes.items():
            lane.send(create(asked[name]))
        told = {name: lane.get_final_response(timeout=limit_s) for name, lane in lanes.items()}
        lanes["a"].send(create("Hi.", previous_response_id="resp_nowhere"))
        with pytest.raises(ResponsesWebSocketError):
            lanes["a"].get_final_response(timeout=limit_s)
        lanes["a"].send(create("And its river?", previous_response_id=told["b"].id))
        fork = lanes["a"].get_final_response(timeout=limit_s)
    assert "Paris" in told["a"].output_text
    assert "Berlin" in told["b"].output_text
    assert fork.usage is not None
    assert told["b"].usage is not None
    assert fork.usage.input_tokens_details.cached_tokens >= told["b"].usage.total_tokens - 1
