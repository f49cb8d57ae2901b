"""Notes of pages: what a draft model's rows were computed from, whoever holds the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt_drafts.page_notes import PageNotes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt_drafts.page_notes import PageNote

SIZE = 4


def noted(page_ids: Sequence[int], token_ids: Sequence[int]) -> PageNotes:
    """Notes of eight pages, some of which hold a sequence from its start."""
    notes = PageNotes(8, SIZE)
    fill(notes, page_ids, 0, token_ids)
    return notes


def fill(notes: PageNotes, page_ids: Sequence[int], start: int, ids: Sequence[int]) -> None:
    notes.clear(page_ids, start, start + len(ids))
    notes.write(page_ids, start, ids)


def num_right(notes: PageNotes, page_ids: Sequence[int], token_ids: Sequence[int]) -> int:
    return notes.num_right(page_ids, token_ids, [])


def test_rows_are_right_up_to_the_first_other_token() -> None:
    notes = noted([5, 3, 1], range(10))
    assert num_right(notes, [5, 3, 1], range(10)) == 10
    assert num_right(notes, [5, 3, 1], [*range(9), 77, 10]) == 9
    assert num_right(notes, [5, 3, 1], [0, 1, 2, 3, 4, 77, 6, 7, 8]) == 5
    assert num_right(notes, [5, 3, 1], [77, *range(1, 10)]) == 0
    assert num_right(notes, [5, 3, 1], range(7)) == 7
    assert num_right(notes, [5, 3], range(10)) == 8


def test_equal_tokens_behind_another_beginning_are_not_right() -> None:
    notes = noted([0, 1], range(8))
    fill(notes, [2], 0, [9, 9, 9, 9])
    assert num_right(notes, [2, 1], [9, 9, 9, 9, 4, 5, 6, 7]) == 4
    assert num_right(notes, [1, 0], [4, 5, 6, 7, 0, 1, 2, 3]) == 0


def test_equal_beginnings_in_different_pages_are_equal() -> None:
    notes = noted([0, 1], range(8))
    fill(notes, [2], 0, range(4))
    assert num_right(notes, [2, 1], range(8)) == 8


def test_rows_that_are_written_in_pieces_are_those_written_at_once() -> None:
    notes = noted([], [])
    for start, end in ((0, 3), (3, 4), (4, 9), (9, 10)):
        fill(notes, [0, 1, 2], start, range(start, end))
    fill(notes, [4, 5, 6], 0, range(10))
    assert num_right(notes, [0, 5, 2], range(10)) == 10
    assert num_right(notes, [4, 1, 6], range(10)) == 10


def test_rows_behind_a_rewritten_one_mean_nothing() -> None:
    notes = noted([0, 1, 2], range(10))
    fill(notes, [0, 1, 2], 5, [5])
    assert num_right(notes, [0, 1, 2], range(10)) == 6
    fill(notes, [0, 1, 2], 6, [6, 7])
    assert num_right(notes, [0, 1, 2], range(10)) == 10


def test_rows_about_to_be_written_are_not_right_until_they_are() -> None:
    notes = noted([0, 1, 2], range(10))
    notes.clear([0, 1, 2], 3, 9)
    assert num_right(notes, [0, 1, 2], range(10)) == 3


def test_a_look_notices_pages_that_others_have_written_since_the_last() -> None:
    notes = noted([0, 1, 2], range(12))
    seen: list[PageNote] = []
    assert notes.num_right([0, 1, 2], range(12), seen) == 12
    assert len(seen) == 3
    fill(notes, [1], 0, [9] * 4)
    assert notes.num_right([0, 1, 2], range(12), seen) == 4
    fill(notes, [0, 1], 4, range(4, 8))
    assert notes.num_right([0, 1, 2], range(12), seen) == 12
    assert notes.num_right([0, 3, 2], range(12), seen) == 4
    assert notes.num_right([0], range(12), seen) == 4
    assert len(seen) == 1


def test_a_copied_page_is_known_as_far_as_it_was_copied() -> None:
    notes = noted([0, 1], range(7))
    fill(notes, [0, 4], 4, [4, 5, 8, 9])
    notes.copy(1, 4, 3)
    assert num_right(notes, [0, 4], range(7)) == 7
    notes.copy(1, 4, 2)
    assert num_right(notes, [0, 4], range(7)) == 6
    notes.copy(0, 2, SIZE)
    assert num_right(notes, [2, 1], range(7)) == 7
    notes.copy(6, 2, SIZE)
    assert num_right(notes, [2, 1], range(7)) == 0


def test_what_others_wrote_into_is_forgotten() -> None:
    notes = noted([0, 1], range(8))
    notes.forget([1])
    assert num_right(notes, [0, 1], range(8)) == 4
