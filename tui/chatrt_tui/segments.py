"""Cuts a growing Markdown text into prose and code, so that each part can be painted cheaply.

Knows: fenced code blocks, and where long prose may be cut without changing how it reads.
Does not know: widgets, the rest of Markdown.
Invariant: how the text was cut into pieces does not change the parts; text in the same part is
handed out as soon as its line can no longer be a fence. What would be too much work as Markdown
goes on as the text of a block of code that nothing closes, from the piece on that is too much.
Source: CommonMark 0.31, section 4.5 (an indented fence, as in a list, is taken as a fence too).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from chatrt_tui.effort import Effort

# Appending costs in proportion to a widget's text: past this length, prose goes on in a new one.
PROSE_CHARS = 1500
# A list is one block however long it is, and every append lays all of its items out again.
LIST_CHARS = 250
_LONGEST_FENCE_LINE = 200
_LONGEST_ITEM_START = 32  # the marker of a list's item, the spaces behind it, and a character
_OPENING = re.compile(r"( *)(`{3,}|~{3,})([^`\n]*)\Z")
_ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)]) +\S")
_MAYBE_ITEM = re.compile(r"(?:[-*+]|\d{1,9}[.)]?) *\Z")
_CONTINUES_BLOCK = re.compile(r"\s|[-*+>|]|\d+[.)]")


@dataclass(frozen=True, slots=True)
class Prose:
    """Markdown text; `starts_new` when it begins a new part.

    `continues_list`: the part before ended inside a list, which goes on here.
    """

    text: str
    starts_new: bool
    continues_list: bool = False


@dataclass(frozen=True, slots=True)
class CodeOpened:
    """A fence opened; `language` is the first word of its info string, or empty."""

    language: str


@dataclass(frozen=True, slots=True)
class CodeText:
    """Text inside the open fence."""

    text: str


@dataclass(frozen=True, slots=True)
class CodeClosed:
    """The fence closed, or the text ended inside it."""


Part: TypeAlias = Prose | CodeOpened | CodeText | CodeClosed


@dataclass(frozen=True, slots=True)
class _Fence:
    mark: str
    indent: int

    def closed_by(self, line: str) -> bool:
        """Whether `line`, without its newline, closes this fence."""
        bare = line.strip()
        return len(bare) >= len(self.mark) and set(bare) == {self.mark[0]}

    def may_be_closed_by(self, start: str) -> bool:
        """Whether a line that starts so may turn out to close this fence."""
        return set(start.strip()) <= {self.mark[0]}


class SegmentSplitter:
    """Takes a text in pieces and says what each adds."""

    def __init__(self) -> None:
        self._held = ""  # the start of a line of which it is not yet known what it is
        self._mid_line = False
        self._line_start = ""  # of the line of prose that is being handed out
        self._fence: _Fence | None = None
        self._prose_chars = 0
        self._in_prose = False
        self._after_blank = False
        self._in_list = False
        self._effort = Effort()
        self._is_plain = False

    def feed(self, piece: str) -> list[Part]:
        """The parts that `piece` adds or completes."""
        if self._is_plain:
            return [CodeText(piece)]
        parts: list[Part] = []
        text = self._held + piece
        self._held = ""
        while text:
            line, newline, rest = text.partition("\n")
            if not newline and not self._mid_line and self._undecided(line):
                self._held = line
                break
            self._take(line, newline, parts)
            text = rest
            if self._effort.is_too_much and self._fence is None:
                self._is_plain = True
                return [*parts, CodeOpened(""), CodeText(text)]
        return parts

    def finish(self) -> list[Part]:
        """The parts that the end of the text completes."""
        if self._is_plain:
            return [CodeClosed()]
        parts: list[Part] = []
        if self._held:
            line, self._held = self._held, ""
            if self._fence is not None and self._fence.closed_by(line):
                self._close(parts)
            else:
                self._emit(line, parts)
        if self._fence is not None:
            self._close(parts)
        return parts

    def _undecided(self, line: str) -> bool:
        if self._fence is not None:
            return self._fence.may_be_closed_by(line)
        if self._may_cut_list() and _MAYBE_ITEM.match(line) is not None:
            return True
        bare = line.lstrip(" ")
        return bare in ("", "`", "``", "~", "~~") or (
            len(line) <= _LONGEST_FENCE_LINE and _OPENING.match(line) is not None
        )

    def _take(self, line: str, newline: str, parts: list[Part]) -> None:
        if not self._mid_line and newline:
            opening = _OPENING.match(line)
            if self._fence is not None and self._fence.closed_by(line):
                self._close(parts)
                return
            if self._fence is None and opening is not None:
                indent, mark, info = opening.groups()
                self._fence = _Fence(mark, len(indent))
                self._in_prose = False
                self._effort.add_code()
                parts.append(CodeOpened((info.split() or [""])[0]))
                return
        self._emit(line + newline, parts)
        self._mid_line = not newline

    def _emit(self, text: str, parts: list[Part]) -> None:
        if self._fence is not None:
            if not self._mid_line:
                indent = len(text) - len(text.lstrip(" "))
                text = text[min(indent, self._fence.indent) :]
            parts.append(CodeText(text))
            return
        line = (self._line_start if self._mid_line else "") + text
        self._line_start = line[:_LONGEST_ITEM_START]
        item = _ITEM.match(self._line_start) is not None
        cuts_list = item and not self._mid_line and self._may_cut_list()
        starts_new = not self._in_prose or cuts_list or self._cuts_prose(text)
        if line.strip() and not line.startswith(" "):
            self._in_list = item
        self._in_prose = True
        self._prose_chars = len(text) + (0 if starts_new else self._prose_chars)
        self._after_blank = not self._mid_line and not text.strip()
        self._effort.add(text)
        parts.append(Prose(text, starts_new, cuts_list))

    def _may_cut_list(self) -> bool:
        return self._in_prose and self._in_list and self._prose_chars > LIST_CHARS

    def _cuts_prose(self, text: str) -> bool:
        return (
            not self._mid_line
            and self._after_blank
            and self._prose_chars > PROSE_CHARS
            and _CONTINUES_BLOCK.match(text) is None
        )

    def _close(self, parts: list[Part]) -> None:
        self._fence = None
        self._mid_line = False
        parts.append(CodeClosed())
