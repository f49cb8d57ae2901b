"""A compilation by Triton itself is counted, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import time_scale

PROGRAM = Path(__file__).with_name("triton_watch.py")


def test_a_kernel_that_triton_compiles_is_counted_at_its_first_call_only(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    paths = [str(root / name) for name in (".", "kernels", "drafts", "tui")]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        env=env,
        timeout=100 * time_scale(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "1"]
