from __future__ import annotations

import dataclasses
import os
import stat
from typing import TYPE_CHECKING

import pytest

from chatrt.paths import Paths, ensure_folder

if TYPE_CHECKING:
    from pathlib import Path


def test_chatrt_home_puts_all_four_folders_under_one(tmp_path: Path) -> None:
    paths = Paths.find({"CHATRT_HOME": str(tmp_path)})
    assert paths == Paths(
        tmp_path / "cache", tmp_path / "data", tmp_path / "state", tmp_path / "config"
    )


def test_without_chatrt_home_every_folder_carries_the_name_of_the_app() -> None:
    paths = Paths.find({})
    for field in dataclasses.fields(paths):
        assert "chatrt" in getattr(paths, field.name).parts


def test_a_relative_home_does_not_move_with_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = Paths.find({"CHATRT_HOME": "here"})
    monkeypatch.chdir("/")
    assert paths.database == tmp_path / "here" / "data" / "conversations.sqlite3"


def test_finding_the_folders_creates_nothing(tmp_path: Path) -> None:
    Paths.find({"CHATRT_HOME": str(tmp_path / "home")})
    assert not (tmp_path / "home").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_each_created_folder_is_for_its_user_only(tmp_path: Path) -> None:
    paths = Paths.find({"CHATRT_HOME": str(tmp_path / "home")})
    assert ensure_folder(paths.logs) == paths.logs
    ensure_folder(paths.logs)
    for folder in (paths.logs, paths.state, tmp_path / "home"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("", encoding="utf-8")
    with pytest.raises(OSError, match="home"):
        ensure_folder(tmp_path / "home" / "state")
