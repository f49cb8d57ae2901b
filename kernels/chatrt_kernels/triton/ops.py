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
from chatrt_kernels.triton.linear import linear as grouped_linear
from chatrt_kernels.triton.paged_attention import (
    PREFILL,
    Partials,
    decode_tiling,
    paged_attention,
)
from chatrt_kernels.triton.program import GpuProgram, eager
from chatrt_kernels.triton.rms_norm import rms_norm
from chatrt_kernels.triton.rope_and_write_kv import rope_and_write_kv
from chatrt_kernels.triton.swiglu import swiglu
from chatrt_kernels.triton.weights import GpuWeight, gpu_weight, prepare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from chatrt_kernels.formats import QuantizedTensor
    from chatrt_kernels.ops import Describe, ForwardInputs, KVLayer, RowMeta, Weight
    from chatrt_kernels.triton.program import Capture

EVEN_ROWS = 32


class TritonOps:
    """Implements `chatrt_kernels.ops.Ops` with activations in `dtype` on `device`.

    Args:
        dtype: bfloat16, float16 or float32.
        device: A GPU; the CPU under Triton's interpreter.
        max_positions: No sequence is longer. It fixes how attention is split.
        even_rows: The row bucket: passes of at most so many rows are bitwise even.
        capture: Records a pass to be replayed; CUDA graphs on a GPU.
    """

    name = "triton"
    kv_layout = KVLayout.ROWS

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_positions: int,
        even_rows: int = EVEN_ROWS,
        capture: Capture = eager,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.even_rows = even_rows
        self._max_positions = max_positions
        self._capture = capture
        self._decode = decode_tiling(max_positions)
        self._partials: dict[tuple[int, int], Partials] = {}
        self._visible_positions = max_positions  # of the sequences that attention is asked for

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
        return GpuProgram(describe, self, largest, capture=self._capture)

    def split_counts(self) -> list[int]:
        """For how many positions, in splits, passes are recorded: each four times the last."""
        counts, most = [], self._decode.num_splits(self._max_positions)
        count = min(8, most)
        while count < most:
            counts.append(count)
            count *= 4
        return [*counts, most]

    def for_splits(self, num_splits: int) -> TritonOps:
        """The same executor for sequences of so many splits at most.

        Fewer programs find nothing to do then; no bit of a result is another.
        """
        assert self._decode.split is not None
        narrowed = copy.copy(self)  # weights and scratch are shared
        narrowed._visible_positions = num_splits * self._decode.split
        return narrowed

    def splits_of(self, num_positions: int) -> int:
        """Splits of a sequence of so many positions."""
        return self._decode.num_splits(num_positions)

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
            positions = self._max_positions
            paged_attention(q, meta, kv, scale, PREFILL, out=out, max_positions=positions)
            return
        partials = self._scratch(q.shape[1] // kv.head_dim, kv.head_dim)
        paged_attention(
            *(q, meta, kv, scale, self._decode),
            out=out,
            max_positions=self._visible_positions,
            partials=partials,
        )

    def _scratch(self, num_heads: int, head_dim: int) -> Partials:
        """Partial sums of a pass: one buffer for all layers, since they run one after another."""
        key = (num_heads, head_dim)
        found = self._partials.get(key)
        if found is None:
            splits = self._decode.num_splits(self._max_positions)
            found = self._partials[key] = Partials.allocate(
                self.even_rows, num_heads, splits, head_dim, self.device
            )
        return found
