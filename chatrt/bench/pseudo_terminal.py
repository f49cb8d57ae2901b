"""A program in a terminal of its own: keys go in, and what it paints can be read as lines.

Knows: pseudo-terminals, the few control sequences with which Textual paints.
Does not know: chatrt. Colours and wide characters are of no interest here.
Invariant: the program has ended when the context does. Only where there are pseudo-terminals: not
on Windows.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_READ_BYTES = 65536
_LOOK_S = 0.05  # how often a condition is looked at though nothing is written
_TOKEN = re.compile(
    r"\x1b\[(?P<row>\d*);?(?P<column>\d*)H"  # the cursor goes there
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1bP[^\x1b]*\x1b\\|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[^\[\]P]"
    r"|(?P<control>[\x00-\x1a\x1c-\x1f])|(?P<text>[^\x00-\x1f]+)"
)


class Screen:
    """What stands where, after all that was written."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self._cells = [[" "] * num_columns for _ in range(num_rows)]
        self._row = self._column = 0
        self._unread = ""

    def write(self, written: str) -> None:
        """Take what the program writes; a sequence cut in two waits for its rest."""
        text, end = self._unread + written, 0
        for token in _TOKEN.finditer(text):
            if token.start() != end:
                break  # the rest of a sequence is to come
            end = token.end()
            self._take(token)
        self._unread = text[end:]

    def lines(self) -> list[str]:
        """The lines, without blanks at their ends."""
        return ["".join(cells).rstrip() for cells in self._cells]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _take(self, token: re.Match[str]) -> None:
        if token["row"] is not None:
            self._row = int(token["row"] or 1) - 1
            self._column = int(token["column"] or 1) - 1
        elif token["control"] == "\n":
            self._row += 1
        elif token["control"] == "\r":
            self._column = 0
        for character in token["text"] or "":
            if self._row < len(self._cells) and self._column < len(self._cells[0]):
                self._cells[self._row][self._column] = character
            self._column += 1


class Terminal:
    """The program's keyboard and screen."""

    def __init__(self, ours: int, screen: Screen) -> None:
        self._ours = ours
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.screen = screen

    def press(self, keys: str) -> None:
        """Send keys, as a terminal does."""
        os.write(self._ours, keys.encode())

    def type_slowly(self, text: str, *, pause_s: float) -> None:
        """Press one key after the other, with a pause behind each, and read along."""
        for key in text:
            self.press(key)
            self.rest(pause_s)

    def rest(self, seconds: float) -> None:
        """Press nothing for so long, and read along."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self._read(left_s)

    def discard(self, seconds: float) -> None:
        """Press nothing for so long; what is painted meanwhile is missing on the screen."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if select.select([self._ours], [], [], left_s)[0]:
                os.read(self._ours, _READ_BYTES)

    def until(self, seen: Callable[[Screen], object], what: str, *, within_s: float) -> None:
        """Read until `seen(screen)` is true.

        Raises:
            TimeoutError: `what` was not to be seen in time; the screen is told.
        """
        end_s = time.monotonic() + within_s
        while not seen(self.screen):
            if time.monotonic() >= end_s:
                raise TimeoutError(
                    f"{what}: not within {within_s:g} s, on this screen:\n{self.screen}"
                )
            self._read(_LOOK_S)

    def _read(self, within_s: float) -> None:
        if select.select([self._ours], [], [], within_s)[0]:
            self.screen.write(self._decoder.decode(os.read(self._ours, _READ_BYTES)))


@contextmanager
def in_a_terminal(
    arguments: Sequence[str],
    env: Mapping[str, str],
    *,
    num_rows: int = 30,
    num_columns: int = 100,
) -> Iterator[Terminal]:
    """Run a program; it is killed at the end if it has not ended."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", num_rows, num_columns, 0, 0))
    own = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        arguments,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**own, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    try:
        yield Terminal(ours, Screen(num_rows, num_columns))
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
