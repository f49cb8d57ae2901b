"""How an answered turn reads once another turn follows it.

Knows: a template's two readings of an answer, the bytes that token ids spell.
Does not know: stored turns, sessions, messages.
Invariant: ids are kept up to the first difference, and from where the answer's end survives; only
the text between the two is tokenised. White space at an answer's two edges is no difference.
Cost: one small rendering and a comparison of strings, where the template leaves answers alone.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatrt.text.template import ChatTemplate
    from chatrt.text.tokenizer import Tokenizer

# Bytes that are no UTF-8 become a lone surrogate each, and come back as the same byte.
_KEEP = "surrogateescape"


@dataclass(frozen=True, slots=True)
class Settled:
    """Behind the first `start` ids of prompt and answer, the sequence reads `token_ids` instead.

    `token_ids` end where the answer ends; what closes it is not in them, except an end-of-turn id
    that the answer itself ended with.
    """

    start: int
    token_ids: tuple[int, ...]


class Settler:
    """Finds what a template changes in an answer when the next message comes.

    Args:
        tokenizer: The model's.
        encode_seam: The ids of a text behind other text; its second argument is the whole answer,
            whose spelled-out control tokens must not become real ones.
    """

    def __init__(self, tokenizer: Tokenizer, encode_seam: Callable[[str, str], list[int]]) -> None:
        self._tokenizer = tokenizer
        self._encode_seam = encode_seam
        self._template = tokenizer.template
        self._frame = _frame(self._template)

    def settle(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Settled | None:
        """What the end of `prompt_ids` and `output_ids` turns into, or None if nothing changes.

        The opening that the prompt ends with may change too. Special tokens inside the answer are
        no part of its text.
        """
        if self._frame is None:
            return None
        num_answer = _num_before_end(output_ids, self._tokenizer.special_ids)
        pieces = [
            self._tokenizer.token_bytes(token_id, skip_special=True)
            for token_id in output_ids[:num_answer]
        ]
        answer = b"".join(pieces).decode(errors=_KEEP)
        later = self._later(answer)
        if later is None or _same_but_for_edges(self._frame.opening, answer, later):
            return None
        spelled = self._spelled(prompt_ids, pieces)
        ids = [*prompt_ids, *output_ids]
        return self._rewritten(ids, len(prompt_ids) + num_answer, spelled, answer, later)

    def _later(self, answer: str) -> str | None:
        """The text from a user's message to the answer's end, when another message follows."""
        assert self._frame is not None
        shown = answer.removeprefix(" ") if self._tokenizer.drops_leading_space else answer
        try:
            text = self._template.render_answered(shown)
        except InvalidValue:
            return None
        # A closing that depends on the answer is none that a follow-up would write.
        closing = self._frame.closing
        return text[: len(text) - len(closing)] if text.endswith(closing) else None

    def _spelled(self, prompt_ids: Sequence[int], pieces: Sequence[bytes]) -> _Spelled:
        """Where each token of the opening and of the answer begins."""
        assert self._frame is not None
        opening = self._frame.opening.encode(errors=_KEEP)
        end, lengths = len(opening), [len(piece) for piece in pieces]
        first = len(prompt_ids)
        while end and first:
            token_bytes = self._tokenizer.token_bytes(prompt_ids[first - 1])
            length = _num_spelled(opening[:end], token_bytes)
            if length is None:
                break
            lengths.insert(0, length)
            first -= 1
            end -= length
        borders = list(itertools.accumulate(lengths, initial=end))
        return _Spelled(opening + b"".join(pieces), first, borders, len(opening))

    def _rewritten(
        self, ids: Sequence[int], num_ids: int, spelled: _Spelled, answer: str, later: str
    ) -> Settled | None:
        """The ids for `later`; the first `num_ids` of `ids` are prompt and answer, without end."""
        data = later.encode(errors=_KEEP)
        begin = spelled.border_before(data)
        if begin is None:
            return None
        num_blank = len(answer.encode(errors=_KEEP)) - len(answer.rstrip().encode(errors=_KEEP))
        end = len(later.rstrip().encode(errors=_KEEP))
        survivor = spelled.survivor(data[:end], begin, num_blank)
        kept = list(ids[num_ids:])
        seam = data[spelled.borders[begin] :]
        if survivor is not None:
            kept = list(ids[spelled.first + survivor :])
            num_survived = len(spelled.data) - num_blank - spelled.borders[survivor]
            seam = data[spelled.borders[begin] : end - num_survived]
        text = seam.decode(errors=_KEEP)
        renewed = (self._encode_seam(text, answer) if text else []) + kept
        start = spelled.first + begin
        num_equal = num_same(renewed, ids[start:])
        if num_equal == len(renewed) == len(ids) - start:
            return None
        return Settled(start + num_equal, tuple(renewed[num_equal:]))


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a template writes around an answer: before it when it is asked for, and behind it."""

    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class _Spelled:
    """The bytes of an opening and its answer, and where tokens begin in them.

    `borders[i]` is where token `first + i` of the sequence begins, the last one is the end. Of the
    opening, which ends at `num_opening`, the borders may reach only a part.
    """

    data: bytes
    first: int
    borders: list[int]
    num_opening: int

    def border_before(self, later: bytes) -> int | None:
        """The last border up to which `later` is the same, if any."""
        num_equal = num_same(self.data, later)
        index = bisect_right(self.borders, num_equal) - 1
        while index >= 0 and _splits_character(later, self.borders[index]):
            index -= 1
        return bisect_left(self.borders, self.borders[index]) if index >= 0 else None

    def survivor(self, later: bytes, begin: int, num_blank: int) -> int | None:
        """The border of the answer from which on it ends as `later` does, if any.

        `later` is stripped of white space at its end, of which the answer has `num_blank` bytes.
        """
        data = self.data[: len(self.data) - num_blank]
        start = self.borders[begin]
        num_equal = num_same(data[::-1], later[::-1])
        num_equal = min(num_equal, len(data) - max(start, self.num_opening), len(later) - start)
        if num_equal <= 0:
            return None
        index = bisect_left(self.borders, len(data) - num_equal)
        shift = len(later) - len(data)
        while _splits_character(later, self.borders[index] + shift):
            index += 1
        # Not the special tokens just before it, which have no text.
        index = bisect_right(self.borders, self.borders[index]) - 1
        return index if self.borders[index] < len(data) else None


def num_same(a: Sequence[int], b: Sequence[int]) -> int:
    """How many values two sequences share at their beginnings."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(a), len(b)))


def _frame(template: ChatTemplate) -> _Frame | None:
    """The frame, or None if the template refuses so simple a chat."""
    try:
        return _Frame(template.render_opening(), template.render_closing())
    except InvalidValue:
        return None


def _same_but_for_edges(opening: str, answer: str, later: str) -> bool:
    opening = opening.rstrip()
    return later.startswith(opening) and later[len(opening) :].strip() == answer.strip()


def _num_before_end(output_ids: Sequence[int], special_ids: frozenset[int]) -> int:
    """How many ids are in front of the special ones that end the answer."""
    num = len(output_ids)
    while num and output_ids[num - 1] in special_ids:
        num -= 1
    return num


def _num_spelled(text: bytes, token_bytes: bytes) -> int | None:
    """How many bytes of the end of `text` a token stands for; None if it is another token.

    A vocabulary may put a space of its own in front, and a token may swallow white space behind it.
    """
    for spelling in (token_bytes, token_bytes.removeprefix(b" ")):
        if text.endswith(spelling):
            return len(spelling)
    stripped = text.rstrip()
    if stripped.endswith(token_bytes):
        return len(text) - len(stripped) + len(token_bytes)
    return None


def _splits_character(data: bytes, position: int) -> bool:
    return position < len(data) and data[position] & 0xC0 == 0x80
