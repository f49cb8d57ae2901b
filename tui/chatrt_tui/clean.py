"""Takes out of a model's text what a terminal would obey or hide.

Knows: control characters, escape sequences (7 and 8 bit forms), bidirectional overrides.
Does not know: Markdown, widgets.
Invariant: what comes out holds no character of C0 but newline and tab, none of C1, no DEL and no
bidirectional control, however the text was cut into pieces; pieces give the same as the whole.
Source: ECMA-48 for the shape of the sequences.
"""

from __future__ import annotations

import re

# A control string (OSC, DCS, SOS, PM, APC) ends at ST or BEL; a CSI ends at its final byte.
# `unfinished` matches at the end of a text only, and is tried in the same pass: what is left of the
# text behind a sequence that was taken out never joins what stood before it.
_SEQUENCE = re.compile(
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]+[0-~]|\x1b[0-OQ-WYZ\\`-~]"
    r"|(?P<unfinished>(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*\x1b?\Z"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*\Z"
    r"|\x1b[ -/]*\Z)"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# A sequence longer than this is none: its text is shown, without the control characters.
_LONGEST_SEQUENCE = 1024


class TextCleaner:
    """Cleans a text that arrives in pieces; a sequence cut in two waits until it is whole."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """The clean part of the text so far that was not returned before."""
        text, self._held = self._held + piece, ""
        return _CONTROL.sub("", _SEQUENCE.sub(self._take_out, text))

    def _take_out(self, found: re.Match[str]) -> str:
        unfinished = found["unfinished"]
        if unfinished is not None and len(unfinished) > _LONGEST_SEQUENCE:
            return unfinished
        self._held = unfinished or ""
        return ""

    def finish(self) -> str:
        """What was still held back, at the end of the text."""
        held, self._held = self._held, ""
        return _CONTROL.sub("", held)


def clean_text(text: str) -> str:
    """The whole of a text, cleaned."""
    cleaner = TextCleaner()
    return cleaner.feed(text) + cleaner.finish()


def clean_line(text: str) -> str:
    """A text cleaned and put on one line, for titles and messages."""
    return " ".join(clean_text(text).split())
