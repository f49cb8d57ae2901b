"""How every kernel here is launched: what the compiler is told, what `tl.dot` multiplies.

Knows: Triton's interpreter and its gaps. Does not know: any one kernel.
Invariant: kernels give a row the same bits whatever other rows there are; nothing here depends on
their number.
Source: Triton 3.6 to 3.9. Its interpreter keeps bfloat16 as 16-bit integers and multiplies those
in `tl.dot`; float32 has no such gap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

# Fusing of products and sums is stated, since its default changes with Triton's version. The same
# code computes all rows, so it changes no row against another.
OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}

_DOT_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


def varying(*names: str) -> dict[str, Any]:
    """What `triton.jit` is told of arguments that change from step to step.

    A kernel that took their value or divisibility into account would be compiled anew for some of
    them, in the midst of serving.
    """
    return {"do_not_specialize": list(names)}


def stages_of_shared_loads(wanted: int, *, amd: bool = torch.version.hip is not None) -> int:
    """Into how many stages a loop is cut in which one load feeds two products.

    Triton 3.6 fails to compile more than one for AMD ('tt.load' op operation destroyed).
    """
    return 1 if amd and triton.__version__.startswith("3.6.") else wanted


def is_interpreted() -> bool:
    """Whether kernels run as Python on the CPU (`TRITON_INTERPRET=1`)."""
    return bool(triton.knobs.runtime.interpret)


def dot_type(dtype: torch.dtype) -> Any:
    """In which type `tl.dot` multiplies numbers of a tensor of `dtype`; sums are float32."""
    return tl.float32 if is_interpreted() else _DOT_TYPES[dtype]


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def packed_rows(x: Tensor) -> int:
    """The stride between rows whose numbers lie side by side."""
    assert x.stride(-1) == 1, f"numbers of a row lie {x.stride(-1)} apart"
    return x.stride(0)
