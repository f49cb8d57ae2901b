"""A whole forward on the Triton executor: padded, recorded once, and equal to the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from chatrt_kernels.formats import QuantFormat
from chatrt_kernels.ops import ForwardInputs, KVLayer
from chatrt_kernels.reference import ReferenceOps
from chatrt_kernels.triton.ops import TritonOps
from chatrt_kernels.triton.program import Splits
from chatrt_kernels.triton.tiling import decode_tiling
from tests.chatrt_kernels.miniature import (
    MAX_POSITIONS,
    MAX_ROWS,
    NUM_LAYERS,
    SHAPE,
    Miniature,
    Recipe,
    Sequences,
    largest_inputs,
)
from tests.chatrt_kernels.ragged import poisoned_layer
from tests.chatrt_kernels.triton_support import CPU
from tests.chatrt_kernels.weights_support import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt_kernels.ops import Ops

EVEN_ROWS = 16
RECIPES = {
    "dense": Recipe(QuantFormat.F32, kv_dtype=torch.float32),
    "4 bits": Recipe(QuantFormat.Q4_1, kv_dtype=torch.float32),
    "8 bits, norms, biases": Recipe(
        QuantFormat.Q8_0, head_norms=True, biases=True, kv_dtype=torch.float32
    ),
}
# prompts of two, a step of each, a verify beside a decode, more rows than the bucket
STEPS = [([5, 9], [4, 13]), ([1, 1], [0, 1]), ([4, 1], [0, 1, 2, 3, 4]), ([30, 1], [29, 30])]


class Recorder:
    """Counts recordings, and launches op by op: a GPU's graphs on a CPU."""

    def __init__(self) -> None:
        self.num_captures = 0

    def __call__(self, launch: Callable[[], None]) -> Callable[[], None]:
        launch()
        self.num_captures += 1
        return launch


def pages() -> list[KVLayer]:
    return [poisoned_layer(SHAPE, torch.float32) for _ in range(NUM_LAYERS)]


def largest() -> ForwardInputs:
    return replace(largest_inputs(), num_positions=MAX_POSITIONS)


def run(ops: Ops, recipe: Recipe) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits and features of all steps."""
    mini, sequences = Miniature(ops, recipe), Sequences(2)
    program = ops.compile(mini.on(pages()), largest(), mini.outputs)
    results = []
    for counts, wanted in STEPS:
        inputs = sequences.step(counts, wanted, wanted[:1])
        program.run(inputs)
        results.append((mini.logits[: len(wanted)].clone(), mini.features[:1].clone()))
    return results


@pytest.mark.parametrize("name", RECIPES)
def test_every_step_equals_the_references(name: str) -> None:
    ours = run(TritonOps(torch.float32, CPU, even_rows=EVEN_ROWS), RECIPES[name])
    theirs = run(ReferenceOps(), RECIPES[name])
    for one, expected in zip(ours, theirs, strict=True):
        for got, wanted in zip(one, expected, strict=True):
            # sums of two layers whose numbers grow, each in another order
            largest = float(wanted.abs().max())
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5 * largest)


def test_a_row_has_the_same_bits_alone_verified_and_beside_others() -> None:
    recipe = RECIPES["4 bits"]
    ops = TritonOps(torch.float32, CPU, even_rows=EVEN_ROWS)
    mini, sequences = Miniature(ops, recipe), Sequences(1)
    program = ops.compile(mini.on(pages()), largest(), mini.outputs)
    program.run(sequences.step([20], [19]))
    verify = sequences.step([5], range(5))
    program.run(verify)
    together = mini.logits[:5].clone()
    for row in range(5):
        meta = verify.meta
        alone = replace(
            meta,
            token_ids=meta.token_ids[row : row + 1],
            positions=meta.positions[row : row + 1],
            write_slots=meta.write_slots[row : row + 1],
            q_start=torch.tensor([0, 1], dtype=torch.int32),
            kv_len=meta.kv_len - 4 + row,
        )
        none = torch.empty(0, dtype=torch.int64)
        program.run(ForwardInputs(alone, torch.tensor([0]), none))
        assert same_bits(mini.logits[:1], together[row : row + 1]), row


def test_all_is_recorded_before_the_first_step_and_nothing_behind_it() -> None:
    recorder = Recorder()
    ops = TritonOps(torch.float32, CPU, even_rows=EVEN_ROWS, capture=recorder)
    mini, sequences = Miniature(ops, RECIPES["dense"]), Sequences(2)
    program = ops.compile(mini.on(pages()), largest(), mini.outputs)
    assert recorder.num_captures == 3  # one, four and all sequences; no sequence has many splits
    for counts, wanted in STEPS:
        program.run(sequences.step(counts, wanted))
    assert recorder.num_captures == 3


def test_padding_writes_to_no_page() -> None:
    ops = TritonOps(torch.float32, CPU, even_rows=EVEN_ROWS)
    mini, sequences, cache = Miniature(ops, RECIPES["dense"]), Sequences(1), pages()
    program = ops.compile(mini.on(cache), largest(), mini.outputs)
    assert all(layer.keys.isnan().all() for layer in cache)  # recording wrote nothing
    program.run(sequences.step([3], [2]))
    written = cache[0].keys.isnan().logical_not().any(-1).any(-1)
    assert int(written.sum()) == 3


@pytest.mark.parametrize(
    ("max_positions", "counts"),
    [(304, [2]), (2048, [8]), (2049, [8, 9]), (32_768, [8, 32, 128])],
)
def test_recordings_are_for_few_splits_and_for_many(max_positions: int, counts: list[int]) -> None:
    splits = Splits(decode_tiling(max_positions), max_positions)
    assert splits.counts == counts
    assert splits.needed(1) == counts[0]
    assert splits.needed(None) == splits.needed(max_positions) == counts[-1]


def test_a_bucket_is_no_larger_than_a_step() -> None:
    ops = TritonOps(torch.float32, CPU, even_rows=10 * MAX_ROWS)
    mini, sequences = Miniature(ops, RECIPES["dense"]), Sequences(1)
    program = ops.compile(mini.on(pages()), largest(), mini.outputs)
    program.run(sequences.step([MAX_ROWS], [MAX_ROWS - 1]))
    assert mini.logits[0].isfinite().all()
