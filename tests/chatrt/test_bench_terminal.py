"""`bench terminal`: where an answer begins on a screen, figures, programs in a terminal."""

from __future__ import annotations

import sys

import pytest

from chatrt.bench.pseudo_terminal import Screen, in_a_terminal
from chatrt.bench.terminal import (
    PaintSample,
    StartSample,
    _answer_has_begun,
    _shown_ttft,
)
from chatrt.bench.terminal_report import terminal_figures

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs pseudo-terminals")

QUESTION = "7: what is it?"


def screen(*lines: str) -> Screen:
    shown = Screen(num_rows=12, num_columns=60)
    for row, line in enumerate(lines):
        shown.write(f"\x1b[{row + 1};1H{line}")
    return shown


def test_a_painting_reads_the_same_wherever_its_reads_are_cut() -> None:
    painting = (
        "\x1b[?1049h\x1b]0;title\x07\x1bP+q\x1b\\\x1b[1;3H\x1b[1;38;5;4mone\x1b[0m\r\n"
        "two\x1b[3;1H\x1b[48;2;1;2;3m ▌ three \x1b[m\x1b7"
    )
    whole = screen(painting)
    assert "three" in str(whole)
    for cut in range(len(painting)):
        halves = screen()
        halves.write("\x1b[1;1H" + painting[:cut])
        halves.write(painting[cut:])
        assert halves.lines() == whole.lines(), cut


@pytest.mark.parametrize(
    ("lines", "begun"),
    [
        ((f" ▌ {QUESTION}", "", "  It is blue."), True),
        ((f" ▌ {QUESTION}", "", "  …", "", "  answering · Esc stops"), False),
        ((f" │ {QUESTION} │", " ╰──╯", " ^n New chat"), False),
        (("  It is blue.", "", f" ▌ {QUESTION}", "", "  …"), False),
        (("  no question", "", "  but text"), False),
    ],
    ids=["answered", "waiting", "in the prompt", "an answer above", "elsewhere"],
)
def test_an_answer_begins_with_a_letter_below_its_question(
    lines: tuple[str, ...], begun: bool
) -> None:
    assert _answer_has_begun(screen(*lines), QUESTION) is begun


def test_the_ttft_of_the_last_turn_is_read_once_it_has_ended() -> None:
    earlier, last = "  TTFT 53 ms · 288 tok/s", "  TTFT 1,204 ms · 200 tok/s"
    assert _shown_ttft(screen(earlier, "", last)) == 1204
    assert _shown_ttft(screen(earlier, "", "  answering · Esc stops")) is None
    assert _shown_ttft(screen("  nothing yet")) is None


def test_painting_is_what_a_turn_takes_beyond_its_own_figure() -> None:
    paints = [
        PaintSample("cold", 0, 60.0, 40.0),
        PaintSample("cold", 1, 70.0, 40.0),
        PaintSample("cold", 2, 80.0, None),
        PaintSample("typed_ahead", 0, 30.0, 12.0),
    ]
    figures = terminal_figures([StartSample(500.0)], paints)
    assert figures.prompt_ms.p50 == 500.0
    assert (figures.painted_ttft_ms["cold"].n, figures.painted_ttft_ms["cold"].p50) == (3, 70.0)
    assert (figures.painting_ms["cold"].n, figures.painting_ms["cold"].max) == (2, 30.0)
    assert figures.painting_ms["typed_ahead"].p50 == 18.0
    assert figures.painted_ttft_ms["follow_up"].n == 0


def test_a_program_that_paints_nothing_is_told_with_its_screen() -> None:
    program = [sys.executable, "-c", "print('hello', flush=True); import time; time.sleep(60)"]
    with in_a_terminal(program, {}) as terminal:
        terminal.until(lambda shown: "hello" in str(shown), "a greeting", within_s=30)
        with pytest.raises(TimeoutError, match=r"a farewell: not within 0\.1 s"):
            terminal.until(lambda shown: "goodbye" in str(shown), "a farewell", within_s=0.1)
