"""The CPU kernels compiled for tests: each path that this machine can run.

Knows: which flags select which path. Does not know: what the kernels do.
Invariant: a machine without a compiler skips what needs it, except under CI, where that fails.
Cost: compiled once into `build/kernels` of the checkout, and again only when sources, flags or the
compiler change.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import pytest

from chatrt_kernels.cpu.build import (
    NATIVE_FLAGS,
    BuildError,
    cpu_identity,
    ensure_library,
    find_compiler,
)
from tests.support import KERNEL_CACHE

if TYPE_CHECKING:
    from pathlib import Path

# Further flags for every path, for example those of a sanitizer (`make check-native`).
EXTRA_FLAGS = tuple(os.environ.get("CHATRT_TEST_KERNEL_FLAGS", "").split())
_X86 = platform.machine() in ("x86_64", "AMD64")
_ARM = platform.machine() in ("aarch64", "arm64")
_AVX2_NEEDS = {"avx2", "fma", "f16c", "bmi2", "movbe"}


@dataclass(frozen=True, slots=True)
class KernelPath:
    """One way to compile the kernels; `name` is for people, `flags` select the instructions."""

    name: str
    flags: tuple[str, ...]


NATIVE_PATH = KernelPath("native", NATIVE_FLAGS)


def runnable_paths() -> list[KernelPath]:
    """The paths that this machine can run, its own first."""
    paths = [NATIVE_PATH]
    if _X86 and set(cpu_identity().split()) >= _AVX2_NEEDS:
        paths.append(KernelPath("avx2", ("-march=x86-64-v3",)))
    if _X86:
        paths.append(KernelPath("portable", ("-march=x86-64",)))
    if _ARM:
        paths.append(KernelPath("portable", ("-march=armv8-a",)))
    return paths


def compiled(path: KernelPath) -> Path:
    """The shared library of the kernels for `path`; skips the test without a compiler."""
    # A sanitizer that is loaded ahead of this process is not meant for the compiler.
    environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    if find_compiler(environ) is None:
        cannot_run("there is no C++ compiler")
    try:
        return ensure_library(KERNEL_CACHE, environ=environ, flags=(*path.flags, *EXTRA_FLAGS))
    except BuildError as error:
        pytest.fail(str(error))


def cannot_run(reason: str) -> NoReturn:
    """Skips the test, or fails it under CI, where everything has to run."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
