from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chatrt_tui.segments import (
    PROSE_CHARS,
    CodeClosed,
    CodeOpened,
    CodeText,
    Part,
    Prose,
    SegmentSplitter,
)

markdown = st.text(st.sampled_from("`~ \npa-1."), max_size=80)


def split(*pieces: str) -> list[Part]:
    splitter = SegmentSplitter()
    parts = [part for piece in pieces for part in splitter.feed(piece)]
    return parts + splitter.finish()


def merged(parts: list[Part]) -> list[Part]:
    """Adjacent texts of one part as one, as a widget shows them."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, CodeText) and isinstance(last, CodeText):
            out[-1] = CodeText(last.text + part.text)
        elif isinstance(part, Prose) and isinstance(last, Prose) and not part.starts_new:
            out[-1] = replace(last, text=last.text + part.text)
        else:
            out.append(part)
    return out


def test_prose_and_code_are_told_apart() -> None:
    parts = merged(split("Look:\n```python x\nprint(1)\n```\nDone."))
    assert parts == [
        Prose("Look:\n", True),
        CodeOpened("python"),
        CodeText("print(1)\n"),
        CodeClosed(),
        Prose("Done.", True),
    ]


def test_ordinary_text_is_handed_out_at_once() -> None:
    assert SegmentSplitter().feed("Hel") == [Prose("Hel", True)]


def test_a_start_that_may_be_a_fence_waits_for_its_line() -> None:
    splitter = SegmentSplitter()
    assert splitter.feed("``") == []
    assert splitter.feed("`py") == []
    assert splitter.feed("\n") == [CodeOpened("py")]


def test_inline_code_at_the_start_of_a_line_is_prose() -> None:
    assert merged(split("`x` is", " code\n")) == [Prose("`x` is code\n", True)]
    assert merged(split("```x``` is code\n")) == [Prose("```x``` is code\n", True)]


def test_a_fence_closes_only_with_its_own_mark_and_length() -> None:
    parts = merged(split("````\n```\n~~~~\n````\n"))
    assert parts == [CodeOpened(""), CodeText("```\n~~~~\n"), CodeClosed()]


def test_a_fence_in_a_list_loses_its_indent() -> None:
    parts = merged(split("1. a\n   ```sh\n   ls\n     -l\n   ```\n2. b\n"))
    assert CodeText("ls\n  -l\n") in parts
    assert CodeOpened("sh") in parts


@pytest.mark.parametrize(
    ("hostile", "piece"),
    [
        ("a|" * 700 + "\n" + "-|" * 700 + "\n" + "|\n" * 700, 7),
        ("---\n" * 5000, 1),
        ("# a\n" * 5000, 500),
        ("```\n```\n" * 2500, 3),
        ("*a_ " * 5000, 4),
        ("[" * 20000, 20000),
    ],
)
def test_what_would_be_too_much_to_lay_out_goes_on_as_plain_text(hostile: str, piece: int) -> None:
    parts = merged(split(*(hostile[at : at + piece] for at in range(0, len(hostile), piece))))
    assert parts[-1] == CodeClosed()
    assert len(parts) < 2100
    shown = "".join(part.text for part in parts if isinstance(part, Prose | CodeText))
    assert shown == (hostile if "```" not in hostile else shown)
    assert isinstance(parts[-2], CodeText)
    assert shown.endswith(hostile[-3:])


def test_a_long_answer_of_a_person_s_kind_stays_markdown() -> None:
    section = "## Part\n\nSome **bold** `code` words.\n\n- one\n- two\n\n| a | b |\n|---|---|\n"
    answer = (section + "| 1 | 2 |\n" * 5 + "\n```py\nx = 1\n```\n\n") * 60
    parts = merged(split(answer))
    assert sum(isinstance(part, CodeOpened) for part in parts) == 60
    assert all(part == CodeOpened("py") for part in parts if isinstance(part, CodeOpened))


def test_an_unclosed_fence_is_closed_by_the_end() -> None:
    assert merged(split("```\nx")) == [CodeOpened(""), CodeText("x"), CodeClosed()]
    assert merged(split("```\nx\n```")) == [CodeOpened(""), CodeText("x\n"), CodeClosed()]


def test_long_prose_goes_on_in_a_new_part_at_a_paragraph() -> None:
    paragraph = "word " * 100 + "\n\n"
    parts = merged(split(*(paragraph for _ in range(12))))
    assert len(parts) > 2
    assert all(isinstance(part, Prose) and len(part.text) < 2 * PROSE_CHARS for part in parts)
    assert "".join(part.text for part in parts if isinstance(part, Prose)) == paragraph * 12


def test_a_long_list_is_cut_only_before_an_item() -> None:
    items = "".join(f"{i}. item " + "x" * 80 + "\n\n   more\n   - sub\n\n" for i in range(40))
    parts = merged(split(items))
    assert len(parts) > 5
    for part in parts[1:]:
        assert isinstance(part, Prose)
        assert part.continues_list
        assert part.text[0].isdigit()


def test_a_number_in_running_text_starts_no_list() -> None:
    text = ("word " * 20 + "\n") * 10 + "2023. was\n"
    assert len(merged(split(text))) == 1


@given(markdown, st.lists(st.integers(0, 80), max_size=5))
def test_where_a_text_is_cut_makes_no_difference(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert merged(split(*pieces)) == merged(split(text))


@given(markdown)
def test_every_opened_fence_is_closed_once(text: str) -> None:
    depth = 0
    for part in split(text):
        depth += isinstance(part, CodeOpened) - isinstance(part, CodeClosed)
        assert depth in (0, 1)
        assert isinstance(part, CodeText) <= (depth == 1)
    assert depth == 0


@example(5, [209])  # inside the marker of an item, before the list is long enough to be cut
@given(st.integers(1, 30), st.lists(st.integers(0, 3000), max_size=6))
def test_where_a_long_list_arrives_in_pieces_makes_no_difference(
    num_items: int, cuts: list[int]
) -> None:
    text = "".join(f"- item {i} with some words after it\n  - and one below\n" for i in range(30))
    text = text[: num_items * 60]
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert merged(split(*pieces)) == merged(split(text))
