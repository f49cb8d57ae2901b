from __future__ import annotations

import asyncio
import http.client
import json
from typing import TYPE_CHECKING, Any

import pytest
from websockets.datastructures import Headers
from websockets.http11 import Request

from chatrt.server.http import Target
from chatrt.testing.service import ScriptedService
from chatrt.testing.serving import calling, serving

if TYPE_CHECKING:
    from chatrt.server.server import Server
    from chatrt.wire.live import Sockets


async def call(
    server: Server, method: str, path: str, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    def blocking() -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        body = response.read().decode()
        connection.close()
        is_json = response.headers["Content-Type"] == "application/json"
        return response.status, json.loads(body) if is_json else body

    return await asyncio.to_thread(blocking)


def test_a_target_is_decoded_after_it_is_split() -> None:
    target = Target.of(Request("/v1/a%2Fb/?q=x%20y&q=z", Headers(Upgrade="WebSocket"), "GET"))
    assert target.segments == ("v1", "a/b")
    assert target.path == "/v1/a%2Fb"
    assert (target.parameter("q"), target.parameter("none")) == ("x y", None)
    assert target.upgrade


async def test_health_and_ready_are_open_and_ready_follows_the_service() -> None:
    service = ScriptedService(is_ready=False)
    async with serving(service, api_keys=("k",)) as server:
        assert await call(server, "GET", "/health", {"Host": "evil.example"}) == (
            200,
            {"status": "ok"},
        )
        assert (await call(server, "GET", "/ready"))[0] == 503
        service.is_ready = True
        assert (await call(server, "GET", "/ready"))[0] == 200


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/v1/conversations", "/nothing"])
async def test_everything_else_is_guarded(path: str) -> None:
    async with serving(ScriptedService(), api_keys=("k",)) as server:
        key = {"Authorization": "Bearer k"}
        assert (await call(server, "GET", path))[0] == 401
        assert (await call(server, "GET", path, {"Authorization": "Bearer x"}))[0] == 401
        assert (await call(server, "GET", path, key | {"Origin": "null"}))[0] == 403
        assert (await call(server, "GET", path, key | {"Host": "evil.example"}))[0] == 403
        assert (await call(server, "GET", path, key))[0] == (404 if path == "/nothing" else 200)


async def test_models_and_metrics_are_the_services() -> None:
    async with serving(ScriptedService()) as server:
        status, models = await call(server, "GET", "/v1/models")
        assert (status, models["object"], models["data"][0]["id"]) == (200, "list", "scripted")
        assert await call(server, "GET", "/metrics") == (200, "chatrt_responses_total 0\n")


async def test_one_model_is_read_by_its_name_and_an_unknown_one_is_told_which_is_served() -> None:
    async with serving(ScriptedService()) as server:
        _, models = await call(server, "GET", "/v1/models")
        assert await call(server, "GET", "/v1/models/scripted") == (200, models["data"][0])
        status, body = await call(server, "GET", "/v1/models/some/other")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert body["error"]["message"] == "model some/other is not served here, scripted is"


async def test_a_response_is_read_cancelled_and_deleted() -> None:
    async with serving(ScriptedService(delay_s=0.01)) as server, calling(server) as caller:
        await caller.create("word " * 500)
        response_id = (await caller.receive())["response"]["id"]
        path = f"/v1/responses/{response_id}"
        assert (await call(server, "GET", path))[1]["status"] == "in_progress"
        status, body = await call(server, "POST", f"{path}/cancel", {"Content-Length": "0"})
        assert (status, body["status"]) == (200, "cancelled")
        await caller.until()
        assert (await call(server, "GET", path))[1]["status"] == "cancelled"
        assert (await call(server, "DELETE", path))[1]["deleted"] is True
        status, body = await call(server, "GET", path)
        assert (status, body["error"]["code"]) == (404, "not_found")


async def test_conversations_are_listed_searched_read_and_deleted() -> None:
    async with serving(ScriptedService()) as server, calling(server) as caller:
        ids = []
        for title in ("red apple", "green"):
            await caller.send({"type": "chatrt.conversation.create", "title": title})
            ids.append((await caller.receive())["conversation"]["id"])
        await caller.create("hello there", conversation=ids[0])
        await caller.until()
        _, listed = await call(server, "GET", "/v1/conversations")
        assert [entry["id"] for entry in listed["data"]] == ids[::-1]
        _, found = await call(server, "GET", "/v1/conversations?q=red%20a")
        assert [entry["id"] for entry in found["data"]] == ids[:1]
        _, items = await call(server, "GET", f"/v1/conversations/{ids[0]}/items")
        texts = [item["content"][0]["text"] for item in items["data"]]
        assert texts == ["hello there", "hello there"]
        _, turns = await call(server, "GET", f"/v1/conversations/{ids[0]}/turns")
        (turn,) = turns["data"]
        assert (turn["id"], turn["previous_response_id"]) == (turns["first_id"], None)
        assert (await call(server, "DELETE", f"/v1/conversations/{ids[0]}"))[0] == 200
        for of in ("items", "turns"):
            assert (await call(server, "GET", f"/v1/conversations/{ids[0]}/{of}"))[0] == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nothing.js"),
        ("PUT", "/v1/models"),
        ("POST", "/v1/responses/x/other"),
        ("PATCH", "/v1/conversations/x"),
    ],
)
async def test_an_unknown_route_is_404_in_the_apis_form(method: str, path: str) -> None:
    async with serving(ScriptedService()) as server:
        status, body = await call(server, method, path)
    assert status == 404
    assert set(body["error"]) == {"type", "code", "message", "param"}


async def test_a_failure_of_the_service_is_500_without_its_words() -> None:
    class Broken(ScriptedService):
        async def metrics(self, sockets: Sockets) -> bytes:
            raise RuntimeError("the secret")

    async with serving(Broken()) as server:
        status, body = await call(server, "GET", "/metrics")
    assert (status, "secret" in str(body)) == (500, False)


async def test_another_keys_ids_do_not_exist() -> None:
    keys = {name: {"Authorization": f"Bearer {name}"} for name in ("one", "two")}
    async with (
        serving(ScriptedService(), api_keys=("one", "two")) as server,
        calling(server, additional_headers=keys["one"]) as caller,
    ):
        await caller.create("a")
        response_id = (await caller.until())[-1]["response"]["id"]
        path = f"/v1/responses/{response_id}"
        assert (await call(server, "GET", path, keys["one"]))[0] == 200
        assert (await call(server, "GET", path, keys["two"]))[0] == 404
