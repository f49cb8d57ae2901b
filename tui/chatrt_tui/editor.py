"""Writes a message in the person's own editor.

Knows: `$VISUAL` and `$EDITOR`, a file for the text. Does not know: widgets.
The terminal must be the editor's own meanwhile: the app is suspended by the caller.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Mapping


def editor_command(environ: Mapping[str, str]) -> list[str]:
    """The person's editor.

    Raises:
        InvalidValue: None is set, or it is written so that no shell would understand it.
    """
    named = environ.get("VISUAL") or environ.get("EDITOR") or ""
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise InvalidValue(f"$VISUAL or $EDITOR is {named!r}: {error}") from None
    if not command:
        raise InvalidValue("set $VISUAL or $EDITOR to your editor first")
    return command


def write_in(command: list[str], text: str) -> str:
    """What `text` has become in the editor, without line ends behind it.

    Raises:
        InvalidValue: It could not be started, or ended with a failure; the text is as it was.
    """
    with tempfile.TemporaryDirectory(prefix="chatrt-") as folder:
        path = Path(folder) / "message.md"
        path.write_text(text, encoding="utf-8")
        try:
            status = subprocess.run([*command, str(path)], check=False).returncode
        except OSError as error:
            raise InvalidValue(f"{command[0]} cannot be started: {error.strerror}") from None
        if status != 0:
            raise InvalidValue(f"{command[0]} ended with status {status}; the text is as it was")
        try:
            return path.read_text(encoding="utf-8", errors="replace").rstrip("\n")
        except OSError as error:
            told = f"{command[0]} left no text ({error.strerror}); it is as it was"
            raise InvalidValue(told) from None
