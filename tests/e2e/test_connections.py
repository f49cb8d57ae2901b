"""Clients that vanish, cancel and delete: the pages come back, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.process import output_text, turn, wait_until

if TYPE_CHECKING:
    from chatrt.testing.serving import Caller
    from tests.e2e.process import ServerProcess

pytestmark = pytest.mark.slow

LONG = 4000  # output tokens: some seconds of the tiny model


async def until_delta(caller: Caller) -> None:
    await caller.until(["response.output_text.delta"])


async def reset(caller: Caller) -> None:
    """Drop the connection as a dying machine does: a TCP reset, no close frame."""
    raw: socket.socket = caller.socket.transport.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.socket.transport.abort()


async def conversation(caller: Caller) -> str:
    await caller.send({"type": "chatrt.conversation.create", "title": "pages"})
    reply = (await caller.until(["chatrt.conversation.created"]))[-1]
    conversation_id: str = reply["conversation"]["id"]
    return conversation_id


async def test_a_client_that_vanishes_mid_stream_ends_its_answer_and_no_other(
    tiny_server: ServerProcess,
) -> None:
    def cancelled() -> float:
        return tiny_server.metrics().get('chatrt_responses_total{status="cancelled"}', 0)

    before = await asyncio.to_thread(cancelled)
    async with tiny_server.caller() as other:
        await other.create("hello", temperature=0, max_output_tokens=300)
        async with tiny_server.caller() as caller:
            await caller.create("a long story", max_output_tokens=LONG, temperature=0)
            await until_delta(caller)
            await reset(caller)
        ended = (await other.until())[-1]
    assert ended["response"]["usage"]["output_tokens"] == 300
    await asyncio.to_thread(
        wait_until, lambda: cancelled() == before + 1, "the answer of nobody goes on"
    )


@pytest.mark.parametrize("how", ["close", "reset", "cancel"])
async def test_when_conversations_are_deleted_every_page_is_free_again(
    how: str, tiny_server: ServerProcess
) -> None:
    pages = await asyncio.to_thread(tiny_server.pages)
    total = sum(pages[state] for state in ("free", "held"))
    made: list[str] = []
    async with tiny_server.caller() as caller:
        for words in ("the first", "the second"):
            made.append(await conversation(caller))
            for text in (words, "and more " * 20):
                await turn(caller, text, conversation=made[-1], max_output_tokens=20)
        await caller.create(
            "a long one", conversation=made[0], max_output_tokens=LONG, temperature=0
        )
        await until_delta(caller)
        if how == "reset":
            await reset(caller)
        elif how == "cancel":
            await caller.send({"type": "response.cancel"})
            assert (await caller.until())[-1]["response"]["status"] == "cancelled"
    assert (await asyncio.to_thread(tiny_server.pages))["held"] > 0
    for conversation_id in made:
        reply = await asyncio.to_thread(tiny_server.delete, f"/v1/conversations/{conversation_id}")
        assert reply.status == 200
        assert reply.body["deleted"] is True

    def all_free() -> bool:
        return tiny_server.pages()["held"] == pages["held"]

    await asyncio.to_thread(wait_until, all_free, f"pages stay held of {total}")
    assert (await asyncio.to_thread(tiny_server.pages))["free"] == pages["free"]


async def test_a_cancel_at_once_or_twice_or_too_late_harms_nothing(
    tiny_server: ServerProcess,
) -> None:
    async with tiny_server.caller() as caller:
        await caller.create("one", max_output_tokens=LONG, temperature=0)
        await caller.send({"type": "response.cancel"})
        await caller.send({"type": "response.cancel"})
        ended = (await caller.until())[-1]
        assert ended["response"]["status"] == "cancelled"
        response_id = ended["response"]["id"]
        await caller.send({"type": "response.cancel", "response_id": response_id})
        after = await turn(caller, "two", previous_response_id=response_id, max_output_tokens=3)
    assert after["response"]["usage"]["output_tokens"] == 3


async def test_answers_that_are_deleted_cannot_be_read_or_continued(
    tiny_server: ServerProcess,
) -> None:
    async with tiny_server.caller() as caller:
        ended = await turn(caller, "hello", max_output_tokens=3)
        response_id = ended["response"]["id"]
        path = f"/v1/responses/{response_id}"
        kept = await asyncio.to_thread(tiny_server.get, path)
        assert output_text(kept.body) == output_text(ended["response"])
        assert (await asyncio.to_thread(tiny_server.delete, path)).status == 200
        for method in ("GET", "DELETE"):
            gone = await asyncio.to_thread(tiny_server.get, path, method=method)
            assert gone.status == 404
            assert gone.body["error"]["code"] == "not_found"
        refused = await turn(caller, "more", previous_response_id=response_id)
    assert refused["error"]["code"] == "previous_response_not_found"


async def test_a_conversation_can_be_listed_renamed_read_and_deleted(
    tiny_server: ServerProcess,
) -> None:
    async with tiny_server.caller() as caller:
        conversation_id = await conversation(caller)
        ended = await turn(caller, "hello", conversation=conversation_id, max_output_tokens=3)
        await caller.send(
            {"type": "chatrt.conversation.update", "id": conversation_id, "title": "Zebra talk"}
        )
        await caller.until(["chatrt.conversation.updated"])
    listed = await asyncio.to_thread(tiny_server.get, "/v1/conversations?q=Zebra")
    assert [one["id"] for one in listed.body["data"]] == [conversation_id]
    path = f"/v1/conversations/{conversation_id}"
    items: list[dict[str, Any]] = (await asyncio.to_thread(tiny_server.get, f"{path}/items")).body[
        "data"
    ]
    assert [item["role"] for item in items] == ["user", "assistant"]
    assert items[1]["content"][0]["text"] == output_text(ended["response"])
    assert (await asyncio.to_thread(tiny_server.delete, path)).status == 200
    for method, rest in (("GET", "/items"), ("DELETE", "")):
        gone = await asyncio.to_thread(tiny_server.get, path + rest, method=method)
        assert gone.status == 404
    response = await asyncio.to_thread(tiny_server.get, f"/v1/responses/{ended['response']['id']}")
    assert response.status == 404


async def test_an_answer_can_be_cancelled_over_http(tiny_server: ServerProcess) -> None:
    async with tiny_server.caller() as caller:
        await caller.create("a long one", max_output_tokens=LONG, temperature=0)
        created = (await caller.until(["response.created"]))[-1]
        path = f"/v1/responses/{created['response']['id']}/cancel"
        reply = await asyncio.to_thread(tiny_server.get, path, method="POST")
        assert reply.status == 200
        assert (await caller.until())[-1]["response"]["status"] == "cancelled"


async def test_a_client_that_never_reads_does_not_hold_up_another(
    tiny_server: ServerProcess,
) -> None:
    async with tiny_server.caller(max_queue=1) as lazy, tiny_server.caller() as caller:
        for lane in range(8):
            await lazy.create(
                "a long one", stream_id=f"lane{lane}", temperature=0, max_output_tokens=400
            )
        ended = await turn(caller, "hello", max_output_tokens=50)
        assert ended["response"]["usage"]["output_tokens"] == 50
        texts: dict[str, str] = {}
        finished = 0
        while finished < 8:  # it reads after all: nothing was lost
            event = json.loads(await lazy.socket.recv())
            if event["type"] == "response.output_text.delta":
                lane_name = event["stream_id"]
                texts[lane_name] = texts.get(lane_name, "") + event["delta"]
            if event["type"] == "response.incomplete":
                assert output_text(event["response"]) == texts[event["stream_id"]]
                finished += 1
