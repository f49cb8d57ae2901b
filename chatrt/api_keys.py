"""API keys in a file: one a line, made at the first start, read by the server and by clients.

Knows: the file's form and mode (0600). Does not know: who asks, how a key travels.
Invariant: two processes that make the file at once end up with the same key.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from chatrt.errors import SettingsError
from chatrt.paths import ensure_folder

if TYPE_CHECKING:
    from pathlib import Path

KEY_BYTES = 32


def read_api_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file; empty lines and lines that start with `#` do not count.

    Raises:
        SettingsError: It cannot be read, or it holds no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"the API key file {path} cannot be read: {error}") from error
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise SettingsError(f"the API key file {path} holds no key")
    return keys


def ensure_api_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, which is made with a random key if it does not exist.

    Raises:
        SettingsError: It can be neither read nor made.
    """
    if not path.exists():
        try:
            _make(path)
        except OSError as error:
            raise SettingsError(f"the API key file {path} cannot be made: {error}") from error
    return read_api_keys(path)


def _make(path: Path) -> None:
    ensure_folder(path.parent)
    whole = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(KEY_BYTES) + "\n")
        # A link, not a rename: whoever comes second must not replace the first one's key.
        os.link(whole, path)
    except FileExistsError:
        pass
    finally:
        whole.unlink()
