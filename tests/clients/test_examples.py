"""The example programs as they are: each runs, and shows what its first line says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import time_scale

if TYPE_CHECKING:
    from tests.e2e.process import ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]
FOLDER = Path(__file__).parents[2] / "examples" / "python"
# A pattern that what the program prints fulfils.
SHOWS = {
    "chat_client.py": r"Paris.*\n.*Rome",
    "lanes.py": r"(?s)story: .+\n\nhappy: .+\n\nsad: .+",
    "openai_sdk.py": r"Paris.*\n\(\d+ tokens cached.*\n.*Rome.*\n\([1-9]\d+ tokens cached",
    "resume.py": r"\S \[hung up\] .*\w+",
    "typing_ahead.py": r"\n\([1-9]\d* tokens were ready at Enter",
}


def test_every_example_is_run_and_named_in_their_readme() -> None:
    names = {path.name for path in FOLDER.glob("*.py")}
    assert names == set(SHOWS)
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+\.py)` \|", readme, re.M)) == names


@pytest.mark.parametrize("name", sorted(SHOWS))
def test_an_example_runs_as_written(name: str, server: ServerProcess) -> None:
    key_file = str(server.paths.api_key)
    done = subprocess.run(
        [sys.executable, str(FOLDER / name)],
        env={
            **os.environ,
            "CHATRT_URL": server.url.removesuffix("/responses"),
            "CHATRT_API_KEY_FILE": key_file,
        },
        capture_output=True,
        text=True,
        timeout=60 * time_scale(),
    )
    assert done.returncode == 0, done.stderr
    assert re.search(SHOWS[name], done.stdout), done.stdout
