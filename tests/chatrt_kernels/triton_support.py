"""What the tests of Triton kernels share: pages of every format, filled by the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton.runtime.jit import JitFunctionInfo

from chatrt_kernels.kv_formats import KVFormat
from chatrt_kernels.ops import KVLayer
from chatrt_kernels.triton.ops import TritonOps

if TYPE_CHECKING:
    from tests.chatrt_kernels.ragged import Shape

CPU = torch.device("cpu")
KV_DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.uint8]


def triton_ops(dtype: torch.dtype = torch.float32, even_rows: int = 32) -> TritonOps:
    """The executor under the interpreter."""
    return TritonOps(dtype, CPU, even_rows=even_rows)


def poisoned_pages(shape: Shape, dtype: torch.dtype) -> KVLayer:
    """Pages of which nothing is written: not a number, or codes whose scale is none."""
    kind = KVFormat.of(dtype)
    rows = (shape.num_pages, shape.page_size, shape.kv_heads)
    width = kind.stored_width(shape.head_dim)
    if kind is KVFormat.FLOAT:
        keys, values = torch.full((2, *rows, width), torch.nan, dtype=dtype)
        return KVLayer(keys, values)
    # of 8-bit floats the largest one, since any bits may lie where nothing was written but NaN
    keys, values = torch.full((2, *rows, width), 0x7E, dtype=torch.uint8).view(dtype)
    scales = (2, *rows, *(kind.scale_shape(shape.head_dim) or ()))
    return KVLayer(keys, values, *torch.full(scales, torch.nan, dtype=kind.scale_dtype))


def compiled_by_triton(name: str) -> None:
    """Call the hook behind a compilation as Triton 3.6 to 3.9 do: with keywords alone.

    `test_triton_watch` holds it to a real compilation.
    """
    hook = triton.knobs.runtime.jit_post_compile_hook
    if hook is not None:
        hook(
            key="key",
            repr=f"{name}[num_warps=4]()",
            fn=JitFunctionInfo(__name__, name, None),
            compile={"key": "key", "device": 0, "num_warps": 4, "is_warmup": False},
            is_manual_warmup=False,
            already_compiled=False,
        )
