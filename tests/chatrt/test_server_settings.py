from __future__ import annotations

import pytest

from chatrt.errors import SettingsError
from chatrt.server.settings import ServerSettings, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9", "a.localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    assert ServerSettings(host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com", ""])
def test_another_address_needs_a_key_or_the_words(host: str) -> None:
    with pytest.raises(SettingsError, match="insecure_no_auth"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, api_keys=("k",)).api_keys == ("k",)
    assert ServerSettings(host=host, insecure_no_auth=True).insecure_no_auth


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(SettingsError, match="empty"):
        ServerSettings(api_keys=("good", ""))


def test_keys_are_not_in_the_repr() -> None:
    assert "secret" not in repr(ServerSettings(api_keys=("secret",)))
