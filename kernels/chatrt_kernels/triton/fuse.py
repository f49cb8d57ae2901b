"""Fewer launches with the same results: a forward is written down first, and neighbours are joined.

    linear q, linear k, linear v     → one product, where their results lie side by side
    add to the residual, then norm   → one kernel

Knows: calls of the op interface, which buffers they read and write. Does not know: kernels.
Invariant: each number is made by the same operations in the same order, but for the library's own
choice of a product's kernel. Matrices that are joined lie one behind the other in one tensor from
then on, so nothing is held twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from chatrt_kernels.triton.weights import GpuWeight, gpu_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from chatrt_kernels.ops import Calls, KVLayer, RowMeta, Weight


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x @ weight.T + bias."""

    x: Tensor
    weight: GpuWeight
    bias: Tensor | None
    out: Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """out = norm of x, or with a residual of their sum, which goes into the residual."""

    x: Tensor
    weight: Tensor
    eps: float
    out: Tensor
    residual: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Add:
    """out = x + y."""

    x: Tensor
    y: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True)
class Other:
    """Any other call, as it is made."""

    make: Callable[[Calls], None]


Call: TypeAlias = "Linear | Norm | Add | Other"


class Recorder:
    """Implements `chatrt_kernels.ops.Calls`: computes nothing, writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def embed(self, weight: Weight, token_ids: Tensor, *, out: Tensor) -> None:
        """out[r] = weight[token_ids[r]]."""
        self._other(lambda ops: ops.embed(weight, token_ids, out=out))

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, *, out: Tensor) -> None:
        """out = x @ weight.T + bias."""
        self.calls.append(Linear(x, gpu_weight(weight), bias, out))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
        """out = x / rms(x) * weight."""
        self.calls.append(Norm(x, weight, eps, out))

    def add(self, x: Tensor, y: Tensor, *, out: Tensor) -> None:
        """out = x + y."""
        self.calls.append(Add(x, y, out))

    def swiglu(self, gate: Tensor, up: Tensor, *, out: Tensor) -> None:
        """out = silu(gate) * up."""
        self._other(lambda ops: ops.swiglu(gate, up, out=out))

    def gather_rows(self, x: Tensor, rows: Tensor, *, out: Tensor) -> None:
        """out[i] = x[rows[i]]."""
        self._other(lambda ops: ops.gather_rows(x, rows, out=out))

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
        """Rotate q into `out`, write k and v."""
        self._other(lambda ops: ops.rope_and_write_kv(q, k, v, rope, meta, kv, out=out))

    def paged_attention(
        self, q: Tensor, meta: RowMeta, kv: KVLayer, scale: float, *, out: Tensor
    ) -> None:
        """Causal attention over the cache."""
        self._other(lambda ops: ops.paged_attention(q, meta, kv, scale, out=out))

    def _other(self, make: Callable[[Calls], None]) -> None:
        self.calls.append(Other(make))


def fuse(calls: Sequence[Call]) -> list[Call]:
    """The calls of a forward, neighbours joined."""
    fused: list[Call] = []
    products: list[Linear] = []  # of one input, side by side, not joined yet
    for call in calls:
        if isinstance(call, Linear) and products and _goes_beside(products[-1], call):
            products.append(call)
            continue
        if products:
            fused.append(_joined_products(products))
            products = []
        if isinstance(call, Linear):
            products = [call]
            continue
        norm = _joined_norm(fused[-1], call) if fused and isinstance(call, Norm) else None
        if norm is None:
            fused.append(call)
        else:
            fused[-1] = norm
    return fused + ([_joined_products(products)] if products else [])


def _goes_beside(before: Linear, call: Linear) -> bool:
    """Whether two products of one input can be one."""
    alike = before.weight.bits == call.weight.bits
    alike = alike and before.weight.shape[1] == call.weight.shape[1]
    alike = alike and (before.bias is None) == (call.bias is None)
    return alike and _same(before.x, call.x) and _beside(before.out, call.out)


def _joined_products(products: Sequence[Linear]) -> Linear:
    first = products[0]
    if len(products) == 1:
        return first
    biases = [product.bias for product in products if product.bias is not None]
    shape = (first.x.shape[0], sum(product.out.shape[1] for product in products))
    return Linear(
        first.x,
        GpuWeight.stacked([product.weight for product in products]),
        torch.cat(biases) if biases else None,
        first.out.as_strided(shape, first.out.stride()),
    )


def _joined_norm(before: Call, call: Norm) -> Norm | None:
    """A sum into the residual stream and the norm of it, as one."""
    if not isinstance(before, Add) or not _same(before.out, call.x):
        return None
    if not _same(before.x, before.out) or _same(before.y, call.out):
        return None
    return replace(call, x=before.y, residual=before.out)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _beside(left: Tensor, right: Tensor) -> bool:
    """Whether the rows of `right` begin where those of `left` end, in one wider buffer."""
    if left.dtype != right.dtype or left.stride(0) != right.stride(0):
        return False
    if left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
        return False
    is_next = right.data_ptr() - left.data_ptr() == left.shape[1] * left.element_size()
    return is_next and left.shape[1] + right.shape[1] <= left.stride(0)
