"""How much work a Markdown text would be to lay out, told line by line before anything is.

Knows: what makes Markdown dear: blocks, cells of tables, marks within a paragraph.
Does not know: widgets, how it is painted.
Invariant: no answer that a person would write for others comes near the limits; one that is past
any of them can be shown as plain text at once, however it goes on.
Cost: a block is a widget of about 2 ms; a row of a table has as many cells as its head, whatever
stands in it; marks are matched with one another, each with all before it in its paragraph.
"""

from __future__ import annotations

import re

MOST_BLOCKS = 2000
MOST_CELLS = 3000
MOST_MARKS = 500
_CODE_BLOCKS = 5  # so many others take as long as one of code
_BEGINS_BLOCK = re.compile(r"\s*(?:[#>=|`~]|[-*+_](?:\s|[-*_])|\d{1,9}[.)])")
_MARKS = re.compile(r"[*_~`\[\]<]")


class Effort:
    """Takes an answer's prose as it comes."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._num_cells = 0
        self._num_marks = 0
        self._num_columns = 0  # of the widest row of the table that may stand here
        self._line = ""

    @property
    def is_too_much(self) -> bool:
        """Whether one of the limits is passed."""
        return (
            self._num_blocks > MOST_BLOCKS
            or self._num_cells + self._line.count("|") > MOST_CELLS
            or self._num_marks > MOST_MARKS
        )

    def add(self, text: str) -> None:
        """Take more of the text."""
        *whole, rest = (self._line + text).split("\n")
        self._num_marks += len(_MARKS.findall(text))
        for line in whole:
            self._end_line(line)
        self._line = rest

    def add_code(self) -> None:
        """A block of code begins."""
        self._num_blocks += _CODE_BLOCKS

    def _end_line(self, line: str) -> None:
        if not line.strip():
            self._num_columns = self._num_marks = 0
            self._num_blocks += 1
            return
        self._num_blocks += _BEGINS_BLOCK.match(line) is not None
        # A row without any bar is one of the table above it, too.
        self._num_columns = max(self._num_columns, line.count("|"))
        self._num_cells += self._num_columns
