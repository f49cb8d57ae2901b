"""Tells a counter of every kernel that Triton compiles, and of every pass that is captured.

Knows: Triton's hook, captures. Does not know: who counts, what for.
Invariant: a hook that was there before is called as before.
Source: `knobs.runtime.jit_post_compile_hook` of Triton 3.6 to 3.9, which is called once a kernel
is compiled or found compiled in the cache on disk, with keyword arguments alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt_kernels.compilations import Compilations
    from chatrt_kernels.triton.program import Capture


def watch_compilations(compilations: Compilations) -> Callable[[], None]:
    """Count every kernel from now on, of the whole process; returns what ends it."""
    before = triton.knobs.runtime.jit_post_compile_hook

    def compiled(**told: Any) -> bool | None:
        compilations.compiled(told["fn"].name)
        return None if before is None else before(**told)

    def end() -> None:
        triton.knobs.runtime.jit_post_compile_hook = before

    triton.knobs.runtime.jit_post_compile_hook = compiled
    return end


def counted(capture: Capture, compilations: Compilations) -> Capture:
    """The same capture, and every one is counted."""

    def capture_and_count(launch: Callable[[], None]) -> Callable[[], None]:
        replay = capture(launch)
        compilations.captured()
        return replay

    return capture_and_count
