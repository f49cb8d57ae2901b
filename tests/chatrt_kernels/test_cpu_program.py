"""Recorded forwards of the native kernels: replayed on any pool, the same bits always."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt_kernels.cpu.binding import NativeLibrary, ThreadPool
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.formats import QuantFormat
from chatrt_kernels.ops import DirectProgram
from tests.chatrt_kernels.miniature import (
    HIDDEN,
    RECIPES,
    VOCAB,
    Miniature,
    Recipe,
    Sequences,
    largest_inputs,
)
from tests.chatrt_kernels.weights_support import assert_same_bits, random_matrix, same_bits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from chatrt_kernels.ops import KVLayer, Program

# rows of each of three sequences, then the rows whose logits and features are wanted
STEPS: list[tuple[list[int], list[int], list[int]]] = [
    ([7, 1, 40], [], []),
    ([1, 1, 1], [2, 0, 1], [1]),
    ([5, 0, 3], [7, 0], [0, 7, 3]),
    ([0, 17, 0], [16], list(range(17))),
    ([48, 0, 0], [47], []),
    ([48, 0, 0], [], [47]),
    ([48, 0, 0], [0], []),
    ([1, 1, 0], [0, 1, 0], []),
    ([0, 0, 1], [0], [0]),
]


@pytest.fixture(scope="module")
def library(native_library: Path) -> NativeLibrary:
    return NativeLibrary(native_library)


@pytest.fixture(scope="module")
def own_library(machine_library: Path) -> NativeLibrary:
    return NativeLibrary(machine_library)


def run_steps(model: Miniature, program: Program, kv: Sequence[KVLayer]) -> list[Tensor]:
    """Logits and features of every step, then the contents of the cache."""
    results: list[Tensor] = []
    sequences = Sequences(3)
    for counts, logit_rows, feature_rows in STEPS:
        for output in model.outputs:
            output.fill_(torch.nan)
        program.run(sequences.step(counts, logit_rows, feature_rows))
        results.append(model.logits[: len(logit_rows)].clone())
        results.append(model.features[: len(feature_rows)].clone())
        assert model.logits[len(logit_rows) :].isnan().all()
        assert model.features[len(feature_rows) :].isnan().all()
    return [*results, *(pages for layer in kv for pages in (layer.keys, layer.values))]


def recorded(ops: NativeOps, recipe: Recipe) -> list[Tensor]:
    model = Miniature(ops, recipe)
    kv = model.cache()
    program = ops.compile(model.on(kv), largest_inputs(), model.outputs)
    return run_steps(model, program, kv)


def called_one_by_one(ops: NativeOps, recipe: Recipe) -> list[Tensor]:
    model = Miniature(ops, recipe)
    kv = model.cache()
    return run_steps(model, DirectProgram(model.on(kv), ops), kv)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recording_gives_the_bits_of_its_calls_one_by_one_in_every_later_step(
    library: NativeLibrary, name: str
) -> None:
    direct = called_one_by_one(NativeOps(library, 1), RECIPES[name])
    assert not any(result.isnan().any() for result in direct[: 2 * len(STEPS)])
    for num_threads in (1, 2, 5):
        assert_same_bits(recorded(NativeOps(library, num_threads), RECIPES[name]), direct)


def test_a_profile_is_a_run_whose_families_sum_to_its_time(own_library: NativeLibrary) -> None:
    ops = NativeOps(own_library, 2)
    model, other = Miniature(ops, Recipe()), Miniature(ops, Recipe())
    program = ops.compile(model.on(model.cache()), largest_inputs(), model.outputs)
    plain = ops.compile(other.on(other.cache()), largest_inputs(), other.outputs)
    inputs = Sequences(1).step([48], list(range(48)))
    shares = []
    for _ in range(20):
        start = time.perf_counter_ns()
        families = program.profile(inputs)
        wall_ms = (time.perf_counter_ns() - start) / 1e6
        assert set(families) == {
            "embed",
            "norm",
            "linear",
            "rope_and_kv",
            "attention",
            "gather",
        }
        assert min(families.values()) >= 0
        assert 0 < sum(families.values()) <= wall_ms
        shares.append(sum(families.values()) / wall_ms)
    plain.run(inputs)

    # the rest is what Python does around the call; the machine may be busy in single runs
    assert max(shares) > 0.5
    assert same_bits(model.logits, other.logits)


def test_threads_of_python_may_call_one_executor_at_once(own_library: NativeLibrary) -> None:
    ops = NativeOps(own_library, 2)
    weight = ops.prepare(random_matrix(QuantFormat.Q4_K, (100, HIDDEN), seed=1))
    rows = torch.randn(4, 9, HIDDEN, generator=torch.Generator().manual_seed(3))
    expected = torch.empty(4, 9, 100)
    for x, out in zip(rows, expected, strict=True):
        ops.linear(x, weight, None, out=out)
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(100):
            out = torch.full((9, 100), torch.nan)
            ops.linear(rows[index], weight, None, out=out)
            if not same_bits(out, expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_programs_of_one_executor_share_its_threads(own_library: NativeLibrary) -> None:
    ops = NativeOps(own_library, 2)
    models = [Miniature(ops, recipe) for recipe in RECIPES.values()]
    programs = [ops.compile(m.on(m.cache()), largest_inputs(), m.outputs) for m in models]
    inputs = Sequences(1).step([9], [8, 0])
    first = []
    for model, program in zip(models, programs, strict=True):
        program.run(inputs)
        first.append(model.logits[:2].clone())
    for _ in range(20):
        for program in programs:
            program.run(inputs)
    assert_same_bits([model.logits[:2] for model in models], first)


def test_two_hundred_pools_and_programs_come_and_go(own_library: NativeLibrary) -> None:
    matrix = random_matrix(QuantFormat.Q8_0, (VOCAB, HIDDEN), seed=1)
    weight = NativeOps(own_library, 1).prepare(matrix)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(4))
    results = []
    for cycle in range(200):
        ops = NativeOps(own_library, 1 + cycle % 5)
        out = torch.full((3, VOCAB), torch.nan)
        ops.linear(x, weight, None, out=out)
        results.append(out)
        if cycle % 3 == 0:
            ThreadPool(own_library, 3)  # never used, gone at once
        del ops
    gc.collect()
    assert_same_bits(results, [results[0]] * len(results))


def test_a_program_outlives_the_executor_that_made_it(own_library: NativeLibrary) -> None:
    ops = NativeOps(own_library, 3)
    model = Miniature(ops, Recipe())
    program = ops.compile(model.on(model.cache()), largest_inputs(), model.outputs)
    inputs = Sequences(1).step([9], [8])
    program.run(inputs)
    expected = model.logits[:1].clone()
    del ops
    gc.collect()
    model.logits.fill_(torch.nan)

    program.run(inputs)

    assert same_bits(model.logits[:1], expected)


def test_threads_that_slept_long_wake_for_the_next_step(own_library: NativeLibrary) -> None:
    ops = NativeOps(own_library, 5)
    model = Miniature(ops, Recipe())
    program = ops.compile(model.on(model.cache()), largest_inputs(), model.outputs)
    inputs = Sequences(1).step([9], [8])
    program.run(inputs)
    expected = model.logits[:1].clone()
    for pause_s in (0.0002, 0.0005, 0.002, 0.02):
        for _ in range(5):
            time.sleep(pause_s)
            program.run(inputs)
            assert same_bits(model.logits[:1], expected)
