"""A recorded forward: one foreign call for all of its ops.

Knows: the step's integer tensors, the C program. Does not know: what the ops compute.
Invariant: one program serves any number of rows up to those it was recorded with; what changes from
step to step is read from the inputs. Nothing is allocated in a run.
Cost: a program of one small op takes 2.4 µs in all when its Python is warm.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

from chatrt_kernels.cpu.structs import Kind, StepStruct

if TYPE_CHECKING:
    from chatrt_kernels.cpu.binding import ThreadPool
    from chatrt_kernels.cpu.lower import Lowered
    from chatrt_kernels.ops import ForwardInputs, RowMeta

# What a person calls the ops of each kind.
_FAMILIES = {
    Kind.EMBED: "embed",
    Kind.NORM: "norm",
    Kind.QUANTISE: "quantise",
    Kind.LINEAR: "linear",
    Kind.ROPE: "rope_and_kv",
    Kind.ATTENTION: "attention",
    Kind.ADD: "add",
    Kind.SWIGLU: "swiglu",
    Kind.GATHER: "gather",
}
_NS_PER_MS = 1e6


class NativeProgram:
    """Implements `chatrt_kernels.ops.Program`. Belongs to one thread at a time.

    The library's functions know it by `handle`, as long as this object lives; `pool` runs it.
    """

    def __init__(self, lowered: Lowered, pool: ThreadPool) -> None:
        assert lowered.calls is not None
        functions = pool.kernels.functions
        self.pool = pool
        self._kinds = lowered.kinds
        self._run = functions.chatrt_run
        self._step = StepStruct()
        self._step_pointer = ctypes.byref(self._step)
        self._meta: RowMeta | None = None
        self._times_ns = (ctypes.c_int64 * len(lowered.kinds))()
        self.handle = functions.chatrt_create_program(lowered.calls, len(lowered.kinds))
        self._kept = lowered.kept
        ended = weakref.finalize(self, functions.chatrt_destroy_program, self.handle)
        ended.atexit = False

    def run(self, inputs: ForwardInputs) -> None:
        """All ops, on the rows of `inputs`."""
        self._call(inputs, None)

    def profile(self, inputs: ForwardInputs) -> dict[str, float]:
        """Run once, and return the milliseconds of each family of ops."""
        self._call(inputs, ctypes.addressof(self._times_ns))
        families: dict[str, float] = {}
        for kind, time_ns in zip(self._kinds, self._times_ns, strict=True):
            family = _FAMILIES[kind]
            families[family] = families.get(family, 0.0) + time_ns / _NS_PER_MS
        return families

    def _call(self, inputs: ForwardInputs, times: int | None) -> None:
        if inputs.meta is not self._meta:
            self._set_meta(inputs.meta)
        step = self._step
        step.logit_rows = inputs.logit_rows.data_ptr()
        step.feature_rows = inputs.feature_rows.data_ptr()
        step.num_logit_rows = inputs.logit_rows.shape[0]
        step.num_feature_rows = inputs.feature_rows.shape[0]
        done = self._run(self.handle, self.pool.handle, self._step_pointer, times)
        assert done, "a forward has more calls than the pool can hold"

    def _set_meta(self, meta: RowMeta) -> None:
        """Where the rows' tensors lie; whoever refills the same ones need not say so again."""
        self._meta = meta
        step = self._step
        step.token_ids = meta.token_ids.data_ptr()
        step.positions = meta.positions.data_ptr()
        step.write_slots = meta.write_slots.data_ptr()
        step.page_table = meta.page_table.data_ptr()
        step.page_table_stride = meta.page_table.stride(0)
        step.q_start = meta.q_start.data_ptr()
        step.kv_len = meta.kv_len.data_ptr()
        step.num_rows = meta.token_ids.shape[0]
        step.num_sequences = meta.kv_len.shape[0]
