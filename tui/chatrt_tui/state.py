"""What the terminal client remembers from one time to the next: the theme.

Knows: its file, how it is written. Does not know: widgets, which themes there are.
Invariant: a file that cannot be read or written costs nothing but the memory of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from chatrt.paths import ensure_folder

if TYPE_CHECKING:
    from pathlib import Path


class Remembered(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept; unknown fields of a newer version are passed over."""

    theme: str | None = None


def recall(path: Path | None) -> Remembered:
    """What was kept, nothing if there is no such file or it is no longer readable."""
    if path is None:
        return Remembered()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Remembered)
    except (OSError, msgspec.MsgspecError):
        return Remembered()


def keep(path: Path | None, remembered: Remembered) -> None:
    """Keep it for the next time, if it can be."""
    if path is None:
        return
    try:
        ensure_folder(path.parent)
        path.write_bytes(msgspec.json.encode(remembered))
    except OSError:
        return  # a read-only home: the theme is asked for again
