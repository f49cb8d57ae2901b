"""What the pages of a draft model's cache were computed from, page by page.

    # page i of a session   behind          token_ids
    # is right up to        the same start  the first id that differs from the session's

A draft model's pages are written when it gets around to it, and are evicted, handed out again and
copied by others. So no session is believed to own them: a note says for each page which ids its
rows were computed from, and behind which tokens.

Knows: page ids, token ids. Does not know: tensors, models, who owns a page.
Invariant: a note tells of rows only while they lie in the page as they were computed. A page whose
note changes gets a new note, so whoever looked at the old one sees it.
Cost: a session's pages are compared one by one once, then by identity: 10 µs at 8,000 tokens. All
that is in front of a page counts as its digest of 128 bits over the exact ids; two beginnings that
share one would cost accepted drafts, never change a text.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_DIGEST_BYTES = 16
# The digest of no tokens.
_START = b""


@dataclass(frozen=True, slots=True, eq=False)
class PageNote:
    """The first `len(token_ids)` rows of a page: computed from these ids behind others.

    `before` is the digest of all ids in front of the page, `through` that of these and the page's
    own once the page is full. Notes are compared by identity.
    """

    before: bytes
    token_ids: tuple[int, ...]
    through: bytes = _START


class PageNotes:
    """One note for each of `num_pages` pages, none for a page that holds nothing of use."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._notes: list[PageNote | None] = [None] * num_pages

    def num_right(
        self, page_ids: Sequence[int], token_ids: Sequence[int], seen: list[PageNote]
    ) -> int:
        """How many of a sequence's first positions have rows computed from exactly its tokens.

        `seen` are notes of its first pages, found full and right by an earlier call for the same
        tokens; it is brought up to date.
        """
        self._drop_changed(page_ids, seen)
        size = self.page_size
        before = seen[-1].through if seen else _START
        for index in range(len(seen), len(page_ids)):
            note = self._notes[page_ids[index]]
            if note is None or note.before != before:
                return index * size
            wanted = tuple(token_ids[index * size : (index + 1) * size])
            if note.token_ids != wanted or len(wanted) < size:
                return index * size + _num_equal(note.token_ids, wanted)
            seen.append(note)
            before = note.through
        return len(page_ids) * size

    def clear(self, page_ids: Sequence[int], start: int, end: int) -> None:
        """Rows at positions `[start, end)` are about to be written, those behind them in the last
        page mean nothing any more.
        """
        size = self.page_size
        for index in range(start // size, -(-end // size)):
            num_rows = max(start - index * size, 0)
            self._notes[page_ids[index]] = self._first(page_ids[index], num_rows)

    def write(self, page_ids: Sequence[int], start: int, token_ids: Sequence[int]) -> None:
        """Rows of a sequence were computed from `token_ids`, the first at position `start`.

        All rows in front of them are right, and they were cleared before.
        """
        num_done = 0
        while num_done < len(token_ids):
            index, row = divmod(start + num_done, self.page_size)
            ids = token_ids[num_done : num_done + self.page_size - row]
            self._append(page_ids, index, row, ids)
            num_done += len(ids)

    def copy(self, src: int, dst: int, num_rows: int) -> None:
        """The first `num_rows` rows of page `src` were copied onto page `dst`, whatever it held."""
        self._notes[dst] = self._first(src, num_rows)

    def forget(self, page_ids: Sequence[int]) -> None:
        """Others wrote into these pages."""
        for page_id in page_ids:
            self._notes[page_id] = None

    def _drop_changed(self, page_ids: Sequence[int], seen: list[PageNote]) -> None:
        del seen[len(page_ids) :]
        notes = [self._notes[page_id] for page_id in page_ids[: len(seen)]]
        if notes != seen:
            pairs = zip(notes, seen, strict=True)
            del seen[next(i for i, (note, old) in enumerate(pairs) if note is not old) :]

    def _first(self, page_id: int, num_rows: int) -> PageNote | None:
        """A new note of the page's first rows, as far as they are known."""
        note = self._notes[page_id]
        if note is None or not num_rows:
            return None
        through = note.through if num_rows == self.page_size else _START
        return PageNote(note.before, note.token_ids[:num_rows], through)

    def _append(
        self, page_ids: Sequence[int], index: int, row: int, token_ids: Sequence[int]
    ) -> None:
        page_id = page_ids[index]
        note = self._notes[page_id]
        if row == 0:
            front = self._notes[page_ids[index - 1]] if index else None
            before, ids = front.through if front else _START, tuple(token_ids)
        else:
            assert note is not None, f"page {page_id} has no rows in front of row {row}"
            assert len(note.token_ids) >= row, f"{len(note.token_ids)} rows, then row {row}"
            before, ids = note.before, (*note.token_ids[:row], *token_ids)
        if note is not None and note.before == before and note.token_ids[: len(ids)] == ids:
            return  # a sequence that shares the page was written just now, as far or further
        through = _digest(before, ids) if len(ids) == self.page_size else _START
        self._notes[page_id] = PageNote(before, ids, through)


def _digest(before: bytes, token_ids: Sequence[int]) -> bytes:
    ids = array("q", token_ids).tobytes()
    return blake2b(before + ids, digest_size=_DIGEST_BYTES).digest()


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """How many items two sequences begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
