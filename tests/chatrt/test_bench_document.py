from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import chatrt
from chatrt.bench.document import Device, encode_line, git_revision, new_document

if TYPE_CHECKING:
    from pathlib import Path


def test_a_document_says_what_ran_where() -> None:
    document = new_document("sessions", seed=3, device=Device("cpu", "float32", 2))
    assert document["benchmark"] == "sessions"
    assert document["seed"] == 3
    assert (document["device"], document["dtype"], document["num_threads"]) == ("cpu", "float32", 2)
    assert document["versions"]["chatrt"] == chatrt.__version__
    assert document["versions"]["websockets"]


def test_what_is_not_known_is_null() -> None:
    document = json.loads(encode_line(new_document("sessions", seed=0, device=None)))
    assert (document["device"], document["dtype"], document["num_threads"]) == (None, None, None)


def test_a_line_is_one_line_with_short_numbers() -> None:
    line = encode_line({"text": "a\nb", "values": [1.23456789, (2.00004,)], "path": None})
    assert "\n" not in line
    assert json.loads(line) == {"text": "a\nb", "values": [1.2346, [2.0]], "path": None}


def test_the_revision_is_that_of_the_checkout_with_a_word_on_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet")
    tracked = tmp_path / "tracked"
    tracked.write_text("one", encoding="utf-8")
    git("add", "tracked")
    git("commit", "--quiet", "-m", "one")
    revision = git("rev-parse", "HEAD")
    untracked = tmp_path / "untracked"
    untracked.touch()
    assert git_revision(untracked) is None
    assert git_revision(tracked) == {"revision": revision, "changed": False}
    tracked.write_text("two", encoding="utf-8")
    assert git_revision(tracked) == {"revision": revision, "changed": True}


def test_a_folder_outside_of_a_checkout_has_no_revision(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert git_revision(file) is None
