"""What `chatrt chat` does before it paints: attach to a server, or start one in the background."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from chatrt.client import ChatClient, ResponseRequest
from chatrt.launch import attach_or_start, find_server, stop_server
from chatrt.paths import Paths
from chatrt.settings import Settings
from tests.support import share_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture
def paths(chatrt_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Paths]:
    share_kernels(chatrt_home)  # the background server inherits it with the environment
    monkeypatch.setenv("CHATRT_KV_MEMORY_BYTES", "16MiB")
    paths = Paths.find(os.environ)
    yield paths
    stop_server(paths)


async def test_the_first_client_starts_a_real_server_and_the_second_finds_it(
    paths: Paths, tiny_model_folder: Path
) -> None:
    settings = Settings(model=str(tiny_model_folder), port=0)
    told: list[str] = []
    first = attach_or_start(None, settings, paths, report=told.append)
    # A model this small may be ready between two looks at what the server says.
    assert told[0] == "starting the server"
    ready = paths.server_status.read_text()
    assert ready.startswith("ready: tiny")
    assert set(told[1:]) <= {"loading tiny", "warming up", ready}
    told.clear()
    assert attach_or_start(None, settings, paths, report=told.append) == first
    assert told == []
    record = find_server(paths)
    assert record is not None
    assert record.model == "tiny"
    async with await ChatClient.connect(first.url, api_key=first.api_key) as client:
        request = ResponseRequest(input="hello", sampling={"max_output_tokens": 3})
        answer = await client.send(request)
        types = [event.type async for event in answer]
    assert types[-1] == "response.incomplete"
    assert stop_server(paths) == record
    assert find_server(paths) is None
