"""Neighbours of a forward become one launch where nothing else changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chatrt_kernels.formats import QuantFormat
from chatrt_kernels.triton.fuse import Add, Linear, Norm, Recorder, fuse
from tests.chatrt_kernels.triton_support import triton_ops
from tests.chatrt_kernels.weights_support import random_matrix, same_bits

if TYPE_CHECKING:
    from chatrt_kernels.triton.ops import TritonOps

ROWS, HIDDEN = 3, 64


class Layer:
    """The calls at the front of a layer, into columns of one buffer or into three."""

    def __init__(self, ops: TritonOps, *, wide: bool, biased: bool = False) -> None:
        self.ops = ops
        widths = (64, 32, 32)
        self.x, self.added = torch.ones(ROWS, HIDDEN), torch.full((ROWS, HIDDEN), 0.5)
        self.normed, self.norm = torch.empty(ROWS, HIDDEN), torch.ones(HIDDEN)
        self.weights = [
            ops.prepare(random_matrix(QuantFormat.Q8_0, (width, HIDDEN), seed=width + i))
            for i, width in enumerate(widths)
        ]
        self.biases = [torch.arange(float(width)) if biased else None for width in widths]
        buffer = torch.empty(ROWS, sum(widths))
        self.outs = list(torch.split(buffer, list(widths), dim=1))
        if not wide:
            self.outs = [out.contiguous() for out in self.outs]

    def describe(self, ops: TritonOps | Recorder) -> None:
        ops.add(self.x, self.added, out=self.x)
        ops.rms_norm(self.x, self.norm, 1e-5, out=self.normed)
        for weight, bias, out in zip(self.weights, self.biases, self.outs, strict=True):
            ops.linear(self.normed, weight, bias, out=out)

    def fused(self) -> list[type]:
        recorder = Recorder()
        self.describe(recorder)
        calls = fuse(recorder.calls)
        self.ops.launch(calls)
        return [type(call) for call in calls]


def test_sums_go_into_norms_and_products_side_by_side_into_one() -> None:
    for biased in (False, True):
        plain, fused = (Layer(triton_ops(), wide=True, biased=biased) for _ in range(2))
        plain.describe(plain.ops)
        assert fused.fused() == [Norm, Linear]
        assert same_bits(plain.x, fused.x)
        assert same_bits(plain.normed, fused.normed)
        for one, other in zip(plain.outs, fused.outs, strict=True):
            assert same_bits(one.contiguous(), other.contiguous())


def test_products_whose_results_lie_apart_stay_apart() -> None:
    assert Layer(triton_ops(), wide=False).fused() == [Norm, Linear, Linear, Linear]


def test_weights_of_two_kinds_stay_apart() -> None:
    layer = Layer(triton_ops(), wide=True)
    layer.weights[1] = layer.ops.prepare(random_matrix(QuantFormat.Q4_1, (32, HIDDEN), seed=1))
    assert layer.fused() == [Norm, Linear, Linear, Linear]


def test_a_norm_of_something_else_than_the_sum_stays_a_norm() -> None:
    layer, other = Layer(triton_ops(), wide=True), torch.ones(ROWS, HIDDEN)
    recorder = Recorder()
    recorder.add(layer.x, layer.added, out=layer.x)
    recorder.rms_norm(other, layer.norm, 1e-5, out=layer.normed)
    recorder.add(layer.x, layer.added, out=other)
    recorder.rms_norm(other, layer.norm, 1e-5, out=layer.normed)
    assert [type(call) for call in fuse(recorder.calls)] == [Add, Norm, Add, Norm]


def test_what_is_joined_is_held_once() -> None:
    layer = Layer(triton_ops(), wide=True)
    layer.fused()
    storages = {weight.codes.untyped_storage().data_ptr() for weight in layer.weights}
    assert len(storages) == 1
    layer.fused()
    assert {weight.codes.untyped_storage().data_ptr() for weight in layer.weights} == storages
