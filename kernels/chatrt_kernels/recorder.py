"""Recording a forward once and replaying it on the same buffers with new contents.

Knows: the op interface. Does not know: what the calls compute, or for whom.
Invariant: a recording holds every tensor that its calls read or write, so their memory stays put.
Cost: a replay is one Python call per op, without the description that produced it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from chatrt_kernels.formats import QuantizedTensor
    from chatrt_kernels.ops import KVLayer, Ops, RowMeta, Weight


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One op with the very arguments it was called with."""

    function: Callable[..., None]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recording:
    """A flat list of calls. Shapes are fixed; what the tensors hold is read anew at each replay."""

    calls: tuple[RecordedCall, ...]

    def replay(self) -> None:
        """Run every call again, in order."""
        for call in self.calls:
            call.function(*call.args, **call.kwargs)


class Recorder:
    """Implements `chatrt_kernels.ops.Ops`: forwards each call to `ops` and keeps it."""

    def __init__(self, ops: Ops) -> None:
        self.name = ops.name
        self._ops = ops
        self._calls: list[RecordedCall] = []

    def recording(self) -> Recording:
        """What was called so far; later calls do not change it."""
        return Recording(tuple(self._calls))

    def prepare(self, weight: QuantizedTensor | Tensor) -> Weight:
        """Forwarded and not kept: weights are prepared once, before any forward."""
        return self._ops.prepare(weight)

    def embed(self, weight: Weight, token_ids: Tensor, *, out: Tensor) -> None:
        """Forward and keep the call."""
        self._run(self._ops.embed, weight, token_ids, out=out)

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, *, out: Tensor) -> None:
        """Forward and keep the call."""
        self._run(self._ops.linear, x, weight, bias, out=out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
        """Forward and keep the call."""
        self._run(self._ops.rms_norm, x, weight, eps, out=out)

    def add(self, x: Tensor, y: Tensor, *, out: Tensor) -> None:
        """Forward and keep the call."""
        self._run(self._ops.add, x, y, out=out)

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
        """Forward and keep the call."""
        self._run(self._ops.rope_and_write_kv, q, k, v, rope, meta, kv, out=out)

    def paged_attention(
        self, q: Tensor, meta: RowMeta, kv: KVLayer, scale: float, *, out: Tensor
    ) -> None:
        """Forward and keep the call."""
        self._run(self._ops.paged_attention, q, meta, kv, scale, out=out)

    def swiglu(self, gate: Tensor, up: Tensor, *, out: Tensor) -> None:
        """Forward and keep the call."""
        self._run(self._ops.swiglu, gate, up, out=out)

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        """Forward and keep the call."""
        self._run(self._ops.gather_rows, x, rows, out=out)

    def _run(self, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        self._calls.append(RecordedCall(function, args, kwargs))
