"""A forward on a GPU: passes of few rows are recorded once and replayed, others are launched.

    inputs ──▶ padded to the bucket (one kernel) ──▶ the recording for so many sequences and splits
           └─▶ more rows than the bucket: op by op

Knows: buckets, padding, recordings, that neighbours may be joined in these.
Does not know: kernels, what is computed.
Invariant: everything is recorded before `GpuProgram` is made; nothing is afterwards. Padded rows
write to no slot, belong to no sequence, and what is left of them means nothing.
Cost: two launches a step, and five small tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

import torch
import triton
import triton.language as tl

from chatrt_kernels.ops import Calls, ForwardInputs, RowMeta
from chatrt_kernels.triton.fuse import Recorder, fuse
from chatrt_kernels.triton.launch import OPTIONS, power_of_two, varying

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from chatrt_kernels.ops import Describe
    from chatrt_kernels.triton.fuse import Call
    from chatrt_kernels.triton.tiling import Tiling

Replay: TypeAlias = "Callable[[], None]"
Capture: TypeAlias = "Callable[[Callable[[], None]], Callable[[], None]]"
_PADDING_SLOT = -1
_SEQUENCES = (1, 4)  # for how many sequences there are recordings, besides all of the bucket
_LEAST_SPLITS = 8


def eager(launch: Replay) -> Replay:
    """Records nothing: every replay launches op by op. Where there is no GPU."""
    launch()  # as a recording does, which also compiles what is launched
    return launch


class CudaGraphs:
    """Records passes as CUDA graphs; all of them share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Replay) -> Replay:
        """The recording; `launch` runs once before, to compile and to let libraries settle."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            launch()
        return graph.replay


class RecordingOps(Calls, Protocol):
    """What a program needs of its executor."""

    even_rows: int
    device: torch.device

    def for_splits(self, num_splits: int) -> Self:
        """The executor for sequences of so many splits at most."""
        ...

    def launch(self, calls: Sequence[Call]) -> None:
        """Make the calls of a forward, fused ones too."""
        ...


class Splits:
    """For how many splits passes are recorded: each number four times the one before."""

    def __init__(self, tiling: Tiling, max_positions: int) -> None:
        self._tiling = tiling
        most, count = tiling.num_splits(max_positions), _LEAST_SPLITS
        self.counts: list[int] = []
        while count < most:
            self.counts.append(count)
            count *= 4
        self.counts.append(most)

    def needed(self, num_positions: int | None) -> int:
        """The number for a longest sequence of so many positions; None: of any length."""
        if num_positions is None:
            return self.counts[-1]
        num_splits = self._tiling.num_splits(num_positions)
        return next(count for count in self.counts if count >= num_splits)


@dataclass(frozen=True, slots=True)
class _Static:
    """The bucket's own inputs, which every recording reads."""

    inputs: ForwardInputs
    num_rows: int

    @classmethod
    def allocate(cls, num_rows: int, page_table: Tensor, device: torch.device) -> _Static:
        rows = torch.zeros(5, num_rows, dtype=torch.int64, device=device)
        rows[2] = _PADDING_SLOT
        meta = RowMeta(
            token_ids=rows[0],
            positions=rows[1],
            write_slots=rows[2],
            page_table=torch.zeros_like(page_table[:1]).expand(num_rows, -1).contiguous(),
            q_start=torch.zeros(num_rows + 1, dtype=torch.int32, device=device),
            kv_len=torch.zeros(num_rows, dtype=torch.int32, device=device),
        )
        return cls(ForwardInputs(meta, rows[3], rows[4]), num_rows)

    def of_sequences(self, num_sequences: int) -> ForwardInputs:
        """The same memory for fewer sequences."""
        meta = self.inputs.meta
        return ForwardInputs(
            RowMeta(
                meta.token_ids,
                meta.positions,
                meta.write_slots,
                meta.page_table[:num_sequences],
                meta.q_start[: num_sequences + 1],
                meta.kv_len[:num_sequences],
            ),
            self.inputs.logit_rows,
            self.inputs.feature_rows,
        )

    def fill(self, inputs: ForwardInputs) -> None:
        """Copy `inputs`, and pad what is behind them."""
        meta, own = inputs.meta, self.inputs.meta
        num_sequences, num_pages = meta.page_table.shape
        block = power_of_two(self.num_rows + 1)
        _pad_inputs[(1,)](
            *(meta.token_ids, meta.positions, meta.write_slots, meta.q_start, meta.kv_len),
            *(inputs.logit_rows, inputs.feature_rows),
            *(own.token_ids, own.positions, own.write_slots, own.q_start, own.kv_len),
            *(self.inputs.logit_rows, self.inputs.feature_rows),
            *(meta.token_ids.shape[0], num_sequences),
            *(inputs.logit_rows.shape[0], inputs.feature_rows.shape[0], self.num_rows),
            BLOCK=block,
            num_warps=1,
            **OPTIONS,
        )
        own.page_table[:num_sequences, :num_pages].copy_(meta.page_table, non_blocking=True)


class GpuProgram:
    """Implements `chatrt_kernels.ops.Program`; `ops` executes the calls of `describe`."""

    def __init__(
        self,
        describe: Describe,
        ops: RecordingOps,
        largest: ForwardInputs,
        *,
        splits: Splits,
        capture: Capture = eager,
    ) -> None:
        self._describe = describe
        self._ops = ops
        most_rows = min(ops.even_rows, largest.meta.token_ids.shape[0])
        self._static = _Static.allocate(most_rows, largest.meta.page_table, ops.device)
        self._sequences = sorted({*(n for n in _SEQUENCES if n < most_rows), most_rows})
        self._splits = splits
        self._replays = {
            (num_sequences, num_splits): self._record(num_sequences, num_splits, capture)
            for num_sequences in self._sequences
            for num_splits in splits.counts
        }

    def run(self, inputs: ForwardInputs) -> None:
        """All ops in order, on the rows of `inputs`."""
        num_rows = inputs.meta.token_ids.shape[0]
        if num_rows > self._static.num_rows:
            self._describe(self._ops, inputs)
            return
        self._static.fill(inputs)
        num_sequences = inputs.meta.kv_len.shape[0]
        sequences = next(count for count in self._sequences if count >= num_sequences)
        self._replays[sequences, self._splits.needed(inputs.num_positions)]()

    def profile(self, inputs: ForwardInputs) -> None:
        """None: what a device runs in its own time cannot be told apart from here."""

    def _record(self, num_sequences: int, num_splits: int, capture: Capture) -> Replay:
        recorder = Recorder()
        self._describe(recorder, self._static.of_sequences(num_sequences))
        calls = fuse(recorder.calls)
        return capture(partial(self._ops.for_splits(num_splits).launch, calls))


@triton.jit
def _pad(source_ptr, target_ptr, num, size, padding, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b_values = tl.load(source_ptr + o, mask=o < num, other=padding)
    tl.store(target_ptr + o, b_values, mask=o < size)


@triton.jit(**varying("num_rows", "num_sequences", "num_logits", "num_features"))
def _pad_inputs(
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    q_start_ptr,
    kv_len_ptr,
    logit_rows_ptr,
    feature_rows_ptr,
    own_token_ids_ptr,
    own_positions_ptr,
    own_slots_ptr,
    own_q_start_ptr,
    own_kv_len_ptr,
    own_logit_rows_ptr,
    own_feature_rows_ptr,
    num_rows,
    num_sequences,
    num_logits,
    num_features,
    size,
    BLOCK: tl.constexpr,
):
    _pad(token_ids_ptr, own_token_ids_ptr, num_rows, size, 0, BLOCK)
    _pad(positions_ptr, own_positions_ptr, num_rows, size, 0, BLOCK)
    _pad(slots_ptr, own_slots_ptr, num_rows, size, -1, BLOCK)
    _pad(logit_rows_ptr, own_logit_rows_ptr, num_logits, size, 0, BLOCK)
    _pad(feature_rows_ptr, own_feature_rows_ptr, num_features, size, 0, BLOCK)
    _pad(kv_len_ptr, own_kv_len_ptr, num_sequences, size, 0, BLOCK)
    # sequences that are not there begin and end where the last one ends
    b_end = tl.load(q_start_ptr + num_sequences)
    _pad(q_start_ptr, own_q_start_ptr, num_sequences + 1, size + 1, b_end, BLOCK)
