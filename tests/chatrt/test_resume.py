"""`chatrt.resume` over the real server and a scripted service: replay, lanes, errors, grace."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.testing.service import ScriptedService, echo_words
from chatrt.testing.serving import Caller, calling, eventually, serving, text_of
from chatrt.wire.log import DELTA

if TYPE_CHECKING:
    from chatrt.server.service import CallContext
    from chatrt.wire.log import ResponseLog
    from chatrt.wire.messages import ResponseCreate

WORDS = " ".join(f"word{i}" for i in range(40))
LONG = "word " * 2000
CREATED = ("response.created",)


def slow() -> ScriptedService:
    return ScriptedService(delay_s=0.002)


async def begin(caller: Caller, text: str = WORDS, **fields: Any) -> str:
    """Send a create; the response's id, once its first delta is here."""
    await caller.create(text, **fields)
    events = await caller.until([DELTA])
    response_id: str = events[0]["response"]["id"]
    return response_id


async def resume(caller: Caller, response_id: str, after: int | None = None, **fields: Any) -> None:
    number = {} if after is None else {"after_sequence_number": after}
    await caller.send({"type": "chatrt.resume", "response_id": response_id, **number, **fields})


def numbers(caller: Caller) -> list[int]:
    return [event["sequence_number"] for event in caller.frames]


async def refusal(caller: Caller) -> dict[str, Any]:
    error: dict[str, Any] = (await caller.until(["error"]))[-1]["error"]
    return error


# What comes ---------------------------------------------------------------------------------------


async def test_an_answer_that_lost_its_connection_goes_on_without_lost_or_doubled_text() -> None:
    service = slow()
    async with serving(service) as server:
        async with calling(server) as first:
            response_id = await begin(first)
            first.socket.transport.abort()
        async with calling(server) as second:
            await resume(second, response_id, numbers(first)[-1], stream_id="again")
            events = await second.until()
    assert text_of(first.frames) + text_of(events) == WORDS
    both = numbers(first) + numbers(second)
    assert both == sorted(set(both))
    assert both[-1] == service.responses[response_id].log.num_events - 1
    assert {event["stream_id"] for event in events} == {"again"}
    assert events[-1]["response"]["status"] == "completed"
    assert service.abandoned == []


async def test_an_answer_that_ended_meanwhile_is_replayed_with_its_terminal_event() -> None:
    service = slow()
    async with serving(service) as server:
        async with calling(server) as first:
            response_id = await begin(first)
        await eventually(lambda: service.responses[response_id].log.finished)
        async with calling(server) as second:
            await resume(second, response_id, numbers(first)[-1])
            events = await second.until()
            await resume(second, response_id)
            whole = await second.until()
    assert text_of(first.frames) + text_of(events) == text_of(whole) == WORDS
    assert all("stream_id" not in event for event in events)
    clock = events[-1]["response"]["chatrt"]["clock"]
    assert clock == whole[-1]["response"]["chatrt"]["clock"]
    assert clock["first_sent_ns"] > clock["received_ns"]


async def test_the_first_send_is_stamped_by_the_resumed_connection_if_no_other_sent_any() -> None:
    service = ScriptedService(delay_s=0.3)
    async with serving(service) as server:
        async with calling(server) as first:
            await first.create("one")
            response_id = (await first.until(CREATED))[0]["response"]["id"]
            first.socket.transport.abort()
        async with calling(server) as second:
            await resume(second, response_id, 0)
            events = await second.until()
    assert text_of(first.frames) == ""
    assert events[-1]["response"]["chatrt"]["clock"]["first_sent_ns"] is not None


async def test_a_half_open_first_connection_gets_the_events_too() -> None:
    async with serving(slow()) as server, calling(server) as first, calling(server) as second:
        response_id = await begin(first)
        await resume(second, response_id, numbers(first)[-1])
        rest = await second.until()
        await first.until()
    assert text_of(first.frames) == WORDS
    assert WORDS.endswith(text_of(rest))


async def test_a_peer_that_stopped_reading_does_not_hold_up_the_one_that_resumed() -> None:
    service = ScriptedService(lambda message: ["x" * 50_000] * 400)
    async with (
        serving(service, outbox_bytes=200_000) as server,
        calling(server, max_queue=1) as dead,
        calling(server) as second,
    ):
        await dead.create("go")
        await eventually(lambda: service.paused)
        response_id = next(iter(service.responses))
        await resume(second, response_id)
        assert len(text_of(await second.until())) == 50_000 * 400
        dead.socket.transport.abort()


# Lanes --------------------------------------------------------------------------------------------


async def test_a_cancel_of_the_lane_reaches_what_was_resumed_there() -> None:
    async with serving(slow()) as server:
        async with calling(server) as first:
            response_id = await begin(first, LONG)
        async with calling(server) as second:
            await resume(second, response_id, stream_id="a")
            await second.send({"type": "response.cancel", "stream_id": "a"})
            end = (await second.until())[-1]["response"]
    assert (end["id"], end["status"]) == (response_id, "cancelled")


async def test_a_later_create_on_the_lane_waits_for_what_was_resumed_there() -> None:
    async with serving(slow()) as server:
        async with calling(server) as first:
            response_id = await begin(first)
        async with calling(server) as second:
            await resume(second, response_id, stream_id="a")
            await second.create("next", stream_id="a", previous_response_id=response_id)
            resumed, created = await second.until(), await second.until()
    assert resumed[-1]["response"]["id"] == response_id
    assert text_of(resumed) == WORDS
    assert text_of(created) == "next"


async def test_a_busy_lane_refuses_to_resume_and_goes_on() -> None:
    async with serving(slow()) as server, calling(server) as first, calling(server) as second:
        response_id = await begin(first)
        own = await begin(second, stream_id="a")
        await resume(second, response_id, stream_id="a")
        error = (await second.until(["error"]))[-1]
        assert error["stream_id"] == "a"
        assert error["error"]["code"] == "response_already_in_flight"
        assert own in error["error"]["message"]
        assert response_id in error["error"]["message"]
        await second.until()
        await first.until()
    assert text_of(second.frames) == WORDS


@pytest.mark.parametrize("how", ["created", "resumed", "viewed"])
async def test_what_a_connection_receives_already_is_not_sent_twice(how: str) -> None:
    async with serving(slow()) as server, calling(server) as first, calling(server) as second:
        await first.send({"type": "chatrt.conversation.create"})
        conversation_id = (await first.receive())["conversation"]["id"]
        response_id = await begin(first, LONG, conversation=conversation_id)
        caller = first if how == "created" else second
        if how == "resumed":
            await resume(second, response_id, stream_id="a")
        elif how == "viewed":
            await second.send({"type": "chatrt.conversation.subscribe", "id": conversation_id})
        await resume(caller, response_id, stream_id="b")
        error = await refusal(caller)
        assert error["code"] == "response_already_in_flight"
        assert response_id in error["message"]
        assert {frame.get("stream_id") for frame in caller.frames} >= {"b"}
        assert all(f["type"] == "error" for f in caller.frames if f.get("stream_id") == "b")


async def test_a_viewed_conversation_does_not_repeat_what_was_resumed_before() -> None:
    async with serving(slow()) as server, calling(server) as first, calling(server) as second:
        await first.send({"type": "chatrt.conversation.create"})
        conversation_id = (await first.receive())["conversation"]["id"]
        response_id = await begin(first, conversation=conversation_id)
        await resume(second, response_id, stream_id="a")
        await second.send({"type": "chatrt.conversation.subscribe", "id": conversation_id})
        await second.until()
        await first.until()
    assert text_of(second.frames) == WORDS


async def test_more_are_resumed_than_may_be_active_and_none_stalls() -> None:
    async with serving(slow(), max_active_lanes=2) as server:
        async with calling(server) as first, calling(server) as other:
            ids = [await begin(first, stream_id=name) for name in "ab"]
            ids.append(await begin(other))
        async with calling(server) as second:
            for name, response_id in zip("abc", ids, strict=True):
                await resume(second, response_id, stream_id=name)
            await second.create("then", stream_id="d")
            for _ in range(4):
                await second.until()
    for name, text in zip("abcd", (WORDS, WORDS, WORDS, "then"), strict=True):
        assert text_of(e for e in second.frames if e["stream_id"] == name) == text


# Errors -------------------------------------------------------------------------------------------


async def test_a_wrong_number_is_refused_with_both_numbers() -> None:
    service = slow()
    async with serving(service) as server, calling(server) as caller:
        await caller.create("one two")
        response_id = (await caller.until())[0]["response"]["id"]
        last = service.responses[response_id].log.num_events - 1
        for number in (-1, last + 1, 10**30):
            await resume(caller, response_id, number, stream_id="a")
            error = await refusal(caller)
            assert (error["code"], error["param"]) == ("invalid_value", "after_sequence_number")
            assert f"is {number}," in error["message"]
            assert f"0 to {last}" in error["message"]
        await resume(caller, response_id, last, stream_id="a")
        assert f"ended with event {last}" in (await refusal(caller))["message"]
        await resume(caller, response_id, last - 1, stream_id="a")
        assert (await caller.until())[-1]["sequence_number"] == last


@pytest.mark.parametrize("bad", [{"after_sequence_number": "3"}, {"response_id": None}])
async def test_a_message_of_the_wrong_shape_is_refused_on_its_lane(bad: dict[str, Any]) -> None:
    async with serving(ScriptedService()) as server, calling(server) as caller:
        message = {"type": "chatrt.resume", "response_id": "resp_x", "stream_id": "a", **bad}
        await caller.send(message)
        event = await caller.receive()
    assert (event["stream_id"], event["error"]["code"]) == ("a", "invalid_value")


async def test_an_unknown_id_and_another_keys_are_the_same_error() -> None:
    headers = [{"Authorization": f"Bearer {name}"} for name in ("one", "two")]
    async with (
        serving(slow(), api_keys=("one", "two")) as server,
        calling(server, additional_headers=headers[0]) as owner,
        calling(server, additional_headers=headers[1]) as stranger,
    ):
        response_id = await begin(owner)
        sentences = []
        for wrong in (response_id, "resp_" + "0" * 32):
            await resume(stranger, wrong, stream_id="a")
            error = await refusal(stranger)
            assert (error["code"], error["param"]) == ("response_not_found", "response_id")
            sentences.append(error["message"].replace(wrong, "…"))
        assert sentences[0] == sentences[1]
        await owner.until()
    assert text_of(owner.frames) == WORDS


# The grace ----------------------------------------------------------------------------------------


async def test_a_resumed_answer_is_not_abandoned_when_the_grace_of_its_first_loss_is_over() -> None:
    service = slow()
    async with serving(service, disconnect_grace_s=0.05) as server:
        async with calling(server) as first:
            response_id = await begin(first, LONG)
        async with calling(server) as second:
            await resume(second, response_id)
            async with asyncio.timeout(5):
                while len(text_of(second.frames)) < 5 * 60:
                    await second.receive()
            await asyncio.sleep(0.1)
            assert service.abandoned == []
            second.socket.transport.abort()
        await eventually(lambda: service.abandoned == [response_id])


async def test_a_viewer_keeps_an_answer_alive_and_its_leaving_begins_the_grace() -> None:
    service = slow()
    async with serving(service, disconnect_grace_s=0.05) as server, calling(server) as viewer:
        async with calling(server) as owner:
            await owner.send({"type": "chatrt.conversation.create"})
            conversation_id = (await owner.receive())["conversation"]["id"]
            await viewer.send({"type": "chatrt.conversation.subscribe", "id": conversation_id})
            await viewer.receive()
            response_id = await begin(owner, LONG, conversation=conversation_id)
        await asyncio.sleep(0.1)
        assert service.abandoned == []
        await viewer.until([DELTA])
        viewer.socket.transport.abort()
        await eventually(lambda: service.abandoned == [response_id])


async def test_creates_that_wait_on_a_lost_connection_are_dropped() -> None:
    service = slow()
    async with serving(service) as server:
        async with calling(server) as caller:
            response_id = await begin(caller)
            await caller.create("never")
        await eventually(lambda: service.responses[response_id].log.finished)
        await eventually(lambda: server.num_connections == 0)
    assert list(service.responses) == [response_id]


async def test_a_half_typed_prompt_of_a_lost_connection_is_dropped_at_once() -> None:
    class EndlessPrefill(ScriptedService):
        async def _answer(self, response: Any, deltas: Any) -> None:
            await response.cancelled.wait()
            await super()._answer(response, deltas)

    service = EndlessPrefill()
    async with serving(service, disconnect_grace_s=60.0) as server:
        async with calling(server) as caller:
            await caller.create("hal", generate=False, chatrt={"partial": True})
            response_id = (await caller.until(CREATED))[0]["response"]["id"]
            caller.socket.transport.abort()
        await eventually(lambda: service.abandoned == [response_id])


async def test_an_answer_whose_client_left_before_it_had_an_id_is_dropped_at_once() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    class SlowToCreate(ScriptedService):
        async def create(self, message: ResponseCreate, context: CallContext) -> ResponseLog:
            begun.set()
            await go_on.wait()
            return await super().create(message, context)

    service = SlowToCreate(echo_words, delay_s=0.01)
    async with serving(service, disconnect_grace_s=60.0) as server:
        async with calling(server) as caller:
            await caller.create(LONG)
            await begun.wait()
            caller.socket.transport.abort()
        connection = next(iter(server._connections))
        await eventually(lambda: connection._closed)
        go_on.set()
        await eventually(lambda: service.abandoned == list(service.responses) != [])


async def test_a_server_that_ends_abandons_what_waits_for_its_client() -> None:
    service = slow()
    async with serving(service, disconnect_grace_s=60.0) as server:
        async with calling(server) as caller:
            response_id = await begin(caller, LONG)
        await eventually(lambda: server.num_connections == 0)
        assert service.abandoned == []
        async with calling(server) as caller:
            other = await begin(caller, LONG)
            await server.stop()
            assert sorted(service.abandoned) == sorted([response_id, other])


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
async def test_nobody_reads_and_the_answer_goes_on_exactly_if_there_is_a_grace(
    grace_s: float,
) -> None:
    service = slow()
    async with serving(service, disconnect_grace_s=grace_s) as server:
        async with calling(server) as caller:
            response_id = await begin(caller)
            caller.socket.transport.abort()
        log = service.responses[response_id].log
        await eventually(lambda: log.finished)
    end = log.terminal_event()
    assert end is not None
    assert end["response"]["status"] == ("completed" if grace_s else "cancelled")
