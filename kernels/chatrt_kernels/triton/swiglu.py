"""silu(gate) * up, number by number.

Knows: two matrices of one shape, which may be halves of one buffer.
Does not know: layers. Invariant: each number depends on its own two.
Cost: both are read once, the result is written once.
Source: Shazeer, arXiv 2002.05202.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch.nn import functional

from chatrt_kernels.triton.launch import OPTIONS, packed_rows

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in float32."""
    return functional.silu(gate.float()) * up.float()


def swiglu(gate: Tensor, up: Tensor, *, out: Tensor) -> None:
    """out = silu(gate) * up, all `[rows, columns]`; `out` may be either."""
    num_rows, num_cols = gate.shape
    if not num_rows:
        return
    _swiglu[(num_rows, triton.cdiv(num_cols, _BLOCK))](
        *(gate, up, out),
        num_cols,
        *(packed_rows(gate), packed_rows(up), packed_rows(out)),
        BLOCK=_BLOCK,
        **OPTIONS,
    )


@triton.jit
def _swiglu(
    gate_ptr,
    up_ptr,
    out_ptr,
    num_cols,
    stride_gate,
    stride_up,
    stride_out,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_col = o_col < num_cols
    b_gate = tl.load(gate_ptr + i_row * stride_gate + o_col, mask=m_col, other=0.0).to(tl.float32)
    b_up = tl.load(up_ptr + i_row * stride_up + o_col, mask=m_col, other=0.0).to(tl.float32)
    # of a number that is not above 0: no exponential overflows
    b_small = tl.exp(-tl.abs(b_gate))
    b_open = tl.where(b_gate >= 0.0, 1.0, b_small) / (1.0 + b_small)
    b_out = b_gate * b_open * b_up
    p_out = out_ptr + i_row * stride_out + o_col
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_col)
