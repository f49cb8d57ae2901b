from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chatrt_tui.clean import TextCleaner, clean_line, clean_text

hostile = st.text(
    st.sampled_from("\x1b\x9b\x9d\x90\x9c[]();?0159mHJPX^_\\\x07\x00\r\n\t\u202e ab"), max_size=60
)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("plain\n\ttext é 漢 👩‍🚀", "plain\n\ttext é 漢 👩‍🚀"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[1;1Hgone", "gone"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]52;c;c2VjcmV0\x1b\\b", "ab"),
        ("a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\b", "alinkb"),
        ("a\x1bPq#0;1\x1b\\b", "ab"),
        ("\x9b31mred\x9d0;t\x9cx", "redx"),
        ("a\x1bcb", "ab"),
        ("one\r\ntwo\x08\x7f\x00", "one\ntwo"),
        ("abc\u202edef\u2066", "abcdef"),
        ("\x1b]0;never ended", "]0;never ended"),
    ],
)
def test_sequences_and_controls_are_taken_out(text: str, clean: str) -> None:
    assert clean_text(text) == clean


@given(st.lists(hostile, max_size=8))
def test_no_control_character_is_ever_left(pieces: list[str]) -> None:
    cleaner = TextCleaner()
    out = "".join(cleaner.feed(piece) for piece in pieces) + cleaner.finish()
    assert all(c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") for c in out)
    assert "\u202e" not in out


@example("\x1b\x1b[m[m", 4)
@example("a\x1bPq#0\x1b\\b", 6)
@given(hostile, st.integers(0, 60))
def test_where_a_text_is_cut_makes_no_difference(text: str, at: int) -> None:
    cleaner = TextCleaner()
    cut = cleaner.feed(text[:at]) + cleaner.feed(text[at:]) + cleaner.finish()
    assert cut == clean_text(text)


def test_text_without_escapes_is_never_held_back() -> None:
    assert TextCleaner().feed("word") == "word"


def test_a_sequence_without_end_does_not_swallow_the_answer() -> None:
    cleaner = TextCleaner()
    out = "".join(cleaner.feed("x" * 100) for _ in range(3)) + cleaner.feed("\x1b]0;")
    out += "".join(cleaner.feed("y" * 100) for _ in range(30))
    assert out.count("y") > 1000


def test_a_title_is_put_on_one_line() -> None:
    assert clean_line("  two\n lines\x1b[1m ") == "two lines"
