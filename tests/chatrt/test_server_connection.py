from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.testing.service import ScriptedService
from chatrt.testing.serving import Caller, calling, eventually, serving, text_of
from chatrt.wire.log import DELTA

if TYPE_CHECKING:
    from chatrt.server.service import CallContext
    from chatrt.wire.log import ResponseLog
    from chatrt.wire.messages import ResponseCreate

CREATED = ("response.created",)


async def chat(caller: Caller, text: str, **fields: Any) -> list[dict[str, Any]]:
    await caller.create(text, **fields)
    return await caller.until()


async def test_an_answer_comes_in_order_and_numbered() -> None:
    async with serving(ScriptedService(delay_s=0.002)) as server, calling(server) as caller:
        events = await chat(caller, "one two three")
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert text_of(events) == "one two three"
    assert all("stream_id" not in e for e in events)
    assert events[-1]["type"] == "response.completed"


async def test_a_follow_up_names_the_response_before() -> None:
    async with serving(ScriptedService()) as server, calling(server) as caller:
        first = await chat(caller, "a")
        second = await chat(caller, "b", previous_response_id=first[-1]["response"]["id"])
        missing = await chat(caller, "c", previous_response_id="resp_none")
    assert second[-1]["response"]["previous_response_id"] == first[-1]["response"]["id"]
    assert missing[-1]["error"]["code"] == "previous_response_not_found"


async def test_lanes_interleave_and_each_is_whole() -> None:
    async with serving(ScriptedService(delay_s=0.005)) as server, calling(server) as caller:
        for name in ("a", "b"):
            await caller.create(" ".join(f"{name}{i}" for i in range(10)), stream_id=name)
        await caller.until()
        await caller.until()
    deltas = [e["stream_id"] for e in caller.frames if e["type"] == DELTA]
    assert deltas != sorted(deltas)
    for name in ("a", "b"):
        events = [e for e in caller.frames if e["stream_id"] == name]
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        assert text_of(events) == " ".join(f"{name}{i}" for i in range(10))


async def test_one_lane_is_first_in_first_out_with_refusals_in_place() -> None:
    async with serving(ScriptedService(delay_s=0.002)) as server, calling(server) as caller:
        await caller.create("first one", stream_id="a")
        await caller.send({"type": "response.create", "stream_id": "a", "input": 5})
        await caller.create("second", stream_id="a")
        first, refused, second = [await caller.until() for _ in range(3)]
    assert text_of(first) == "first one"
    assert refused[-1]["error"]["param"] == "input"
    assert refused[-1]["stream_id"] == "a"
    assert text_of(second) == "second"


@pytest.mark.parametrize("by_id", [True, False])
async def test_cancel_ends_the_answer_and_the_lane_goes_on(by_id: bool) -> None:
    async with serving(ScriptedService(delay_s=0.01)) as server, calling(server) as caller:
        await caller.create("word " * 500, stream_id="a")
        await caller.create("other " * 5, stream_id="b")
        await caller.until([DELTA])
        created = next(e for e in caller.frames if e.get("stream_id") == "a")
        target = {"response_id": created["response"]["id"]} if by_id else {"stream_id": "a"}
        await caller.send({"type": "response.cancel", **target})
        ends = (await caller.until())[-1:] + (await caller.until())[-1:]
        statuses = {e["stream_id"]: e["response"]["status"] for e in ends}
        assert statuses == {"a": "cancelled", "b": "completed"}
        again = await chat(
            caller, "next", stream_id="a", previous_response_id=created["response"]["id"]
        )
    assert again[-1]["type"] == "response.completed"


async def test_a_cancel_without_anything_running_is_silent_and_of_an_unknown_id_an_error() -> None:
    async with serving(ScriptedService()) as server, calling(server) as caller:
        await caller.send({"type": "response.cancel"})
        done = await chat(caller, "a")
        await caller.send({"type": "response.cancel"})
        await caller.send({"type": "response.cancel", "response_id": done[-1]["response"]["id"]})
        await caller.send({"type": "response.cancel", "response_id": "resp_x", "stream_id": "s"})
        event = await caller.receive()
    assert event["error"]["code"] == "not_found"
    assert event["stream_id"] == "s"


async def test_a_cancel_that_comes_before_the_response_exists_still_cancels_it() -> None:
    class SlowToCreate(ScriptedService):
        async def create(self, message: ResponseCreate, context: CallContext) -> ResponseLog:
            await asyncio.sleep(0.05)
            return await super().create(message, context)

    async with serving(SlowToCreate(delay_s=0.01)) as server, calling(server) as caller:
        await caller.create("word " * 500)
        await caller.send({"type": "response.cancel"})
        events = await caller.until()
    assert events[-1]["response"]["status"] == "cancelled"


@pytest.mark.parametrize("frame", ["{", b"\xff\xfe", "[]", '{"type":"x"}', "[" * 50_000, ""])
async def test_a_bad_frame_closes_nothing_and_touches_no_other(frame: str | bytes) -> None:
    async with serving(ScriptedService(delay_s=0.002)) as server, calling(server) as caller:
        await caller.create("one two three", stream_id="a")
        await caller.socket.send(frame)
        await caller.socket.send(b"\xff", text=True)
        await caller.until(["response.completed"])
        answer = [e for e in caller.frames if e.get("stream_id") == "a"]
        errors = [e for e in caller.frames if e["type"] == "error"]
        assert text_of(answer) == "one two three"
        assert [e["error"]["code"] for e in errors] == ["invalid_value"] * 2
        assert (await chat(caller, "still here"))[-1]["type"] == "response.completed"


async def test_a_huge_frame_closes_with_1009() -> None:
    async with (
        serving(ScriptedService(), max_message_bytes=1000) as server,
        calling(server) as caller,
    ):
        await caller.create("x" * 2000)
        code = await caller.until_closed()
    assert code == 1009


async def test_a_large_frame_is_answered_like_a_small_one() -> None:
    async with serving(ScriptedService()) as server, calling(server) as caller:
        text = "x" * 200_000
        assert text_of(await chat(caller, text)) == text


async def test_a_failure_of_the_service_is_an_error_event_without_its_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(message: ResponseCreate) -> list[str]:
        raise KeyError(message.input[0].content)

    async with serving(ScriptedService(broken)) as server, calling(server) as caller:
        events = await chat(caller, "the secret prompt")
        again = await chat(caller, "x")
    assert [e["type"] for e in events + again] == ["error", "error"]
    assert events[0]["status"] == 500
    assert "secret" not in str(events) + caplog.text
    assert "unexpected KeyError" in caplog.text


async def test_logs_hold_neither_prompts_nor_keys(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("websockets.client").setLevel(logging.INFO)
    key = {"Authorization": "Bearer top-secret"}
    async with (
        serving(ScriptedService(), api_keys=("top-secret",)) as server,
        calling(server, additional_headers=key) as caller,
    ):
        await chat(caller, "private words")
    assert "opened" in caplog.text
    assert "top-secret" not in caplog.text
    assert "private" not in caplog.text


@pytest.mark.parametrize("grace_s", [0.0, 0.05])
async def test_a_vanished_client_has_its_answers_abandoned_after_the_grace(grace_s: float) -> None:
    service = ScriptedService(delay_s=0.01)
    async with serving(service, disconnect_grace_s=grace_s) as server:
        async with calling(server) as caller:
            for name in ("a", "b"):
                await caller.create("word " * 1000, stream_id=name)
                await caller.until(CREATED)
            caller.socket.transport.abort()
        await eventually(lambda: server.num_connections == 0)
        assert (service.abandoned == []) == (grace_s > 0)
        await eventually(lambda: len(service.abandoned) == 2)
    assert service.abandoned == list(service.responses)


async def test_a_client_that_vanishes_while_its_response_is_created_has_it_abandoned() -> None:
    class SlowToCreate(ScriptedService):
        async def create(self, message: ResponseCreate, context: CallContext) -> ResponseLog:
            await asyncio.sleep(0.1)
            return await super().create(message, context)

    service = SlowToCreate(delay_s=0.01)
    async with serving(service) as server:
        async with calling(server) as caller:
            await caller.create("word " * 1000)
            await asyncio.sleep(0.03)
            caller.socket.transport.abort()
        await eventually(lambda: service.abandoned)


async def test_a_half_typed_prompt_is_superseded_by_the_real_turn() -> None:
    service = ScriptedService(delay_s=0.005)
    partial = {"generate": False, "chatrt": {"partial": True}}
    async with serving(service) as server, calling(server) as caller:
        await caller.create("h", **partial)
        await caller.create("ha", **partial)
        await caller.create("half typed")
        events = await caller.until([DELTA])
        events += await caller.until()
    real = [r for r in service.responses.values() if not r.message.partial]
    assert len(real) == 1
    own = [e for e in events if e.get("response", {}).get("id") == real[0].log.response_id]
    assert own[-1]["type"] == "response.completed"
    assert text_of(events) == "half typed"
    lane_keys = {r.context.lane_key for r in service.responses.values()}
    assert len(lane_keys) == 1


async def test_a_half_typed_prompt_that_the_real_turn_overtakes_is_cancelled() -> None:
    begun, answered = asyncio.Event(), asyncio.Event()

    class SlowPartials(ScriptedService):
        async def create(self, message: ResponseCreate, context: CallContext) -> ResponseLog:
            if message.partial:
                begun.set()
                await answered.wait()
            return await super().create(message, context)

    service = SlowPartials()
    async with serving(service) as server, calling(server) as caller:
        await caller.create("h", generate=False, chatrt={"partial": True})
        await begun.wait()
        await caller.create("half typed")
        answer = await caller.until()
        answered.set()
        prefill = await caller.until()
    assert text_of(answer) == "half typed"
    assert prefill[-1]["response"]["status"] == "cancelled"


async def test_the_refusal_of_a_half_typed_prompt_says_what_it_is_about() -> None:
    async with serving(ScriptedService()) as server, calling(server) as caller:
        missing = {"previous_response_id": "resp_none", "stream_id": "a"}
        await caller.create("h", generate=False, chatrt={"partial": True}, **missing)
        of_partial = (await caller.until(["error"]))[-1]
        await caller.create("half", **missing)
        of_question = (await caller.until(["error"]))[-1]
    assert of_partial["chatrt"] == {"partial": True}
    assert "chatrt" not in of_question


async def test_a_prefill_has_created_in_progress_and_completed() -> None:
    async with serving(ScriptedService()) as server, calling(server) as caller:
        events = await chat(caller, "a", generate=False)
    assert [e["type"] for e in events] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]


async def test_the_terminal_event_has_the_send_stamp_even_of_an_instant_answer() -> None:
    async with serving(ScriptedService()) as server, calling(server) as caller:
        events = await chat(caller, "a b c")
    figures = events[-1]["response"]["chatrt"]
    assert figures["clock"]["first_sent_ns"] > figures["clock"]["received_ns"]
    assert figures["ttft_ms"] > 0


async def test_the_thirty_third_lane_name_and_a_full_queue_are_refused() -> None:
    async with (
        serving(ScriptedService(delay_s=0.05), max_lanes=2, max_queued_per_lane=1) as server,
        calling(server) as caller,
    ):
        for name in ("a", "b", "c"):
            await caller.create("x y", stream_id=name)
        refused = (await caller.until(["error"]))[-1]
        assert refused["stream_id"] == "c"
        assert refused["error"]["code"] == "websocket_stream_limit_reached"
        for _ in range(2):
            await caller.create("x", stream_id="a")
        refused = (await caller.until(["error"]))[-1]
        assert (refused["stream_id"], refused["status"]) == ("a", 429)
        assert refused["error"]["code"] == "rate_limit_exceeded"


async def test_a_cancel_of_a_lane_that_waits_for_its_turn_is_answered_at_once() -> None:
    service = ScriptedService(lambda message: ["x"] * 1000, delay_s=0.05)
    async with serving(service, max_active_lanes=1) as server, calling(server) as caller:
        await caller.create("long", stream_id="a")
        await eventually(lambda: service.responses)
        await caller.create("short", stream_id="b")
        await caller.send({"type": "response.cancel", "stream_id": "b"})
        async with asyncio.timeout(5):
            while True:
                event = await caller.receive()
                if event["stream_id"] == "b" and event["type"] == "response.incomplete":
                    break
        assert event["response"]["status"] == "cancelled"
        assert [r.log.finished for r in service.responses.values()] == [False, True]


async def test_lanes_past_the_active_limit_wait_their_turn() -> None:
    service = ScriptedService(delay_s=0.02)
    async with serving(service, max_active_lanes=2) as server, calling(server) as caller:
        for name in ("a", "b", "c"):
            await caller.create("x y", stream_id=name)
        await caller.until(CREATED)
        await asyncio.sleep(0.01)
        assert len(service.responses) == 2
        for _ in range(3):
            assert (await caller.until())[-1]["type"] == "response.completed"


async def test_a_viewer_sees_a_conversations_answers_in_its_own_lane() -> None:
    service = ScriptedService(delay_s=0.005)
    async with serving(service) as server, calling(server) as owner, calling(server) as viewer:
        await owner.send({"type": "chatrt.conversation.create", "title": "t", "stream_id": "o"})
        made = await owner.receive()
        assert (made["type"], made["stream_id"]) == ("chatrt.conversation.created", "o")
        conversation_id = made["conversation"]["id"]
        subscribe = {"type": "chatrt.conversation.subscribe", "id": conversation_id}
        await viewer.send({**subscribe, "stream_id": "view"})
        assert (await viewer.receive())["type"] == "chatrt.conversation.subscribed"
        await owner.send(subscribe)
        await owner.receive()
        own = await chat(owner, "one two three", conversation=conversation_id)
        seen = await viewer.until()
    assert text_of(own) == text_of(seen) == "one two three"
    assert {e["stream_id"] for e in seen} == {"view"}
    assert own[-1]["response"]["conversation"] == {"id": conversation_id}


async def test_a_viewed_answer_runs_on_when_its_owner_vanishes() -> None:
    service = ScriptedService(delay_s=0.005)
    async with serving(service) as server, calling(server) as viewer:
        async with calling(server) as owner:
            await owner.send({"type": "chatrt.conversation.create"})
            conversation_id = (await owner.receive())["conversation"]["id"]
            await viewer.send({"type": "chatrt.conversation.subscribe", "id": conversation_id})
            await viewer.receive()
            await owner.create("one two three four", conversation=conversation_id)
            await owner.until(CREATED)
        seen = await viewer.until()
    assert text_of(seen) == "one two three four"
    assert service.abandoned == []


async def test_a_conversation_is_renamed_and_an_unknown_one_is_not_found() -> None:
    async with serving(ScriptedService()) as server, calling(server) as caller:
        await caller.send({"type": "chatrt.conversation.create"})
        made = (await caller.receive())["conversation"]
        update = {"type": "chatrt.conversation.update", "title": "new"}
        await caller.send({**update, "id": made["id"]})
        assert (await caller.receive())["conversation"]["title"] == "new"
        await caller.send({**update, "id": "conv_none"})
        assert (await caller.receive())["error"]["code"] == "not_found"


async def test_the_urls_model_is_the_default() -> None:
    async with (
        serving(ScriptedService()) as server,
        calling(server, "/responses?model=from-url") as caller,
    ):
        unnamed = await chat(caller, "a")
        named = await chat(caller, "a", model="named")
    assert unnamed[-1]["response"]["model"] == "from-url"
    assert named[-1]["response"]["model"] == "named"


async def test_bytes_on_the_wire_grow_linearly_with_the_answer() -> None:
    async def num_bytes(num_words: int) -> int:
        service = ScriptedService(lambda message: ["word "] * num_words, delay_s=0.0001)
        async with serving(service) as server, calling(server) as caller:
            await caller.create("go")
            total, frame = 0, ""
            while "response.completed" not in frame:
                frame = str(await caller.socket.recv())
                total += len(frame)
        return total

    base, short, long = [await num_bytes(n) for n in (0, 200, 800)]
    assert (long - base) < 5 * (short - base)
