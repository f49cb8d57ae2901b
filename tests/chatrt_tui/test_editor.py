from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from chatrt.errors import InvalidValue
from chatrt_tui.editor import editor_command, write_in

if TYPE_CHECKING:
    from pathlib import Path


def editor(folder: Path, code: str) -> list[str]:
    """An editor that does `code` with the `path` of the file."""
    script = folder / "editor.py"
    script.write_text(f"import pathlib, sys\npath = pathlib.Path(sys.argv[-1])\n{code}\n")
    return [sys.executable, str(script)]


def test_visual_goes_before_editor_and_may_have_arguments() -> None:
    assert editor_command({"VISUAL": "code --wait", "EDITOR": "vi"}) == ["code", "--wait"]
    assert editor_command({"VISUAL": "", "EDITOR": "vi"}) == ["vi"]


@pytest.mark.parametrize(
    ("environ", "told"),
    [({}, "set \\$VISUAL or \\$EDITOR"), ({"EDITOR": "vi 'x"}, "No closing quotation")],
)
def test_an_editor_that_is_not_there_or_badly_written_is_told(
    environ: dict[str, str], told: str
) -> None:
    with pytest.raises(InvalidValue, match=told):
        editor_command(environ)


def test_what_the_editor_leaves_is_the_message(tmp_path: Path) -> None:
    command = editor(tmp_path, "path.write_text(path.read_text() + ' and\\nmore größe\\n\\n')")
    assert write_in(command, "half") == "half and\nmore größe"


def test_an_editor_that_fails_leaves_the_text_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="ended with status 3; the text is as it was"):
        write_in(editor(tmp_path, "sys.exit(3)"), "half")
    with pytest.raises(InvalidValue, match="no-such-editor cannot be started"):
        write_in(["no-such-editor"], "half")


def test_an_editor_that_takes_the_file_away_is_told(tmp_path: Path) -> None:
    command = editor(tmp_path, "path.unlink()")
    with pytest.raises(InvalidValue, match="left no text"):
        write_in(command, "as it was")
