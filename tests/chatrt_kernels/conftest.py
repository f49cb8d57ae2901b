"""Fixtures of the kernels' tests: the compiled library, once for each path of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chatrt_kernels.cpu_support import NATIVE_PATH, KernelPath, compiled, runnable_paths

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session", params=runnable_paths(), ids=lambda path: path.name)
def kernel_path(request: pytest.FixtureRequest) -> KernelPath:
    """Each path in turn: every test that asks for it or for its library runs on all of them."""
    path: KernelPath = request.param
    return path


@pytest.fixture(scope="session")
def native_library(kernel_path: KernelPath) -> Path:
    """The kernels' shared library, compiled for `kernel_path`."""
    return compiled(kernel_path)


@pytest.fixture(scope="session")
def machine_library() -> Path:
    """The library of this machine's own path only, for what does not differ between paths."""
    return compiled(NATIVE_PATH)
