"""Every kernel compiles for GPUs that are not here, within what these have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import time_scale

pytest.importorskip("triton")

PROGRAM = Path(__file__).with_name("triton_compile.py")
# What a block may have of shared memory: compute capability 8.0 and 9.0, CDNA 3.
SHARED_BYTES = {"cuda:80": 163 << 10, "cuda:90": 227 << 10, "hip:gfx942": 64 << 10}


@cache
def compiled(target: str) -> list[dict[str, Any]]:
    """In a process of its own: under the interpreter nothing compiles."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    paths = [str(root / name) for name in (".", "kernels", "drafts", "tui")]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), target],
        capture_output=True,
        text=True,
        env={**env, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=300 * time_scale(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.parametrize("target", SHARED_BYTES)
def test_every_kernel_fits_into_shared_memory_and_decode_spills_nothing(target: str) -> None:
    kernels = compiled(target)
    assert {one["kernel"] for one in kernels} >= {
        *("attend", "sum_splits", "rope_and_write_kv", "rms_norm", "swiglu", "linear"),
        *("pad_inputs", "score", "best_of_block", "best_of_blocks", "choose_filtered"),
        "move_pages",
    }
    for one in kernels:
        assert one["shared"] <= SHARED_BYTES[target], one
        if not one["case"].startswith("prefill"):
            assert one["spilled"] == 0, one
