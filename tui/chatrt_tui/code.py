"""A block of code that grows as plain text and is coloured when it is whole.

Knows: cutting code into chunks so that an append repaints only the last one.
Does not know: fences, transcripts.
Cost: colouring runs on a thread; a block of 750 lines would hold the painting loop for 0.2 s.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from textual.containers import VerticalScroll
from textual.content import Content
from textual.highlight import highlight
from textual.widgets import Static

if TYPE_CHECKING:
    from textual.app import ComposeResult

CHUNK_LINES = 30


class CodeBlock(VerticalScroll, can_focus=False):
    """Code in a language; `append` while it comes, `close` once."""

    DEFAULT_CSS = """
    CodeBlock {
        height: auto;
        margin: 0 2 1 2;
        padding: 1 2;
        background: $surface;
        overflow: auto hidden;
        scrollbar-size-horizontal: 1;
        & > Static { width: auto; height: auto; text-wrap: nowrap; text-overflow: fold; }
    }
    """

    def __init__(self, language: str) -> None:
        super().__init__()
        self._language = language
        self._lines = [""]  # the last one has no newline yet
        self._chunks = [Static(markup=False)]

    @property
    def code(self) -> str:
        """The code so far."""
        return "\n".join(self._lines)

    def compose(self) -> ComposeResult:
        """The first chunk; others are mounted as they begin."""
        yield self._chunks[0]

    async def append(self, text: str) -> None:
        """Add text at the end."""
        if not self.is_attached:
            return  # the screen is being taken down
        first, *others = text.expandtabs(4).split("\n")
        changed = (len(self._lines) - 1) // CHUNK_LINES
        self._lines[-1] += first
        self._lines += others
        last = (len(self._lines) - 1) // CHUNK_LINES
        if new := [Static(markup=False) for _ in range(last + 1 - len(self._chunks))]:
            self._chunks += new
            await self.mount_all(new)
        for index in range(changed, last + 1):
            lines = self._lines[index * CHUNK_LINES : (index + 1) * CHUNK_LINES]
            self._chunks[index].update(Content("\n".join(lines)))

    async def close(self) -> None:
        """The code is whole: colour it."""
        while len(self._lines) > 1 and not self._lines[-1]:
            self._lines.pop()
        self.run_worker(self._colour(), exclusive=True)

    async def _colour(self) -> None:
        coloured = await asyncio.to_thread(highlight, self.code, language=self._language or "text")
        lines = coloured.split("\n", allow_blank=True)
        for index, chunk in enumerate(self._chunks):
            part = lines[index * CHUNK_LINES : (index + 1) * CHUNK_LINES]
            chunk.update(Content("\n").join(part))
            chunk.display = bool(part)
            await asyncio.sleep(0)  # a key press may come in between
