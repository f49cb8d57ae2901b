"""The unmodified openai SDK as the client, sync and async."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from chatrt.testing.service import ScriptedService
from chatrt.testing.serving import serving


async def test_the_async_sdk_chats_two_turns() -> None:
    async with serving(ScriptedService(), api_keys=("k",)) as server:
        client = AsyncOpenAI(api_key="k", base_url=f"http://127.0.0.1:{server.port}/v1")
        async with client, client.responses.connect() as connection:
            texts: list[str] = []
            ids: list[str] = []
            for prompt in ("one two", "three four"):
                previous: dict[str, Any] = {"previous_response_id": ids[-1]} if ids else {}
                await connection.response.create(model="m", input=prompt, **previous)
                text = ""
                async for event in connection:
                    if event.type == "response.output_text.delta":
                        text += event.delta
                    elif event.type == "response.completed":
                        assert event.response.output_text == text
                        assert event.response.usage is not None
                        assert event.response.usage.input_tokens_details.cached_tokens == 0
                        assert event.response.chatrt["ttft_ms"] > 0  # type: ignore[attr-defined]
                        ids.append(event.response.id)
                        break
                texts.append(text)
    assert texts == ["one two", "three four"]


def sync_chat(port: int) -> list[str]:
    texts = []
    previous: dict[str, Any] = {}
    with (
        OpenAI(api_key="k", base_url=f"http://127.0.0.1:{port}/v1") as client,
        client.responses.connect() as connection,
    ):
        for prompt in ("one two", "three four"):
            connection.response.create(model="m", input=prompt, stream_id="s", **previous)
            for event in connection:
                if event.type == "response.completed":
                    assert event.stream_id == "s"
                    texts.append(event.response.output_text)
                    previous = {"previous_response_id": event.response.id}
                    break
    return texts


# The SDK opens its connection in a way that newer websockets warn about.
@pytest.mark.filterwarnings("ignore:connect\\(\\) must be used as a context manager")
async def test_the_sync_sdk_chats_two_turns() -> None:
    async with serving(ScriptedService(), api_keys=("k",)) as server:
        texts = await asyncio.to_thread(sync_chat, server.port)
    assert texts == ["one two", "three four"]


async def test_the_sdk_sees_an_error_event_and_goes_on() -> None:
    async with serving(ScriptedService()) as server:
        client = AsyncOpenAI(api_key="k", base_url=f"http://127.0.0.1:{server.port}/v1")
        async with client, client.responses.connect() as connection:
            await connection.response.create(input="x", previous_response_id="resp_none")
            event = await connection.recv()
            assert event.type == "error"
            assert event.error.code == "previous_response_not_found"
            await connection.response.create(input="x")
            assert (await connection.recv()).type == "response.created"
