from __future__ import annotations

from typing import Any

import pytest
from websockets.datastructures import Headers

from chatrt.server.handshake import (
    KEY_SUBPROTOCOL,
    NO_KEY_ID,
    Admitted,
    Gate,
    Refused,
    select_subprotocol,
)
from chatrt.server.settings import ServerSettings

HOST = {"Host": "127.0.0.1:8642"}


def check(headers: dict[str, str], **settings: Any) -> Admitted | Refused:
    return Gate(ServerSettings(**settings)).check(Headers(HOST | headers))


def status(verdict: Admitted | Refused) -> int:
    return 200 if isinstance(verdict, Admitted) else verdict.status.value


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost:8642", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1", 200),
        ("[::1]:8642", 200),
        ("localhost.", 200),
        ("chat.example:80", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("192.168.1.5", 403),
        ("", 403),
    ],
)
def test_only_loopback_and_listed_hosts_pass(host: str, expected: int) -> None:
    verdict = check({"Host": host}, allow_hosts=("chat.example",))
    assert status(verdict) == expected


def test_an_address_passes_where_other_machines_are_served() -> None:
    settings: dict[str, Any] = {"host": "0.0.0.0", "insecure_no_auth": True}
    assert status(check({"Host": "192.168.1.5:8642"}, **settings)) == 200
    assert status(check({"Host": "rebound.example"}, **settings)) == 403
    assert status(check({"Host": "any.example"}, **settings, allow_hosts=("*",))) == 200


def test_no_host_or_two_hosts_are_refused() -> None:
    gate = Gate(ServerSettings())
    assert status(gate.check(Headers())) == 403
    assert status(gate.check(Headers([("Host", "localhost"), ("Host", "localhost")]))) == 403


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, 200),
        ("http://localhost:3000", 200),
        ("https://127.0.0.1", 200),
        ("http://[::1]:5000", 200),
        ("https://chat.example", 200),
        ("https://CHAT.example", 200),
        ("null", 403),
        ("http://chat.example", 403),
        ("https://chat.example:444", 403),
        ("https://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("file://localhost", 403),
        ("http://[broken", 403),
        ("", 403),
    ],
)
def test_only_absent_loopback_and_listed_origins_pass(origin: str | None, expected: int) -> None:
    headers = {} if origin is None else {"Origin": origin}
    assert status(check(headers, allow_origins=("https://chat.example/",))) == expected


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("192.168.1.5:8642", "http://192.168.1.5:8642", 200),
        ("chat.example", "https://chat.example", 200),
        ("chat.example", "HTTPS://Chat.Example", 200),
        ("192.168.1.5:8642", "http://192.168.1.5:8643", 403),
        ("192.168.1.5:8642", "http://192.168.1.6:8642", 403),
        ("chat.example", "https://chat.example.evil", 403),
        ("chat.example", "ftp://chat.example", 403),
    ],
)
def test_the_page_that_the_server_itself_serves_passes(
    host: str, origin: str, expected: int
) -> None:
    settings = {"host": "0.0.0.0", "api_keys": ("one",), "allow_hosts": ("chat.example",)}
    headers = {"Host": host, "Origin": origin, "Authorization": "Bearer one"}
    assert status(check(headers, **settings)) == expected


def test_a_rebound_name_is_not_ones_own_where_every_host_is_allowed() -> None:
    headers = {"Host": "evil.example:8642", "Origin": "http://evil.example:8642"}
    assert status(check(headers, allow_hosts=("*",))) == 403


def test_a_star_allows_every_origin_but_null() -> None:
    assert status(check({"Origin": "https://any.example"}, allow_origins=("*",))) == 200
    assert status(check({"Origin": "null"}, allow_origins=("*",))) == 403


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Authorization": "Bearer one"}, 200),
        ({"Authorization": "bearer two"}, 200),
        ({"Sec-WebSocket-Protocol": f"realtime, {KEY_SUBPROTOCOL}one"}, 200),
        ({"Authorization": "Bearer three"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Basic one"}, 401),
        ({"Authorization": "one"}, 401),
        ({"Sec-WebSocket-Protocol": f"realtime, {KEY_SUBPROTOCOL}three"}, 401),
        ({"Sec-WebSocket-Protocol": "realtime"}, 401),
        ({"Authorization": "Bearer ö"}, 401),
        ({}, 401),
    ],
)
def test_a_key_in_the_header_or_the_subprotocol_passes(
    headers: dict[str, str], expected: int
) -> None:
    assert status(check(headers, api_keys=("one", "two"))) == expected


def test_each_key_has_its_own_id_which_is_not_the_key() -> None:
    verdicts = [
        check({"Authorization": f"Bearer {key}"}, api_keys=("one", "two"))
        for key in ("one", "two", "one")
    ]
    ids = [verdict.key_id for verdict in verdicts if isinstance(verdict, Admitted)]
    assert ids[0] == ids[2] != ids[1]
    assert "one" not in ids[0]


def test_without_keys_everybody_is_the_same_caller() -> None:
    assert check({"Authorization": "Bearer x"}) == check({}) == Admitted(NO_KEY_ID)


def test_only_realtime_is_answered_as_subprotocol() -> None:
    assert select_subprotocol([f"{KEY_SUBPROTOCOL}k", "realtime"]) == "realtime"
    assert select_subprotocol([f"{KEY_SUBPROTOCOL}k"]) is None
    assert select_subprotocol([]) is None
