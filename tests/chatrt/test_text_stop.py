"""Stop strings: what is released, what is held, and where the stream ends."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from chatrt.text.stop import StopScanner

_TEXT = st.text(alphabet="ab\n", max_size=30)
_STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)
_CUTS = st.lists(st.integers(0, 30), max_size=6)


def _pieces(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


def _search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The whole-text answer: the earliest end wins, then the longest stop."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def _longest_held(text: str, stops: list[str]) -> int:
    lengths = range(len(text), 0, -1)
    held = (n for n in lengths for s in stops if len(s) > n and s.startswith(text[-n:]))
    return next(held, 0)


@given(text=_TEXT, stops=_STOPS, cuts=_CUTS)
def test_any_split_of_the_text_gives_what_a_search_of_the_whole_gives(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    scanner = StopScanner(stops)
    results = [scanner.push(piece) for piece in _pieces(text, cuts)]
    shown = "".join(result.text for result in results) + scanner.flush()
    assert (shown, results[-1].stop) == _search(text, stops)


@given(text=_TEXT, stops=_STOPS, cuts=_CUTS)
def test_what_is_held_is_exactly_the_longest_proper_prefix_of_a_stop(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    scanner = StopScanner(stops)
    seen = released = ""
    for piece in _pieces(text, cuts):
        result = scanner.push(piece)
        if result.stop is not None:
            assert scanner.num_held == 0
            return
        seen += piece
        released += result.text
        assert scanner.num_held == _longest_held(seen, stops)
        assert len(released) + scanner.num_held == len(seen)


def test_without_stops_nothing_is_held() -> None:
    scanner = StopScanner([])
    assert scanner.push("any text").text == "any text"
    assert scanner.num_held == 0


def test_a_false_start_is_released_with_the_character_that_ends_it() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("the EN").text == "the "
    assert scanner.num_held == 2
    assert scanner.push("Z").text == "ENZ"


def test_held_text_is_released_at_the_end() -> None:
    scanner = StopScanner(["END"])
    scanner.push("the EN")
    assert scanner.flush() == "EN"
    assert scanner.num_held == 0


def test_nothing_comes_after_a_stop() -> None:
    scanner = StopScanner(["\n\n"])
    assert scanner.push("one\n").text == "one"
    result = scanner.push("\ntwo")
    assert (result.text, result.stop) == ("", "\n\n")
    assert scanner.push("three").text == ""
    assert scanner.flush() == ""


def test_the_longest_of_two_stops_that_end_together_wins() -> None:
    result = StopScanner(["b", "ab"]).push("xab")
    assert (result.text, result.stop) == ("x", "ab")
