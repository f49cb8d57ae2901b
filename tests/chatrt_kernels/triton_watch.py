"""Compiles a kernel as a first launch does, for a GPU that is not here: run it as a program.

Prints what the counter says behind the first call, and behind the same call again.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from chatrt_kernels.compilations import Compilations
from chatrt_kernels.triton.watch import watch_compilations


class AbsentGPU:
    """What a launch asks a driver before it compiles."""

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default."""
        del device
        return 0

    def get_current_target(self) -> GPUTarget:
        """Compute capability 8.0."""
        return GPUTarget("cuda", 80, 32)


@triton.jit  # type: ignore[untyped-decorator]
def _double(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    o = tl.arange(0, BLOCK)
    tl.store(x_ptr + o, tl.load(x_ptr + o) * 2)


def main() -> None:
    """Compile, count, compile what is compiled already, count."""
    gpu: Any = AbsentGPU()
    driver.set_active(gpu)
    compilations = Compilations()
    watch_compilations(compilations)
    for _ in range(2):
        _double.warmup(torch.empty(32), BLOCK=32, grid=(1,))
        print(compilations.all.num_kernels)


if __name__ == "__main__":
    main()
