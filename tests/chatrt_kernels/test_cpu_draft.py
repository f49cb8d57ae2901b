"""A draft head in miniature: what its two programs need of the ops besides a decoder's.

`follow` norms features into columns of a wide buffer, leaves products in rows of a buffer that has
more of them, gathers from there, and writes keys and values without any queries. `step` drafts:
a layer, then the rows of a few tokens out of the target's embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import pytest
import torch

from chatrt_kernels.cpu.binding import NativeLibrary
from chatrt_kernels.cpu.ops import NativeOps
from chatrt_kernels.formats import QuantFormat
from chatrt_kernels.ops import DirectProgram, ForwardInputs, KVLayer
from chatrt_kernels.reference import ReferenceOps
from tests.chatrt_kernels.miniature import (
    FEATURES,
    HIDDEN,
    KV_FEATURES,
    MATRICES,
    MAX_POSITIONS,
    MAX_ROWS,
    SHAPE,
    VOCAB,
    WIDE,
)
from tests.chatrt_kernels.ragged import page_tables, poisoned_layer, row_meta
from tests.chatrt_kernels.test_cpu_ops import by_heads
from tests.chatrt_kernels.tolerance import assert_agree
from tests.chatrt_kernels.weights_support import assert_same_bits, random_matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from chatrt_kernels.ops import Calls, Describe, Ops, Program, RowMeta, Weight

    Make: TypeAlias = Callable[[Ops, Describe, list[Tensor]], Program]

NUM_LAYERS = 3  # whose features it reads
NUM_SLOTS = 4
NUM_KEPT = 21
EPS = 1e-5
LENGTHS = (37, 150)  # of two sequences
NUM_DRAFTS = 4

NO_ROWS = torch.empty(0, dtype=torch.int64)


class Head:
    """Weights and static buffers, poisoned with NaN; rows start from `bases`."""

    def __init__(self, ops: Ops, quant_format: QuantFormat, kv: KVLayer) -> None:
        def prepare(seed: int, shape: tuple[int, int], rows: Tensor | None = None) -> Weight:
            matrix = random_matrix(quant_format, shape, seed)
            return ops.prepare(matrix, sensitive=rows is not None, first_rows=rows)

        generator = torch.Generator().manual_seed(5)
        self.kept_ids = torch.randperm(VOCAB, generator=generator)[:NUM_KEPT]
        self.embedding = prepare(1, (VOCAB, HIDDEN), self.kept_ids)
        self.kept = ops.restrict(self.embedding, self.kept_ids)
        self.from_features = prepare(2, (HIDDEN, NUM_LAYERS * HIDDEN))
        self.from_embedding = prepare(3, (HIDDEN, HIDDEN))
        self.from_own = prepare(4, (HIDDEN, HIDDEN))
        self.layer = {name: prepare(9 + i, MATRICES[name]) for i, name in enumerate(MATRICES)}
        self.rope = torch.rand(MAX_POSITIONS, SHAPE.head_dim, generator=generator)
        self.ones, self.norm = torch.ones(HIDDEN), torch.rand(HIDDEN, generator=generator) + 0.5
        self.kv = kv
        self.features = torch.full((NUM_LAYERS, MAX_ROWS, HIDDEN), torch.nan)
        self.wide = torch.full((MAX_ROWS, NUM_LAYERS * HIDDEN), torch.nan)
        self.bases = torch.full((NUM_SLOTS + MAX_ROWS, HIDDEN), torch.nan)
        self.bases[:NUM_SLOTS] = torch.randn(NUM_SLOTS, HIDDEN, generator=generator)
        self.x, self.normed, self.projected = torch.full((3, MAX_ROWS, HIDDEN), torch.nan)
        self.q, self.turned, self.attended = torch.full((3, MAX_ROWS, FEATURES), torch.nan)
        self.k, self.v = torch.full((2, MAX_ROWS, KV_FEATURES), torch.nan)
        self.gate, self.up, self.activated = torch.full((3, MAX_ROWS, WIDE), torch.nan)
        self.logits = torch.full((MAX_ROWS, NUM_KEPT), torch.nan)

    def follow(self, ops: Calls, inputs: ForwardInputs) -> None:
        """Keys and values of rows whose features are known."""
        num_rows = inputs.meta.token_ids.shape[0]
        wide = self.wide[:num_rows]
        for index, feature in enumerate(self.features):
            part = wide[:, index * HIDDEN : (index + 1) * HIDDEN]
            ops.rms_norm(feature[:num_rows], self.ones, EPS, out=part)
        following = self.bases[NUM_SLOTS : NUM_SLOTS + num_rows]
        ops.linear(wide, self.from_features, None, out=following)
        x, normed = self._start(ops, inputs), self.normed[:num_rows]
        ops.rms_norm(x, self.norm, EPS, out=normed)
        k, v, none = self.k[:num_rows], self.v[:num_rows], self.q[:num_rows, :0]
        ops.linear(normed, self.layer["k"], None, out=k)
        ops.linear(normed, self.layer["v"], None, out=v)
        ops.rope_and_write_kv(none, k, v, self.rope, inputs.meta, self.kv, out=none)

    def step(self, ops: Calls, inputs: ForwardInputs) -> None:
        """Logits of rows, and what their successors start from."""
        meta, num_rows = inputs.meta, inputs.meta.token_ids.shape[0]
        x, normed, projected = self._start(ops, inputs), *self._first(num_rows, "normed projected")
        q, k, v, turned, attended = self._first(num_rows, "q k v turned attended")
        gate, up, activated = self._first(num_rows, "gate up activated")
        ops.rms_norm(x, self.norm, EPS, out=normed)
        for name, out in (("q", q), ("k", k), ("v", v)):
            ops.linear(normed, self.layer[name], None, out=out)
        ops.rope_and_write_kv(q, k, v, self.rope, meta, self.kv, out=turned)
        ops.paged_attention(turned, meta, self.kv, SHAPE.head_dim**-0.5, out=attended)
        ops.linear(attended, self.layer["output"], None, out=projected)
        ops.add(x, projected, out=x)
        ops.rms_norm(x, self.norm, EPS, out=normed)
        ops.linear(normed, self.layer["gate"], None, out=gate)
        ops.linear(normed, self.layer["up"], None, out=up)
        ops.swiglu(gate, up, out=activated)
        ops.linear(activated, self.layer["down"], None, out=projected)
        ops.add(x, projected, out=x)
        ops.rms_norm(x, self.norm, EPS, out=normed)
        ops.linear(normed, self.kept, None, out=self.logits[:num_rows])
        following = self.bases[NUM_SLOTS : NUM_SLOTS + num_rows]
        ops.linear(normed, self.from_own, None, out=following)

    def _start(self, ops: Calls, inputs: ForwardInputs) -> Tensor:
        x, normed, projected = self._first(inputs.meta.token_ids.shape[0], "x normed projected")
        ops.embed(self.embedding, inputs.meta.token_ids, out=normed)
        ops.rms_norm(normed, self.ones, EPS, out=normed)
        ops.linear(normed, self.from_embedding, None, out=x)
        ops.gather_rows(self.bases, inputs.feature_rows, out=projected)
        ops.add(x, projected, out=x)
        return x

    def _first(self, num_rows: int, names: str) -> list[Tensor]:
        return [getattr(self, name)[:num_rows] for name in names.split()]


@dataclass(frozen=True)
class Piece:
    """Positions `[start, end)` of one of the sequences."""

    sequence: int
    start: int
    end: int


class Sequences:
    """Two sequences' tokens and features, on pages of their own, with drafts behind them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(31)
        self._tables = page_tables([(0, MAX_POSITIONS - 16)] * 2, SHAPE, generator)
        size = max(LENGTHS) + NUM_DRAFTS
        self._token_ids = torch.randint(0, VOCAB, (2, size), generator=generator)
        self._features = torch.randn(NUM_LAYERS, 2, size, HIDDEN, generator=generator)

    def meta(self, pieces: Sequence[Piece]) -> RowMeta:
        """A pass over the pieces."""
        sizes = [(piece.end - piece.start, piece.end) for piece in pieces]
        tables = [self._tables[piece.sequence] for piece in pieces]
        meta = row_meta(sizes, tables, SHAPE.page_size)
        tokens = [self._token_ids[piece.sequence, piece.start : piece.end] for piece in pieces]
        meta.token_ids.copy_(torch.cat(tokens))
        return meta

    def features(self, pieces: Sequence[Piece]) -> Tensor:
        """Of the pieces' rows, `[layers, rows, hidden]`."""
        parts = [self._features[:, p.sequence, p.start : p.end] for p in pieces]
        return torch.cat(parts, dim=1)


def recorded(ops: Ops, describe: Describe, outputs: list[Tensor]) -> Program:
    meta = row_meta([(MAX_ROWS, MAX_POSITIONS - 16)], [range(MAX_POSITIONS // 16)], 16)
    return ops.compile(describe, ForwardInputs(meta, NO_ROWS, torch.arange(MAX_ROWS)), outputs)


def one_by_one(ops: Ops, describe: Describe, outputs: list[Tensor]) -> Program:
    del outputs
    return DirectProgram(describe, ops)


class Runner:
    """A head with its programs, and what the next row of each sequence starts from."""

    def __init__(self, head: Head, ops: Ops, make: Make) -> None:
        self.head = head
        self._sequences = Sequences()
        self._follow = make(ops, head.follow, [head.bases])
        self._step = make(ops, head.step, [head.bases, head.logits])

    def follow(self, pieces: Sequence[Piece]) -> None:
        features = self._sequences.features(pieces)
        self.head.features[:, : features.shape[1]] = features
        self._run(self._follow, pieces)

    def draft(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Logits of each piece's row; the next draft starts from it."""
        self.head.logits.fill_(torch.nan)
        self._run(self._step, pieces)
        assert self.head.logits[len(pieces) :].isnan().all()
        return list(self.head.logits[: len(pieces)].clone())

    def _run(self, program: Program, pieces: Sequence[Piece]) -> None:
        base_rows: list[int] = []
        ends: dict[int, int] = {}
        for piece in pieces:
            following = NUM_SLOTS + len(base_rows)
            count = piece.end - piece.start
            base_rows.append(1 + piece.sequence if piece.start else 0)
            base_rows.extend(range(following, following + count - 1))
            ends[piece.sequence] = following + count - 1
        feature_rows = torch.tensor(base_rows)
        program.run(ForwardInputs(self._sequences.meta(pieces), NO_ROWS, feature_rows))
        for sequence, row in ends.items():
            self.head.bases[1 + sequence] = self.head.bases[row]


def results(runner: Runner, passes: Sequence[Sequence[Piece]], *, together: bool) -> list[Tensor]:
    """Logits of all drafts, then the contents of the cache."""
    for pieces in passes:
        runner.follow(pieces)
    logits = []
    for i in range(NUM_DRAFTS):
        drafts = [Piece(s, length + i, length + i + 1) for s, length in enumerate(LENGTHS)]
        if together:
            logits += runner.draft(drafts)
        else:
            logits += [logits_ for draft in drafts for logits_ in runner.draft([draft])]
    return [*logits, runner.head.kv.keys, runner.head.kv.values]


def chunked(size: int) -> list[list[Piece]]:
    """Both sequences, one after the other, in passes of one piece."""
    return [
        [Piece(sequence, start, min(start + size, length))]
        for sequence, length in enumerate(LENGTHS)
        for start in range(0, length, size)
    ]


SIDE_BY_SIDE = [
    [Piece(0, 0, 5), Piece(1, 0, 43)],
    [Piece(1, 43, 75), Piece(0, 5, 21)],
    [Piece(0, 21, 22), Piece(1, 75, 76)],
    [Piece(1, 76, 109), Piece(0, 22, 37)],
    [Piece(1, 109, 150)],
]


def native_head(ops: NativeOps, quant_format: QuantFormat, dtype: torch.dtype) -> Head:
    return Head(ops, quant_format, by_heads(poisoned_layer(SHAPE, dtype)))


@pytest.fixture(scope="module")
def library(native_library: Path) -> NativeLibrary:
    return NativeLibrary(native_library)


@pytest.mark.parametrize("quant_format", [QuantFormat.Q8_0, QuantFormat.Q4_1, QuantFormat.BF16])
def test_drafts_have_the_same_bits_recorded_or_not_chunked_or_not_alone_or_not(
    library: NativeLibrary, quant_format: QuantFormat
) -> None:
    def found(
        num_threads: int, make: Make, passes: list[list[Piece]], together: bool
    ) -> list[Tensor]:
        ops = NativeOps(library, num_threads)
        runner = Runner(native_head(ops, quant_format, torch.float16), ops, make)
        return results(runner, passes, together=together)

    expected = found(1, one_by_one, chunked(48), together=True)
    assert not any(logits.isnan().any() for logits in expected[:-2])
    assert_same_bits(found(1, recorded, chunked(48), together=True), expected)
    assert_same_bits(found(2, recorded, SIDE_BY_SIDE, together=True), expected)
    assert_same_bits(found(5, recorded, chunked(7), together=False), expected)
    assert_same_bits(found(2, one_by_one, SIDE_BY_SIDE, together=False), expected)


def test_drafts_of_float_weights_are_the_references(library: NativeLibrary) -> None:
    reference, native = ReferenceOps(), NativeOps(library, 2)
    pages = poisoned_layer(SHAPE, torch.float32)
    runners = [
        Runner(Head(reference, QuantFormat.F32, pages), reference, recorded),
        Runner(native_head(native, QuantFormat.F32, torch.float32), native, recorded),
    ]
    found = [results(runner, SIDE_BY_SIDE, together=True) for runner in runners]
    for expected, one in zip(*found, strict=True):
        assert torch.equal(one.isnan(), expected.isnan())
        # sums over HIDDEN products of numbers of order 1
        assert_agree(one.nan_to_num() / HIDDEN**0.5, expected.nan_to_num() / HIDDEN**0.5)


def test_rows_beside_the_kept_ones_cost_a_head_no_memory(library: NativeLibrary) -> None:
    head = native_head(NativeOps(library, 1), QuantFormat.Q8_0, torch.float16)
    assert head.kept.shape == (NUM_KEPT, HIDDEN)
    assert head.kept.num_bytes == 2 * 4 * NUM_KEPT  # where each lies, and which lies where
