"""The vector functions of every instruction set print the same lines (`simd_check.cpp`)."""

from __future__ import annotations

import math
import os
import platform
import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chatrt_kernels.cpu.build import BASE_FLAGS, SOURCE, cpu_identity, find_compiler
from tests.chatrt_kernels.cpu_support import EXTRA_FLAGS, cannot_run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAM = Path(__file__).with_name("simd_check.cpp")
X86 = platform.machine() in ("x86_64", "AMD64")
CROSS_COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64")


@dataclass(frozen=True, slots=True)
class SimdPath:
    """One header of vector functions: what it calls itself, how to compile it, what it runs on."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str] = field(default=frozenset())


V3 = frozenset({"avx2", "fma", "f16c", "bmi2", "movbe"})
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}
VECTOR_PATHS = (
    SimdPath("avx512-vnni", ("-march=x86-64-v4", "-mavx512vnni"), V4),
    SimdPath("avx2-vnni", ("-march=x86-64-v3", "-mavxvnni"), V3 | {"avx_vnni"}),
    SimdPath("avx2", ("-march=x86-64-v3",), V3),
)
NEON = SimdPath("neon-dotprod", ("-march=armv8.2-a+dotprod",))
FUSED = (
    SimdPath("portable", ("-march=x86-64", "-mfma"), frozenset({"fma"}))
    if X86
    else SimdPath("portable", ("-march=armv8-a",))
)
UNFUSED = SimdPath("portable", ("-march=x86-64",))


def run(command: Sequence[str | Path], environ: Mapping[str, str]) -> str:
    """What `command` prints; it has to succeed."""
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines_of(
    path: SimdPath, folder: Path, compiler: Path | str | None = None, launcher: Sequence[str] = ()
) -> list[str]:
    """What the program prints when it is compiled for `path`, by this machine's compiler if none.

    Skips the test where the CPU lacks what the path needs.
    """
    # A sanitizer that is loaded ahead of this process is not meant for others.
    environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    own = compiler is None
    compiler = find_compiler(environ) if own else compiler
    if compiler is None:
        cannot_run("there is no C++ compiler")
    missing = path.needs - set(cpu_identity().split())
    if missing:
        pytest.skip(f"this CPU lacks {' '.join(sorted(missing))}")
    program = folder / f"simd_check_{path.name}"
    flags = [*BASE_FLAGS, *path.flags, *(EXTRA_FLAGS if own else ("-static",)), f"-I{SOURCE}"]
    run([compiler, *flags, PROGRAM, "-o", program], environ)
    first, *lines = run([*launcher, program], environ).splitlines()
    assert first == f"path {path.name}"
    return lines


def floats_of(line: str) -> list[float]:
    """The numbers of a line that names them by their bits."""
    words = line.split()[2:]
    return [struct.unpack(">f", bytes.fromhex(word))[0] for word in words]


@pytest.fixture(scope="module")
def fused_lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The portable functions with fused multiply-adds."""
    return lines_of(FUSED, tmp_path_factory.mktemp("fused"))


@pytest.mark.skipif(not X86, reason="needs an x86 CPU")
@pytest.mark.parametrize("path", VECTOR_PATHS, ids=lambda path: path.name)
def test_an_instruction_set_gives_the_bits_of_the_portable_functions(
    path: SimdPath, fused_lines: list[str], tmp_path: Path
) -> None:
    assert lines_of(path, tmp_path) == fused_lines


@pytest.mark.skipif(
    X86 and (CROSS_COMPILER is None or EMULATOR is None),
    reason="needs an ARM CPU, or aarch64-linux-gnu-g++ and qemu-aarch64",
)
def test_neon_gives_the_bits_of_the_portable_functions(
    fused_lines: list[str], tmp_path: Path
) -> None:
    if X86:
        assert EMULATOR is not None
        lines = lines_of(NEON, tmp_path, CROSS_COMPILER, [EMULATOR])
    else:
        lines = lines_of(NEON, tmp_path)
    assert lines == fused_lines


@pytest.mark.skipif(not X86, reason="every ARM CPU has fused multiply-adds")
def test_without_fused_multiply_adds_only_their_last_bits_differ(
    fused_lines: list[str], tmp_path: Path
) -> None:
    num_rounded = 0
    for line, fused in zip(lines_of(UNFUSED, tmp_path), fused_lines, strict=True):
        if not fused.startswith("rounded"):
            assert line == fused
            continue
        num_rounded += 1
        # A sum may cancel, so its error is that of the terms, which are below 20.
        abs_tol = 3e-6 if fused.startswith("rounded fma") else 0.0
        for value, expected in zip(floats_of(line), floats_of(fused), strict=True):
            assert math.isclose(value, expected, rel_tol=1e-6, abs_tol=abs_tol)
    assert num_rounded > 20
