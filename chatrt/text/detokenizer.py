"""Token ids to text, piece by piece, as they are generated.

Knows: the bytes of each token, UTF-8. Does not know: stop strings, who receives the text.
Invariant: the pieces joined are the text of all ids at once; only bytes that are the beginning of
one character are ever held back.
Cost: O(1) per token.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one answer. Special tokens contribute nothing.

    Bytes that cannot become a character turn into U+FFFD, one for each maximal part of a character,
    as in `bytes.decode(errors="replace")`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = tokenizer.drops_leading_space

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; empty while a character is incomplete."""
        token_bytes = self._tokenizer.token_bytes
        data = b"".join([token_bytes(token_id, skip_special=True) for token_id in ids])
        return self._trim(self._decoder.decode(data))

    def flush(self) -> str:
        """What an incomplete character leaves at the end: one U+FFFD, or nothing."""
        return self._trim(self._decoder.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        if not self._drop_space or not text:
            return text
        self._drop_space = False
        return text.removeprefix(" ")
