"""Ops that compute nothing: they write down what is called, with whose rows.

Knows: the op interface, nodes. Does not know: what becomes of the nodes.
Invariant: rows are found by descent: a result has the rows of what it was made from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt_kernels.cpu.nodes import (
    AttentionNode,
    EmbedNode,
    GatherNode,
    LinearNode,
    NormNode,
    PairwiseNode,
    RopeNode,
    Rows,
)
from chatrt_kernels.cpu.structs import RowsOf
from chatrt_kernels.cpu.weights import NativeWeight

if TYPE_CHECKING:
    from torch import Tensor

    from chatrt_kernels.cpu.nodes import AnyNode
    from chatrt_kernels.ops import ForwardInputs, KVLayer, RowMeta, Weight


class Tracer:
    """Implements the calls of `chatrt_kernels.ops.Ops`, for one forward over `inputs`."""

    def __init__(self, inputs: ForwardInputs) -> None:
        self.nodes: list[AnyNode] = []
        self._inputs = inputs
        self._sorts: dict[int, RowsOf] = {}
        self._counts = {
            RowsOf.ALL: inputs.meta.token_ids.shape[0],
            RowsOf.LOGITS: inputs.logit_rows.shape[0],
            RowsOf.FEATURES: inputs.feature_rows.shape[0],
        }

    def embed(self, weight: Weight, token_ids: Tensor, *, out: Tensor) -> None:
        """out[r] = weight[token_ids[r]]; they must be the forward's own."""
        assert token_ids.data_ptr() == self._inputs.meta.token_ids.data_ptr()
        self._sorts[out.data_ptr()] = RowsOf.ALL
        self.nodes.append(EmbedNode(Rows(), out, weight=native(weight)))

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, *, out: Tensor) -> None:
        """out = x @ weight.T + bias."""
        node = LinearNode(
            self._rows(x, out),
            out,
            x=x,
            weights=(native(weight),),
            biases=(bias,),
            outs=(out,),
        )
        self.nodes.append(node)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
        """out = x / rms(x) * weight."""
        self.nodes.append(NormNode(self._rows(x, out), out, x=x, weight=weight, eps=eps))

    def add(self, x: Tensor, y: Tensor, *, out: Tensor) -> None:
        """out = x + y."""
        self.nodes.append(PairwiseNode(self._rows(x, out), out, x=x, y=y, gated=False))

    def swiglu(self, gate: Tensor, up: Tensor, *, out: Tensor) -> None:
        """out = silu(gate) * up."""
        self.nodes.append(PairwiseNode(self._rows(gate, out), out, x=gate, y=up, gated=True))

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
        """Rotate q into `out`, write k and v; `meta` must be the forward's own."""
        assert meta is self._inputs.meta
        rows = self._rows(k, out)  # q may have no columns
        self.nodes.append(RopeNode(rows, out, q=q, k=k, v=v, table=rope, kv=kv))

    def paged_attention(
        self, q: Tensor, meta: RowMeta, kv: KVLayer, scale: float, *, out: Tensor
    ) -> None:
        """Causal attention; `meta` must be the forward's own."""
        assert meta is self._inputs.meta
        self.nodes.append(AttentionNode(self._rows(q, out), out, q=q, kv=kv, scale=scale))

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        """out[i] = x[rows[i]], for the forward's logit or feature rows."""
        is_logits = rows.data_ptr() == self._inputs.logit_rows.data_ptr()
        assert is_logits or rows.data_ptr() == self._inputs.feature_rows.data_ptr()
        sort = RowsOf.LOGITS if is_logits else RowsOf.FEATURES
        self._sorts[out.data_ptr()] = sort
        self.nodes.append(GatherNode(Rows(sort), out, x=x))

    def _rows(self, source: Tensor, out: Tensor) -> Rows:
        sort = self._sorts.get(source.data_ptr(), RowsOf.ALL)
        if out.numel():
            self._sorts[out.data_ptr()] = sort
        per, rest = divmod(source.shape[0], max(1, self._counts[sort]))
        assert rest == 0, f"{source.shape[0]} rows of {self._counts[sort]}"
        return Rows(sort, per)


def native(weight: Weight) -> NativeWeight:
    """The weight, which this executor must have prepared."""
    assert isinstance(weight, NativeWeight), f"{type(weight).__name__} is another executor's weight"
    return weight
