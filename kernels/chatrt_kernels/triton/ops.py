"""The op interface on a GPU: Triton kernels, the library's products for dense weights.

    up to `even_rows` rows   padded to one bucket, small tiles, recorded   bits of a row are its own
    more rows                as they are, large tiles                      a tolerance

Knows: how many rows a pass has, which tiles that means. Does not know: models, sessions.
Invariant: passes of up to `even_rows` rows give a row the same bits whatever else is in them: all
their products have the same shape, and no kernel cuts its work by the number of rows.
Cost: no synchronisation with the device; a recorded pass is one launch.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from chatrt_kernels.ops import KVLayout
from chatrt_kernels.triton.fuse import Add, Linear, Norm, Other
from chatrt_kernels.triton.linear import linear as grouped_linear
from chatrt_kernels.triton.paged_attention import paged_attention
from chatrt_kernels.triton.program import GpuProgram, Splits, eager
from chatrt_kernels.triton.rms_norm import rms_norm
from chatrt_kernels.triton.rope_and_write_kv import rope_and_write_kv
from chatrt_kernels.triton.swiglu import swiglu
from chatrt_kernels.triton.tiling import Partials, decode_tiling, prefill_tiling
from chatrt_kernels.triton.weights import GpuWeight, gpu_weight, prepare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt_kernels.formats import QuantizedTensor
    from chatrt_kernels.ops import Describe, ForwardInputs, KVLayer, RowMeta, Weight
    from chatrt_kernels.triton.fuse import Call
    from chatrt_kernels.triton.program import Capture

EVEN_ROWS = 32


class TritonOps:
    """Implements `chatrt_kernels.ops.Ops` with activations in `dtype` on `device`.

    Args:
        dtype: bfloat16, float16 or float32.
        device: A GPU; the CPU under Triton's interpreter.
        even_rows: The row bucket: passes of at most so many rows are bitwise even.
        capture: Records a pass to be replayed; CUDA graphs on a GPU.

    How attention is split depends on how long a sequence may be: for a program its largest inputs
    say it, for a call by itself the width of its page table.
    """

    name = "triton"
    kv_layout = KVLayout.ROWS
    wide_buffers = True

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        even_rows: int = EVEN_ROWS,
        capture: Capture = eager,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.even_rows = even_rows
        self._capture = capture
        self._partials: dict[tuple[int, int, int], Partials] = {}
        self._max_positions: int | None = None
        self._num_splits: int | None = None  # that attention is asked for; None: all there may be

    def prepare(
        self,
        weight: QuantizedTensor | Tensor,
        *,
        sensitive: bool = False,
        first_rows: Tensor | None = None,
    ) -> GpuWeight:
        """A matrix `[out_features, in_features]` on the device, quantised ones in groups."""
        del sensitive, first_rows  # activations are not rounded, and `restrict` copies
        return prepare(weight, dtype=self.dtype, device=self.device)

    def restrict(self, weight: Weight, rows: Tensor) -> GpuWeight:
        """A copy of rows int64 `[n]`, in this order."""
        return gpu_weight(weight).restricted(rows)

    def compile(
        self, describe: Describe, largest: ForwardInputs, outputs: Sequence[Tensor]
    ) -> GpuProgram:
        """Record the passes of up to `even_rows` rows, all of them before it returns."""
        del outputs  # buffers stay where they are
        assert largest.num_positions is not None
        ops = copy.copy(self)  # scratch is shared
        ops._max_positions = largest.num_positions
        return GpuProgram(
            describe,
            ops,
            largest,
            splits=Splits(decode_tiling(largest.num_positions), largest.num_positions),
            capture=self._capture,
        )

    def for_splits(self, num_splits: int) -> TritonOps:
        """The same executor for sequences of so many splits at most.

        Fewer programs find nothing to do then; no bit of a result is another.
        """
        narrowed = copy.copy(self)
        narrowed._num_splits = num_splits
        return narrowed

    def launch(self, calls: Sequence[Call]) -> None:
        """Make the calls of a forward, fused ones too."""
        for call in calls:
            match call:
                case Linear():
                    self.linear(call.x, call.weight, call.bias, out=call.out)
                case Norm():
                    rms_norm(call.x, call.weight, call.eps, out=call.out, residual=call.residual)
                case Add():
                    self.add(call.x, call.y, out=call.out)
                case Other():
                    call.make(self)

    def embed(self, weight: Weight, token_ids: Tensor, *, out: Tensor) -> None:
        """out[r] = weight[token_ids[r]]."""
        out.copy_(gpu_weight(weight).rows(token_ids, out.dtype))

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, *, out: Tensor) -> None:
        """out = x @ weight.T + bias; out must not overlap x."""
        matrix = gpu_weight(weight)
        if matrix.bits is not None:
            grouped_linear(x, matrix, bias, out=out, prefill=x.shape[0] > self.even_rows)
        elif bias is None:
            torch.mm(x, matrix.codes.t(), out=out)
        else:
            torch.addmm(bias, x, matrix.codes.t(), out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
        """out = x / rms(x) * weight, over the last dimension; out may be x."""
        rms_norm(x, weight, eps, out=out)

    def add(self, x: Tensor, y: Tensor, *, out: Tensor) -> None:
        """out = x + y; out may be either."""
        torch.add(x, y, out=out)

    def swiglu(self, gate: Tensor, up: Tensor, *, out: Tensor) -> None:
        """out = silu(gate) * up; out may be either."""
        swiglu(gate, up, out=out)

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        """out[i] = x[rows[i]]; out must not overlap x."""
        torch.index_select(x, 0, rows, out=out)

    def rope_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: Tensor,
        meta: RowMeta,
        kv: KVLayer,
        *,
        out: Tensor,
    ) -> None:
        """Rotate q into `out` (which may be q), write k and v; negative slots are padding."""
        rope_and_write_kv(q, k, v, rope, meta, kv, out=out)

    def paged_attention(
        self, q: Tensor, meta: RowMeta, kv: KVLayer, scale: float, *, out: Tensor
    ) -> None:
        """Causal attention of ragged rows; rows behind `q_start[-1]` mean nothing afterwards."""
        if q.shape[0] > self.even_rows:
            tiling = prefill_tiling(q.shape[1] // kv.head_dim // kv.kv_heads)
            paged_attention(q, meta, kv, scale, tiling, out=out)
            return
        positions = self._max_positions or meta.page_table.shape[1] * kv.keys.shape[1]
        tiling = decode_tiling(positions)
        most = tiling.num_splits(positions)
        partials = self._scratch(q.shape[1] // kv.head_dim, most, kv.head_dim)
        num_splits = min(most, self._num_splits or most)
        paged_attention(
            q, meta, kv, scale, tiling, out=out, num_splits=num_splits, partials=partials
        )

    def _scratch(self, num_heads: int, num_splits: int, head_dim: int) -> Partials:
        """Partial sums of a pass: one buffer for all layers, since they run one after another."""
        key = (num_heads, num_splits, head_dim)
        found = self._partials.get(key)
        if found is None:
            found = self._partials[key] = Partials.allocate(self.even_rows, *key, self.device)
        return found
