from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from chatrt.errors import InvalidValue
from chatrt_tui.branches import Tree
from chatrt_tui.export import as_json, as_markdown, file_name, target_of, write_new
from tests.chatrt_tui.test_branches import FORKED, body, tree_of


def test_the_branch_shown_is_written_as_markdown() -> None:
    tree = tree_of(*FORKED)
    turn = tree.find("e")
    assert turn is not None
    turn.answer, turn.status = "<think>hm\nhm</think>stopped here", "cancelled"
    path = tree.path_to(turn)
    path[0].system = "be brief"
    assert as_markdown("A tree", path) == (
        "# A tree\n\n*System:* be brief\n\n"
        "## You\n\nask a\n\n## Answer\n\nanswer a\n\n"
        "## You\n\nask d\n\n## Answer\n\nanswer d\n\n"
        "## You\n\nask e\n\n> *Thought:* hm\n> hm\n\n## Answer\n\nstopped here\n\n*(stopped)*\n"
    )


def test_a_document_has_nothing_that_a_terminal_would_obey() -> None:
    tree = tree_of(body("a"))
    tree.newest.answer = "safe \x1b[2J\x1b]0;title\x07text"
    assert "safe text" in as_markdown("\x1b[31mred", tree.path_to(tree.newest))
    assert "\x1b" not in as_markdown("\x1b[31mred", tree.path_to(tree.newest))


def test_all_branches_are_written_as_json_that_can_be_read_again() -> None:
    text = as_json("conv_1", "A tree", FORKED)
    read = msgspec.json.decode(text)
    assert (read["id"], read["title"]) == ("conv_1", "A tree")
    tree = Tree()
    tree.merge(read["turns"])
    assert len(tree) == 6
    assert "\n" in text.strip()


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("What is the capital of France?", "what-is-the-capital-of-france"),
        ("../../etc/passwd", "etc-passwd"),
        ("???", "conversation"),
        ("", "conversation"),
        ("Größe & Maß", "größe-maß"),
        ("word " * 40, "word-word-word-word-word-word-word-word"),
    ],
)
def test_a_file_is_called_after_the_title(title: str, name: str) -> None:
    assert file_name(title) == name


def test_nothing_is_ever_written_over(tmp_path: Path) -> None:
    path = tmp_path / "chat.md"
    written = [write_new(path, text) for text in ("one", "two", "three")]
    assert [one.name for one in written] == ["chat.md", "chat-2.md", "chat-3.md"]
    assert [one.read_text() for one in written] == ["one", "two", "three"]


def test_a_file_that_cannot_be_written_is_told_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"missing/chat\.md cannot be written: No such file"):
        write_new(tmp_path / "missing" / "chat.md", "x")


def test_a_person_names_the_form_or_the_file(tmp_path: Path) -> None:
    assert target_of("", "A tree", tmp_path) == tmp_path / "a-tree.md"
    assert target_of("json", "A tree", tmp_path) == tmp_path / "a-tree.json"
    assert target_of("notes/x.md", "A tree", tmp_path) == tmp_path / "notes" / "x.md"
    assert target_of("/a/b.json", "A tree", tmp_path) == Path("/a/b.json")
    with pytest.raises(InvalidValue, match=r"x\.txt should end in \.md or \.json"):
        target_of("x.txt", "A tree", tmp_path)


def test_a_turn_of_one_word_is_a_document_too() -> None:
    tree = tree_of(body("a"))
    assert as_markdown("", tree.path_to(tree.newest)).startswith("# Conversation\n\n## You")


def test_the_home_of_nobody_is_told_instead_of_ending_the_program(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"a\.md names the home folder of nobody"):
        target_of("~nobody-here/a.md", "title", tmp_path)


def test_a_name_with_a_zero_byte_is_told_instead_of_ending_the_program(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="cannot be written"):
        write_new(tmp_path / "a\0b.md", "text")
