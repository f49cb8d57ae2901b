from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatrt_tui.reasoning import Said, ThoughtSplitter, split_thought


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Paris.", Said("", "Paris.")),
        ("<think>\nHm, France.\n</think>\n\nParis.", Said("Hm, France.", "Paris.")),
        ("\n<think>a</think>b", Said("a", "b")),
        ("<think>\n\n</think>\n\nParis.", Said("", "Paris.")),
        ("<think>never ended", Said("never ended", "")),
        ("<think>a <b> </thin", Said("a <b> </thin", "")),
        ("<thin", Said("", "<thin")),
        ("I <think> not</think>", Said("", "I <think> not</think>")),
        ("<think>a</think>b <think>c</think>", Said("a", "b <think>c</think>")),
        ("", Said("", "")),
    ],
)
def test_a_thought_is_told_from_the_answer(text: str, said: Said) -> None:
    assert split_thought(text) == said


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "a", "\n", " b ", "/", "</thi"])),
    st.data(),
)
def test_how_the_text_was_cut_changes_nothing(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    splitter = ThoughtSplitter()
    thought = answer = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        said = splitter.feed(text[start:end])
        assert not (said.thought and answer), "a thought comes before the answer"
        thought, answer = thought + said.thought, answer + said.answer
    rest = splitter.finish()
    assert Said(thought + rest.thought, answer + rest.answer) == split_thought(text)


def test_a_line_break_that_comes_by_itself_behind_the_mark_is_no_part_of_the_thought() -> None:
    splitter = ThoughtSplitter()
    said = [splitter.feed(piece) for piece in ("<think>", "\n", "Hm,", "\n", "yes")]
    assert "".join(one.thought for one in said) == "Hm,\nyes"


def test_a_plain_answer_is_handed_on_at_once() -> None:
    splitter = ThoughtSplitter()
    assert splitter.feed("He") == Said("", "He")
    assert splitter.feed("llo <think>") == Said("", "llo <think>")
    assert not splitter.is_thinking
