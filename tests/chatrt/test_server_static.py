from __future__ import annotations

import asyncio
import http.client
import re
from importlib.resources import files
from typing import TYPE_CHECKING

import pytest

from chatrt.testing.service import ScriptedService
from chatrt.testing.serving import serving

if TYPE_CHECKING:
    from chatrt.server.server import Server

HOST = "127.0.0.1"
PAGE_FILES = sorted(
    entry.name for entry in (files("chatrt") / "web").iterdir() if entry.name != "package.json"
)


class Got:
    """An HTTP answer, read."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()


async def ask(
    server: Server, path: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> Got:
    def blocking() -> Got:
        connection = http.client.HTTPConnection(HOST, server.port, timeout=5)
        connection.putrequest(method, path, skip_host="Host" in (headers or {}))
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders()
        got = Got(connection.getresponse())
        connection.close()
        return got

    return await asyncio.to_thread(blocking)


async def test_the_page_needs_no_key_but_its_host_and_origin_are_checked() -> None:
    async with serving(ScriptedService(), api_keys=("k",)) as server:
        got = await ask(server, "/")
        assert (got.status, got.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert got.body == (await ask(server, "/index.html")).body
        assert (await ask(server, "/", {"Host": "evil.example"})).status == 403
        assert (await ask(server, "/", {"Origin": "http://evil.example"})).status == 403
        assert (await ask(server, "/v1/models")).status == 401


@pytest.mark.parametrize("name", PAGE_FILES)
async def test_every_file_is_the_packages_own_with_its_type(name: str) -> None:
    types = {
        "html": "text/html; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "ts": "text/plain; charset=utf-8",
        "svg": "image/svg+xml",
    }
    async with serving(ScriptedService()) as server:
        got = await ask(server, f"/{name}")
    assert got.status == 200
    assert got.headers["Content-Type"] == types[name.rpartition(".")[2]]
    assert got.body == (files("chatrt") / "web" / name).read_bytes()
    assert got.headers["X-Content-Type-Options"] == "nosniff"
    assert got.headers["Cache-Control"] == "no-cache"
    assert got.headers["Referrer-Policy"] == "no-referrer"
    assert got.headers.get_all("Content-Type") == [got.headers["Content-Type"]]


def test_the_page_names_all_its_modules_so_that_they_are_fetched_at_once() -> None:
    page = (files("chatrt") / "web" / "index.html").read_text(encoding="utf-8")
    named = re.findall(r'(?:modulepreload" href|module" src)="([\w-]+\.js)"', page)
    assert sorted(named) == [name for name in PAGE_FILES if name.endswith(".js")]


async def test_the_policy_lets_only_the_pages_own_run_and_its_own_socket_be_reached() -> None:
    async with serving(ScriptedService()) as server:
        authority = f"localhost:{server.port}"
        got = await ask(server, "/", {"Host": authority})
    policy = dict(
        directive.strip().partition(" ")[::2]
        for directive in got.headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["connect-src"] == f"'self' ws://{authority} wss://{authority}"
    assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in got.headers["Content-Security-Policy"]


@pytest.mark.parametrize("host", ["localhost; script-src *", "localhost:1 evil.example"])
async def test_a_strange_host_adds_nothing_to_the_policy(host: str) -> None:
    async with serving(ScriptedService(), allow_hosts=("*",)) as server:
        got = await ask(server, "/", {"Host": host})
    assert got.headers["Content-Security-Policy"].endswith("; connect-src 'self'")


async def test_head_has_the_headers_of_get_and_no_body() -> None:
    async with serving(ScriptedService()) as server:
        got = await ask(server, "/", method="GET")
        head = await ask(server, "/", method="HEAD")
    assert head.body == b""
    assert head.headers["Content-Length"] == str(len(got.body))
    assert {**head.headers, "Date": ""} == {**got.headers, "Date": ""}


async def test_what_has_not_changed_is_not_sent_again() -> None:
    async with serving(ScriptedService()) as server:
        etag = (await ask(server, "/")).headers["ETag"]
        for known in (etag, f'"other", W/{etag}', "*"):
            got = await ask(server, "/", {"If-None-Match": known})
            assert (got.status, got.body, got.headers["ETag"]) == (304, b"", etag)
            assert "Content-Security-Policy" in got.headers
            assert "Content-Length" not in got.headers
        assert (await ask(server, "/", {"If-None-Match": '"other"'})).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/..%2f__init__.py",
        "/%2e%2e/__init__.py",
        "/web/index.html",
        "//index.html/../../__init__.py",
        "/index.html%00",
        "/__init__.py",
        "/package.json",
        "/INDEX.HTML",
        "/index.html/",
        "/app.js/",
        "/.",
    ],
)
async def test_no_path_leads_out_of_the_table(path: str) -> None:
    async with serving(ScriptedService()) as server:
        assert (await ask(server, path)).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_the_page_is_only_read(method: str) -> None:
    async with serving(ScriptedService()) as server:
        assert (await ask(server, "/", method=method)).status == 404


async def test_a_socket_is_not_offered_at_the_page() -> None:
    async with serving(ScriptedService()) as server:
        got = await ask(server, "/", {"Connection": "Upgrade", "Upgrade": "websocket"})
    assert got.status == 404
