"""Root mean square norm of rows, with the sum into the residual stream before it if wanted.

Knows: rows of one width. Does not know: layers, models.
Invariant: a row is one program's, so its bits do not depend on other rows.
Cost: each row is read and written once.
Source: Zhang and Sennrich, arXiv 1910.07467.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from chatrt_kernels.triton.launch import OPTIONS, packed_rows, power_of_two

if TYPE_CHECKING:
    from torch import Tensor

_WIDE = 4096  # columns from which on a row gets more warps


def reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / rms(x) * weight in float32; with `residual`, of x + residual."""
    wide = x.float() if residual is None else (x.float() + residual.float()).to(x.dtype).float()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, out: Tensor, residual: Tensor | None = None
) -> None:
    """out = norm of x `[rows, columns]`; with `residual` (changed in place), of their sum.

    `out` may be x.
    """
    num_rows, num_cols = x.shape
    if not num_rows:
        return
    stream = x if residual is None else residual
    _rms_norm[(num_rows,)](
        *(x, stream, weight, out),
        *(num_cols, eps),
        *(packed_rows(x), packed_rows(stream), packed_rows(out)),
        HAS_RESIDUAL=residual is not None,
        BLOCK=power_of_two(num_cols),
        num_warps=8 if num_cols >= _WIDE else 4,
        **OPTIONS,
    )


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_cols,
    eps,
    stride_x,
    stride_residual,
    stride_out,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_col = tl.arange(0, BLOCK)
    m_col = o_col < num_cols
    b_x = tl.load(x_ptr + i_row * stride_x + o_col, mask=m_col, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        p_residual = residual_ptr + i_row * stride_residual + o_col
        b_sum = b_x + tl.load(p_residual, mask=m_col, other=0.0).to(tl.float32)
        # rounded as it is stored: the norm is of what the next layer will read
        b_stored = b_sum.to(residual_ptr.dtype.element_ty)
        tl.store(p_residual, b_stored, mask=m_col)
        b_x = b_stored.to(tl.float32)
    b_inverse = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=0) / num_cols + eps)
    b_weight = tl.load(weight_ptr + o_col, mask=m_col, other=0.0).to(tl.float32)
    b_out = (b_x * b_inverse * b_weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + i_row * stride_out + o_col, b_out, mask=m_col)
