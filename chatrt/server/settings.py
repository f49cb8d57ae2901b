"""What a server is told at its start.

Knows: addresses, keys, limits. Does not know: models or sampling.
Invariant: an address that other machines reach has a key, or the words `insecure_no_auth`.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from chatrt.errors import SettingsError
from chatrt.wire.messages import WireLimits


def is_loopback(host: str) -> bool:
    """Whether a host name or address (IPv6 without brackets) is this machine's own."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where to listen, whom to serve, and how much.

    `port` 0 takes a free one. `allow_origins` are whole origins (`https://host[:port]`),
    `allow_hosts` names without port; loopback is always in both, `*` allows all.
    `idle_exit_s` None never ends for want of clients.

    Raises:
        SettingsError: The address is not loopback and there is no key.
    """

    host: str = "127.0.0.1"
    port: int = 8642
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    insecure_no_auth: bool = False
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    max_message_bytes: int = 4 * 2**20
    max_connections_per_key: int = 64
    max_lanes: int = 32
    max_active_lanes: int = 16
    max_queued_per_lane: int = 16
    max_subscriptions: int = 32
    outbox_bytes: int = 2**20
    slow_client_s: float = 30.0
    disconnect_grace_s: float = 30.0
    drain_s: float = 10.0
    idle_exit_s: float | None = None
    wire: WireLimits = field(default_factory=WireLimits)

    def __post_init__(self) -> None:
        if any(not key for key in self.api_keys):
            raise SettingsError("an API key is empty", param="api_keys")
        if not (is_loopback(self.host) or self.api_keys or self.insecure_no_auth):
            raise SettingsError(
                f"host {self.host} is reachable from other machines: "
                "set an API key, or insecure_no_auth to serve anyone",
                param="host",
            )
