"""NEON against scalar loops and against this machine, by `neon_check.cpp` under qemu."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from chatrt_kernels.cpu.build import BASE_FLAGS, NATIVE_FLAGS, SOURCE, cpu_identity, find_compiler
from tests.chatrt_kernels.cpu_support import cannot_run

PROGRAM = Path(__file__).with_name("neon_check.cpp")
ARM_COMPILER = shutil.which("aarch64-linux-gnu-g++")
ARM_EMULATOR = shutil.which("qemu-aarch64")
ARM_FLAGS = ("-march=armv8.2-a+dotprod+fp16", "-static")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the program found: no difference, on the path of this name, with these results."""

    path: str
    digest: str


def check(compiler: str | Path, flags: tuple[str, ...], folder: Path, *launcher: str) -> Outcome:
    """Compiles the program into `folder` and runs it; fails on any difference."""
    program = folder / "neon_check"
    sources = [str(PROGRAM), str(SOURCE / "weights.cpp")]
    # Warnings are of the library's own build; GCC 12 has wrong ones for AVX-512 in its own headers.
    options = [*BASE_FLAGS, *flags, "-w", f"-I{SOURCE}", *sources, "-o", str(program)]
    compiled = subprocess.run([compiler, *options], capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run([*launcher, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    words = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    return Outcome(words["path"], words["digest"])


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """This machine's own path."""
    compiler = find_compiler(os.environ)
    if compiler is None:
        cannot_run("there is no C++ compiler")
    return check(compiler, NATIVE_FLAGS, tmp_path_factory.mktemp("own"))


def test_this_machines_path_gives_what_scalar_loops_give(own: Outcome) -> None:
    assert own.path


@pytest.mark.skipif(
    ARM_COMPILER is None or ARM_EMULATOR is None,
    reason="needs aarch64-linux-gnu-g++ and qemu-aarch64",
)
def test_neon_gives_what_scalar_loops_and_this_machine_give(own: Outcome, tmp_path: Path) -> None:
    assert ARM_COMPILER is not None
    assert ARM_EMULATOR is not None
    neon = check(ARM_COMPILER, ARM_FLAGS, tmp_path, ARM_EMULATOR)
    assert neon.path.startswith("neon")
    if "fma" in cpu_identity().split() or own.path.startswith("neon"):
        assert neon.digest == own.digest
