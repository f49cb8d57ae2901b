"""The op interface on a CPU: C++ kernels, each op by itself or a whole forward in one call.

Knows: tracing, fusing, lowering, in this order. Does not know: models, sessions, the compiler.
Invariant: a row's results are the same bits for any number of rows, any chunking, any number of
threads, and whether its ops were fused or not.
Cost: activations are float32, and 8 bits per number where they meet quantised weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chatrt_kernels.cpu.binding import ThreadPool
from chatrt_kernels.cpu.fuse import fuse, quantise_inputs
from chatrt_kernels.cpu.lower import lower
from chatrt_kernels.cpu.nodes import RopeNode
from chatrt_kernels.cpu.program import NativeProgram
from chatrt_kernels.cpu.trace import Tracer, native
from chatrt_kernels.cpu.weights import WeightMemory, advise_large_pages, large_pages
from chatrt_kernels.ops import ForwardInputs, KVLayout, RowMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatrt_kernels.cpu.binding import NativeLibrary
    from chatrt_kernels.cpu.weights import NativeWeight
    from chatrt_kernels.formats import QuantizedTensor
    from chatrt_kernels.ops import Describe, KVLayer, Weight

_PROBE_BYTES = 256 << 20


class NativeOps:
    """Implements `chatrt_kernels.ops.Ops` on `num_threads` threads of its own.

    Tensors are float32 with adjacent numbers in a row; KV pages are float16 or float32 in
    `KVLayout.HEADS`, of a multiple of 16 slots.

    Raises:
        OSError: The system gives no more threads.
    """

    name = "native"
    kv_layout = KVLayout.HEADS
    even_rows = None
    wide_buffers = False

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        self.kernels = library
        self.num_threads = num_threads
        self._pool = ThreadPool(library, num_threads)
        self._memory = WeightMemory(self._pool)
        self._probe: Tensor | None = None

    def prepare(
        self,
        weight: QuantizedTensor | Tensor,
        *,
        sensitive: bool = False,
        first_rows: Tensor | None = None,
    ) -> NativeWeight:
        """Repack a matrix `[out_features, in_features]` once; its values stay exact.

        Raises:
            ValueError: A row of `first_rows` comes twice, or is not there.
        """
        return self._memory.repack(weight, sensitive=sensitive, first_rows=first_rows)

    def restrict(self, weight: Weight, rows: Tensor) -> NativeWeight:
        """A view of the rows int64 `[n]`, in this order; nothing is copied.

        Raises:
            ValueError: `weight` was not prepared with these rows as its first ones.
        """
        return native(weight).restricted(rows)

    def compile(
        self, describe: Describe, largest: ForwardInputs, outputs: Sequence[Tensor]
    ) -> NativeProgram:
        """Record a forward that serves up to as many rows as `largest` has."""
        tracer = Tracer(largest)
        describe(tracer, largest)
        self._read_in_large_pages(tracer)
        max_positions = largest.meta.page_table.shape[1] * self._page_size(tracer)
        return NativeProgram(
            lower(fuse(tracer.nodes, outputs), max_positions=max_positions), self._pool
        )

    def read_bandwidth_gbs(self) -> float:
        """GB/s (10⁹ bytes) at which the threads read memory once, prefetching."""
        if self._probe is None:
            self._probe = large_pages(self._pool, _PROBE_BYTES).zero_()
        time_ns = self.kernels.functions.chatrt_read(
            self._pool.handle, self._probe.data_ptr(), _PROBE_BYTES
        )
        return float(_PROBE_BYTES / time_ns)

    def embed(self, weight: Weight, token_ids: Tensor, *, out: Tensor) -> None:
        """out[r] = weight[token_ids[r]]."""
        inputs = _inputs(out.shape[0], token_ids=token_ids)
        self._run(inputs, lambda ops: ops.embed(weight, token_ids, out=out))

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, *, out: Tensor) -> None:
        """out = x @ weight.T + bias."""
        self._run(_inputs(x.shape[0]), lambda ops: ops.linear(x, weight, bias, out=out))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
        """out = x / rms(x) * weight, over the last dimension."""
        self._run(_inputs(x.shape[0]), lambda ops: ops.rms_norm(x, weight, eps, out=out))

    def add(self, x: Tensor, y: Tensor, *, out: Tensor) -> None:
        """out = x + y; out may be either."""
        self._run(_inputs(x.shape[0]), lambda ops: ops.add(x, y, out=out))

    def swiglu(self, gate: Tensor, up: Tensor, *, out: Tensor) -> None:
        """out = silu(gate) * up; out may be either."""
        self._run(_inputs(gate.shape[0]), lambda ops: ops.swiglu(gate, up, out=out))

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        """out[i] = x[rows[i]]."""
        inputs = _inputs(x.shape[0], logit_rows=rows)
        self._run(inputs, lambda ops: ops.gather_rows(x, rows, out=out))

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
        """Rotate q into `out` (which may be q) and k into the cache, where v follows unrotated."""
        inputs = _with_meta(meta)
        self._run(inputs, lambda ops: ops.rope_and_write_kv(q, k, v, rope, meta, kv, out=out))

    def paged_attention(
        self, q: Tensor, meta: RowMeta, kv: KVLayer, scale: float, *, out: Tensor
    ) -> None:
        """Causal attention of ragged rows; rows behind `q_start[-1]` are left as they are."""
        inputs = _with_meta(meta)
        self._run(inputs, lambda ops: ops.paged_attention(q, meta, kv, scale, out=out))

    def _run(self, inputs: ForwardInputs, call: Callable[[Tracer], None]) -> None:
        """One op by itself, through the same kernels as a whole forward."""
        tracer = Tracer(inputs)
        call(tracer)
        nodes = quantise_inputs(tracer.nodes, [node.out for node in tracer.nodes])
        max_positions = int(inputs.meta.kv_len.max()) if len(inputs.meta.kv_len) else 0
        NativeProgram(lower(nodes, max_positions=max_positions), self._pool).run(inputs)

    def _read_in_large_pages(self, tracer: Tracer) -> None:
        """Ask for large pages under the KV caches that a forward reads."""
        layers = [node.kv for node in tracer.nodes if isinstance(node, RopeNode)]
        storages = {kv.keys.untyped_storage().data_ptr(): kv.keys for kv in layers}
        for start, keys in storages.items():
            advise_large_pages(self._pool, start, keys.untyped_storage().nbytes())

    def _page_size(self, tracer: Tracer) -> int:
        sizes = [node.kv.keys.shape[1] for node in tracer.nodes if hasattr(node, "kv")]
        return sizes[0] if sizes else 1


def _inputs(
    num_rows: int, *, token_ids: Tensor | None = None, logit_rows: Tensor | None = None
) -> ForwardInputs:
    """Inputs of an op that asks for no sequences."""
    none = torch.empty(0, dtype=torch.int64)
    rows = torch.empty(num_rows, dtype=torch.int64) if token_ids is None else token_ids
    meta = RowMeta(
        token_ids=rows,
        positions=none,
        write_slots=none,
        page_table=torch.empty(0, 0, dtype=torch.int32),
        q_start=torch.zeros(1, dtype=torch.int32),
        kv_len=torch.empty(0, dtype=torch.int32),
    )
    return ForwardInputs(meta, none if logit_rows is None else logit_rows, none.clone())


def _with_meta(meta: RowMeta) -> ForwardInputs:
    none = torch.empty(0, dtype=torch.int64)
    return ForwardInputs(meta, none, none.clone())
