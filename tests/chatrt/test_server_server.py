from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from chatrt.errors import ServerUnavailable
from chatrt.server.handshake import KEY_SUBPROTOCOL
from chatrt.server.server import Server
from chatrt.server.settings import ServerSettings
from chatrt.testing.service import ScriptedService
from chatrt.testing.serving import calling, eventually, serving, text_of

KEY = {"Authorization": "Bearer k"}


async def status_of(server: Server, path: str = "/v1/responses", **options: Any) -> int:
    try:
        async with calling(server, path, **options):
            return 101
    except InvalidStatus as error:
        return error.response.status_code


async def test_bad_key_origin_host_and_path_are_refused_before_the_upgrade() -> None:
    async with serving(ScriptedService(), api_keys=("k",)) as server:
        assert await status_of(server) == 401
        assert await status_of(server, additional_headers={"Authorization": "Bearer x"}) == 401
        assert await status_of(server, additional_headers=KEY) == 101
        assert await status_of(server, additional_headers=KEY, origin="null") == 403
        assert await status_of(server, additional_headers=KEY, origin="http://localhost:1") == 101
        assert await status_of(server, additional_headers=KEY, origin="https://evil.example") == 403
        assert await status_of(server, "/v1/other", additional_headers=KEY) == 404
        assert await status_of(server, "/responses", additional_headers=KEY) == 101


async def test_a_browsers_key_is_read_from_the_subprotocol_and_only_realtime_answered() -> None:
    async with serving(ScriptedService(), api_keys=("k",)) as server:
        offer = ["realtime", f"{KEY_SUBPROTOCOL}k"]
        async with calling(server, subprotocols=offer) as caller:
            assert caller.socket.subprotocol == "realtime"
        async with calling(server, subprotocols=offer[1:]) as caller:
            assert caller.socket.subprotocol is None
        assert await status_of(server, subprotocols=["realtime", f"{KEY_SUBPROTOCOL}x"]) == 401


async def test_offered_compression_is_answered_without_it() -> None:
    async with (
        serving(ScriptedService()) as server,
        calling(server, compression="deflate") as caller,
    ):
        assert caller.socket.protocol.extensions == []
        assert caller.socket.response is not None
        assert "Server" not in caller.socket.response.headers


async def test_a_key_may_open_only_so_many_connections() -> None:
    settings: dict[str, Any] = {"max_connections_per_key": 1, "api_keys": ("k", "l")}
    async with serving(ScriptedService(), **settings) as server:
        async with calling(server, additional_headers=KEY):
            assert server.num_connections == 1
            assert await status_of(server, additional_headers=KEY) == 429
            other = {"Authorization": "Bearer l"}
            assert await status_of(server, additional_headers=other) == 101
        await eventually(lambda: server.num_connections == 0)
        assert await status_of(server, additional_headers=KEY) == 101


async def test_connections_upgraded_in_the_same_moment_do_not_pass_the_limit() -> None:
    async with serving(ScriptedService(), max_connections_per_key=1) as server:
        url = f"ws://127.0.0.1:{server.port}/v1/responses"

        async def try_one() -> bool:
            try:
                async with connect(url) as socket:
                    await socket.send('{"type":"response.create","input":"a"}')
                    await socket.recv()
                    await asyncio.sleep(0.1)
                    return True
            except (ConnectionClosed, InvalidStatus):
                return False

        assert sum(await asyncio.gather(*(try_one() for _ in range(5)))) == 1


async def test_a_port_in_use_is_one_clear_sentence() -> None:
    async with serving(ScriptedService()) as server:
        other = Server(ScriptedService(), ServerSettings(port=server.port))
        with pytest.raises(ServerUnavailable, match=f"port {server.port} is in use"):
            await other.start()


async def test_an_address_of_another_machine_is_one_clear_sentence() -> None:
    settings = ServerSettings(host="192.0.2.1", port=0, insecure_no_auth=True)
    with pytest.raises(ServerUnavailable, match=r"cannot listen on 192\.0\.2\.1"):
        await Server(ScriptedService(), settings).start()


async def test_draining_refuses_new_turns_and_lets_running_ones_finish() -> None:
    server = Server(ScriptedService(delay_s=0.02), ServerSettings(port=0, drain_s=5))
    await server.start()
    port = server.port
    async with calling(server) as caller, calling(server) as idle:
        await caller.create("one two three four", stream_id="a")
        await caller.receive()
        draining = asyncio.create_task(server.drain())
        await asyncio.sleep(0.01)
        await caller.create("late", stream_id="b")
        with pytest.raises((ConnectionRefusedError, InvalidStatus)):
            await connect(f"ws://127.0.0.1:{port}/v1/responses")
        codes = [await caller.until_closed(), await idle.until_closed()]
    await draining
    await server.serve_forever()
    assert codes == [1012, 1012]
    running = [e for e in caller.frames if e["stream_id"] == "a"]
    assert text_of(running) == "one two three four"
    assert running[-1]["type"] == "response.completed"
    refused = [e for e in caller.frames if e["stream_id"] == "b"]
    assert [e["error"]["code"] for e in refused] == ["server_unavailable"]


async def test_draining_cuts_off_what_runs_longer_than_the_drain_time() -> None:
    service = ScriptedService(delay_s=0.05)
    server = Server(service, ServerSettings(port=0, drain_s=0.1))
    await server.start()
    async with calling(server) as caller:
        await caller.create("word " * 500)
        await caller.receive()
        await asyncio.wait_for(server.drain(), 3)
        assert await caller.until_closed() == 1012
    assert service.abandoned == list(service.responses)


async def test_the_server_ends_when_no_client_was_there_for_the_idle_time() -> None:
    server = Server(ScriptedService(), ServerSettings(port=0, idle_exit_s=0.15))
    await server.start()
    forever = asyncio.create_task(server.serve_forever())
    async with calling(server):
        await asyncio.sleep(0.3)
        assert not forever.done()
    await asyncio.wait_for(forever, 3)


async def test_the_idle_time_does_not_run_while_the_model_is_loading() -> None:
    service = ScriptedService(is_ready=False)
    server = Server(service, ServerSettings(port=0, idle_exit_s=0.05))
    await server.start()
    forever = asyncio.create_task(server.serve_forever())
    await asyncio.sleep(0.2)
    assert not forever.done()
    service.is_ready = True
    await asyncio.wait_for(forever, 3)


async def test_a_server_without_idle_exit_stays() -> None:
    async with serving(ScriptedService()) as server:
        async with calling(server):
            pass
        await asyncio.sleep(0.05)
        assert await status_of(server) == 101


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
async def test_sigterm_drains_and_a_second_one_stops_at_once() -> None:
    server = Server(ScriptedService(delay_s=0.05), ServerSettings(port=0, drain_s=60))
    await server.start()
    server.install_signal_handlers()
    try:
        async with calling(server) as caller:
            await caller.create("word " * 500)
            await caller.receive()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
            assert server.num_connections == 1
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(server.serve_forever(), 3)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
