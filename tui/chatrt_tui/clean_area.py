"""A text area that never paints what a terminal would obey.

Knows: that a text may be anybody's: an old question, another client's, a system prompt.
Does not know: keys, which bring no control characters; what is pasted is cleaned by the app.
"""

from __future__ import annotations

from textual.widgets import TextArea

from chatrt_tui.clean import clean_text


class CleanTextArea(TextArea):
    """Takes every text that a program gives it through `clean_text`."""

    def load_text(self, text: str) -> None:
        """Replace the text, and forget the edits of before."""
        super().load_text(clean_text(text))
