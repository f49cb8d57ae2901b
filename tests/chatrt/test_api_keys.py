from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from chatrt.api_keys import ensure_api_keys, read_api_keys
from chatrt.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path


def test_the_first_start_makes_a_long_key_that_stays(tmp_path: Path) -> None:
    path = tmp_path / "state" / "api-key"
    (key,) = ensure_api_keys(path)
    assert len(key) >= 43
    assert ensure_api_keys(path) == (key,)
    assert read_api_keys(path) == (key,)
    assert [one.name for one in path.parent.iterdir()] == ["api-key"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_the_key_file_is_for_its_user_only(tmp_path: Path) -> None:
    ensure_api_keys(tmp_path / "api-key")
    assert (tmp_path / "api-key").stat().st_mode & 0o777 == 0o600


def test_threads_that_make_the_file_at_once_get_the_same_key(tmp_path: Path) -> None:
    found: list[tuple[str, ...]] = []
    threads = [
        threading.Thread(target=lambda: found.append(ensure_api_keys(tmp_path / "api-key")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_file_may_hold_several_keys_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# laptop\nfirst\n\n  second  \n", encoding="utf-8")
    assert read_api_keys(path) == ("first", "second")


def test_a_file_that_is_missing_empty_or_in_the_way_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        read_api_keys(tmp_path / "none")
    (tmp_path / "empty").write_text("# nothing\n", encoding="utf-8")
    with pytest.raises(SettingsError, match="holds no key"):
        ensure_api_keys(tmp_path / "empty")
    with pytest.raises(SettingsError, match="cannot be made"):
        ensure_api_keys(tmp_path / "empty" / "api-key")
