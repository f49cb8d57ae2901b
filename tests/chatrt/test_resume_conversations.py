"""Conversations over the real server and a real tiny engine: several viewers, two keys."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from chatrt.testing.service import ScriptedService
from chatrt.testing.serving import Caller, calling, eventually, text_of
from chatrt.testing.serving import serving as serving_port
from chatrt.wire.log import DELTA
from chatrt.wire.messages import ConversationCreate, ConversationSubscribe
from tests.chatrt.service_support import context, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from chatrt.server.server import Server
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.wire.log import ResponseLog

LONG: dict[str, Any] = {"max_output_tokens": 200, "chatrt": {"ignore_eos": True}}
OWNER = {"Authorization": "Bearer owner"}
STRANGER = {"Authorization": "Bearer stranger"}


@asynccontextmanager
async def running(tokenizer: Tokenizer, database: Path | None = None) -> AsyncIterator[Server]:
    """A server over a real engine that knows two keys."""
    async with (
        serving(tokenizer, database) as chat,
        serving_port(chat.service, api_keys=("owner", "stranger")) as server,
    ):
        yield server


async def get(server: Server, path: str, headers: dict[str, str], method: str = "GET") -> Any:
    """The decoded body of a request, or its status if that is not 200."""

    def blocking() -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return json.loads(body) if response.status == 200 else response.status

    return await asyncio.to_thread(blocking)


async def new_conversation(caller: Caller, title: str | None = None) -> str:
    await caller.send({"type": "chatrt.conversation.create", "title": title})
    conversation_id: str = (await caller.receive())["conversation"]["id"]
    return conversation_id


async def view(caller: Caller, conversation_id: str) -> None:
    await caller.send({"type": "chatrt.conversation.subscribe", "id": conversation_id})


async def ended(caller: Caller) -> dict[str, Any]:
    response: dict[str, Any] = (await caller.until())[-1]["response"]
    return response


# Several viewers ----------------------------------------------------------------------------------


async def test_all_viewers_get_the_same_text_the_late_one_from_its_start(
    tokenizer: Tokenizer,
) -> None:
    async with (
        running(tokenizer) as server,
        calling(server, additional_headers=OWNER) as owner,
        calling(server, additional_headers=OWNER) as early,
        calling(server, additional_headers=OWNER) as late,
    ):
        conversation_id = await new_conversation(owner)
        for viewer in (owner, early):
            await view(viewer, conversation_id)
            await viewer.receive()
        await owner.create("hello", conversation=conversation_id, **LONG)
        await owner.until([DELTA])
        await view(late, conversation_id)
        await asyncio.gather(owner.until(), early.until(), late.until())
        texts = {text_of(caller.frames) for caller in (owner, early, late)}
        assert len(texts) == 1
        numbers = [f["sequence_number"] for f in late.frames if "sequence_number" in f]
        assert numbers[0] == 0
        # And each may go on where the others look.
        await late.create("and?", conversation=conversation_id, **LONG)
        ends = await asyncio.gather(*(ended(caller) for caller in (owner, early, late)))
    assert len({response["id"] for response in ends}) == 1


async def test_a_viewer_that_leaves_harms_nobody(tokenizer: Tokenizer) -> None:
    async with (
        running(tokenizer) as server,
        calling(server, additional_headers=OWNER) as owner,
        calling(server, additional_headers=OWNER) as stays,
    ):
        conversation_id = await new_conversation(owner)
        await view(stays, conversation_id)
        await stays.receive()
        async with calling(server, additional_headers=OWNER) as leaves:
            await view(leaves, conversation_id)
            await leaves.receive()
            await owner.create("hello", conversation=conversation_id, **LONG)
            await leaves.until([DELTA])
            leaves.socket.transport.abort()
        await asyncio.gather(owner.until(), stays.until())
        assert owner.frames[-1]["response"]["usage"]["output_tokens"] == LONG["max_output_tokens"]
        assert text_of(owner.frames) == text_of(stays.frames)
        await owner.create("and?", conversation=conversation_id)
        assert (await ended(owner))["id"] == (await ended(stays))["id"]


async def test_a_viewer_that_never_reads_delays_nobody() -> None:
    service = ScriptedService(lambda message: ["x" * 50_000] * 400)
    async with (
        serving_port(service, outbox_bytes=200_000) as server,
        calling(server) as owner,
        calling(server) as reads,
        calling(server, max_queue=1) as never,
    ):
        conversation_id = await new_conversation(owner)
        for viewer in (reads, never):
            await view(viewer, conversation_id)
            await viewer.receive()
        never.socket.transport.pause_reading()
        await owner.create("go", conversation=conversation_id)
        await asyncio.gather(owner.until(), reads.until())
        assert len(text_of(owner.frames)) == len(text_of(reads.frames)) == 50_000 * 400
        assert server.outbox_bytes > 0
        never.socket.transport.abort()
        await eventually(lambda: server.num_connections == 2)


async def test_a_response_that_begins_while_a_viewer_subscribes_is_not_missed(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on = threading.Event(), threading.Event()
    async with serving(tokenizer, tmp_path / "chat.db") as chat:
        assert chat.store is not None
        body = await chat.service.conversation_create(ConversationCreate(), context())
        has_conversation = chat.store.has_conversation

        def slow_for_the_viewer(*args: str) -> bool:
            if not asked.is_set():
                asked.set()
                assert go_on.wait(10)
            return has_conversation(*args)

        monkeypatch.setattr(chat.store, "has_conversation", slow_for_the_viewer)
        told: list[ResponseLog] = []
        subscribe = ConversationSubscribe(body["id"])
        viewer = context(connection="viewer")
        subscribing = asyncio.create_task(
            chat.service.conversation_subscribe(subscribe, viewer, told.append)
        )
        await asyncio.to_thread(asked.wait, 10)
        options = {"max_output_tokens": 400, "chatrt": {"ignore_eos": True}}
        log = await chat.create("hello", conversation=body["id"], **options)
        go_on.set()
        stop = await subscribing
        assert told == [log]
        stop()


# Two keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [True, False])
async def test_every_operation_on_a_conversation_is_its_own_keys_only(
    tokenizer: Tokenizer, tmp_path: Path, stored: bool
) -> None:
    async with (
        running(tokenizer, tmp_path / "chat.db" if stored else None) as server,
        calling(server, additional_headers=OWNER) as owner,
        calling(server, additional_headers=STRANGER) as stranger,
    ):
        named = await new_conversation(owner, "Fruit")
        await owner.create("a canary sings", conversation=named)
        response_id = (await ended(owner))["id"]

        for message in (
            {"type": "chatrt.conversation.update", "id": named, "title": "mine now"},
            {"type": "chatrt.conversation.subscribe", "id": named},
            {"type": "chatrt.resume", "response_id": response_id},
            {"type": "response.cancel", "response_id": response_id},
            {"type": "response.create", "input": "x", "conversation": named},
            {"type": "response.create", "input": "x", "previous_response_id": response_id},
        ):
            await stranger.send(message)
            event = await stranger.receive()
            assert (event["type"], event["status"]) == ("error", 404), message
            assert "canary" not in str(event)
            assert "Fruit" not in str(event)
        paths = [
            ("GET", f"/v1/responses/{response_id}"),
            ("DELETE", f"/v1/responses/{response_id}"),
            ("POST", f"/v1/responses/{response_id}/cancel"),
            ("GET", f"/v1/conversations/{named}/items"),
            ("DELETE", f"/v1/conversations/{named}"),
        ]
        for method, path in paths:
            assert await get(server, path, STRANGER, method) == 404, path
        for query in ("", "?q=Fruit", "?q=canary"):
            assert (await get(server, f"/v1/conversations{query}", STRANGER))["data"] == []

        # All is as it was for its owner.
        listed = (await get(server, "/v1/conversations", OWNER))["data"]
        assert [(one["id"], one["title"], one["num_turns"]) for one in listed] == [
            (named, "Fruit", 1)
        ]
        items = (await get(server, f"/v1/conversations/{named}/items", OWNER))["data"]
        assert items[0]["content"][0]["text"] == "a canary sings"


@pytest.mark.parametrize("stored", [True, False])
async def test_a_conversation_is_listed_found_renamed_and_deleted(
    tokenizer: Tokenizer, tmp_path: Path, stored: bool
) -> None:
    async with (
        running(tokenizer, tmp_path / "chat.db" if stored else None) as server,
        calling(server, additional_headers=OWNER) as owner,
    ):
        ids = [await new_conversation(owner, title) for title in ("Fruit", "Birds", None)]
        await owner.create("the Canary sings", conversation=ids[1])
        response_id = (await ended(owner))["id"]
        searches = {"": set(ids), "fru": {ids[0]}, " canary ": {ids[1]}, "nothing": set()}
        for query, expected in searches.items():
            body = await get(server, f"/v1/conversations?q={quote(query)}", OWNER)
            assert {one["id"] for one in body["data"]} == expected, query
        await owner.send({"type": "chatrt.conversation.update", "id": ids[0], "title": "Trees"})
        assert (await owner.receive())["conversation"]["title"] == "Trees"
        titles = {one["title"] for one in (await get(server, "/v1/conversations", OWNER))["data"]}
        assert titles == {"Trees", "Birds", None}
        deleted = await get(server, f"/v1/conversations/{ids[1]}", OWNER, "DELETE")
        assert deleted["deleted"] is True
        for path in (f"/v1/conversations/{ids[1]}/items", f"/v1/responses/{response_id}"):
            assert await get(server, path, OWNER) == 404
        await owner.send({"type": "chatrt.resume", "response_id": response_id})
        assert (await owner.receive())["error"]["code"] == "response_not_found"
        assert (await get(server, "/v1/conversations?q=canary", OWNER))["data"] == []


async def test_a_viewer_of_a_deleted_conversation_gets_the_end_of_its_answer(
    tokenizer: Tokenizer,
) -> None:
    async with (
        running(tokenizer) as server,
        calling(server, additional_headers=OWNER) as owner,
        calling(server, additional_headers=OWNER) as viewer,
    ):
        conversation_id = await new_conversation(owner)
        await view(viewer, conversation_id)
        await viewer.receive()
        await owner.create("hello", conversation=conversation_id, **LONG)
        await viewer.until([DELTA])
        await get(server, f"/v1/conversations/{conversation_id}", OWNER, "DELETE")
        ends = await asyncio.gather(ended(owner), ended(viewer))
        assert [response["status"] for response in ends] == ["cancelled", "cancelled"]
        await viewer.send({"type": "chatrt.conversation.subscribe", "id": conversation_id})
        assert (await viewer.receive())["error"]["code"] == "not_found"
