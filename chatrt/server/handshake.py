"""Who may talk to the server: host, origin and key, from the headers of the first request.

Knows: headers, keys (as digests), allow-lists. Does not know: routes, what is done afterwards.
Invariant: a refusal comes before the upgrade; keys are compared in constant time, all of them.
Source: DNS rebinding needs a name in Host, cross-site use an Origin; both are checked.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from chatrt.server.settings import ServerSettings, is_loopback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from websockets.datastructures import Headers

SUBPROTOCOL = "realtime"
KEY_SUBPROTOCOL = "openai-insecure-api-key."
NO_KEY_ID = "local"
"""The key id of everybody where no key is asked for."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request may go on, on behalf of `key_id`."""

    key_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The request ends here, with an HTTP status and a sentence."""

    status: HTTPStatus
    code: str
    message: str


class Gate:
    """Checks the headers of a request against the settings."""

    def __init__(self, settings: ServerSettings) -> None:
        self._key_digests = [_digest(key) for key in settings.api_keys]
        self._origins = {origin.rstrip("/").lower() for origin in settings.allow_origins}
        self._hosts = {_host_name(host) for host in (settings.host, *settings.allow_hosts)}
        self._serves_other_machines = not is_loopback(settings.host)

    def check(self, headers: Headers) -> Admitted | Refused:
        """Host, origin, then key."""
        elsewhere = self.check_place(headers)
        if elsewhere is not None:
            return elsewhere
        key_id = self._key_id(_offered_key(headers))
        if key_id is None:
            return Refused(
                HTTPStatus.UNAUTHORIZED, "invalid_api_key", "the API key is missing or wrong"
            )
        return Admitted(key_id)

    def check_place(self, headers: Headers) -> Refused | None:
        """Host and origin alone, for what needs no key; None if both may be."""
        hosts = headers.get_all("Host")
        if not self._host_allowed(hosts):
            return Refused(HTTPStatus.FORBIDDEN, "host_not_allowed", "this Host is not allowed")
        origins = headers.get_all("Origin")
        if not (self._origin_allowed(origins) or self._is_own_origin(origins, hosts[0])):
            return Refused(HTTPStatus.FORBIDDEN, "origin_not_allowed", "this Origin is not allowed")
        return None

    def _host_allowed(self, hosts: Sequence[str]) -> bool:
        return len(hosts) == 1 and ("*" in self._hosts or self._is_ours(_host_name(hosts[0])))

    def _is_ours(self, name: str) -> bool:
        """Whether a name can only mean this server: one of loopback, one given, or an address."""
        if is_loopback(name) or name in self._hosts:
            return True
        # An address cannot be rebound: whoever typed it meant this machine.
        return self._serves_other_machines and _is_address(name)

    def _origin_allowed(self, origins: Sequence[str]) -> bool:
        if not origins:
            return True
        origin = origins[0].lower()
        if len(origins) > 1 or origin == "null":
            return False
        if origin in self._origins or "*" in self._origins:
            return True
        try:
            url = urlsplit(origin)
        except ValueError:
            return False
        return url.scheme in ("http", "https") and is_loopback(url.hostname or "")

    def _is_own_origin(self, origins: Sequence[str], host: str) -> bool:
        """Whether the request comes from the page that this server itself serves at `host`.

        Where any Host is allowed, a rebound name would pass as one's own: that does not count.
        """
        if len(origins) != 1 or not self._is_ours(_host_name(host)):
            return False
        scheme, _, authority = origins[0].lower().partition("://")
        return scheme in ("http", "https") and authority == host.strip().lower()

    def _key_id(self, key: str | None) -> str | None:
        if not self._key_digests:
            return NO_KEY_ID
        digest = _digest(key or "")
        matches = [hmac.compare_digest(digest, known) for known in self._key_digests]
        return digest.hex()[:16] if any(matches) else None


def select_subprotocol(offered: Sequence[str]) -> str | None:
    """The subprotocol to answer with: ours if it was offered, never the one with the key."""
    return SUBPROTOCOL if SUBPROTOCOL in offered else None


def _offered_key(headers: Headers) -> str | None:
    for value in headers.get_all("Authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            return key.strip()
    for value in headers.get_all("Sec-WebSocket-Protocol"):
        for name in value.split(","):
            if name.strip().startswith(KEY_SUBPROTOCOL):
                return name.strip().removeprefix(KEY_SUBPROTOCOL)
    return None


def _host_name(host: str) -> str:
    """The name in a Host header or a setting, without port, brackets and final dot."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    if host.count(":") == 1:
        host = host.partition(":")[0]
    return host.rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
