"""Slow clients of one connection: merging, pausing, closing; no other client notices."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from chatrt.testing.service import ScriptedService, echo_words
from chatrt.testing.serving import calling, eventually, serving, text_of


async def test_a_slow_reader_delays_no_other_and_loses_nothing() -> None:
    pieces = [f"{i:05}" + "x" * 20_000 for i in range(1000)]
    service = ScriptedService(
        lambda message: pieces if message.input[0].content == "long" else echo_words(message)
    )
    async with (
        serving(service, outbox_bytes=2**30) as server,
        calling(server, max_queue=1) as slow,
        calling(server) as quick,
    ):
        await slow.create("long")
        await eventually(lambda: len(service.responses) == 1)
        log = next(iter(service.responses.values())).log
        await eventually(lambda: log.finished)
        await quick.create("in between")
        assert text_of(await quick.until()) == "in between"
        events = await slow.until()
    assert text_of(events) == "".join(pieces)
    assert len(events) < len(pieces)
    numbers = [e["sequence_number"] for e in events]
    assert numbers == sorted(numbers)
    assert numbers[-1] == log.num_events - 1


async def test_decoding_pauses_for_a_slow_reader_and_goes_on_when_it_reads() -> None:
    service = ScriptedService(lambda message: ["x" * 50_000] * 400)
    async with (
        serving(service, outbox_bytes=200_000) as server,
        calling(server, max_queue=1) as caller,
    ):
        await caller.create("go")
        await eventually(lambda: service.paused)
        assert server.outbox_bytes >= 200_000
        assert not next(iter(service.responses.values())).log.finished
        events = await caller.until()
    assert len(text_of(events)) == 50_000 * 400
    assert set(service.resumed) == set(service.paused)


async def test_a_client_that_never_reads_is_closed_with_1013() -> None:
    service = ScriptedService(lambda message: ["x" * 50_000] * 400)
    async with (
        serving(service, outbox_bytes=200_000, slow_client_s=0.2, disconnect_grace_s=0.0) as server,
        calling(server, max_queue=1) as caller,
    ):
        await caller.create("go")
        await eventually(lambda: service.paused)
        await asyncio.sleep(0.4)
        code = await caller.until_closed()
        await eventually(lambda: server.num_connections == 0)
    assert code == 1013
    assert service.abandoned == list(service.responses)


async def test_a_client_that_floods_without_reading_and_vanishes_leaves_nothing_behind() -> None:
    service = ScriptedService(lambda message: ["x"] * 10, delay_s=60.0)
    async with (
        serving(service, disconnect_grace_s=0.0) as server,
        calling(server) as caller,
    ):
        await caller.create("long")
        await eventually(lambda: service.responses)
        caller.socket.transport.pause_reading()
        create = {"type": "chatrt.conversation.create", "title": "x" * 256}
        with suppress(TimeoutError):  # the server takes no more: its replies do not go out
            async with asyncio.timeout(1.0):
                while True:
                    await caller.send(create)
        assert server.num_connections == 1
        caller.socket.transport.abort()
        await eventually(lambda: server.num_connections == 0)
    assert service.abandoned == list(service.responses)
