"""How long forwards take: which ones are timed, and the round-robin that times them.

Knows: the target's forward, the executor's read probe and its profile, a clock.
Does not know: turns, tables, what the times mean.
Invariant: every round times each case once, from another one on each time, so that a machine that
slows down slows all of them; what a forward reads of the KV cache has been written by a forward.
Cost: a round reads the weights once for each case, and the probe's buffer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from chatrt.batch import NO_SAMPLES, BatchRows
from chatrt.bench.busy import busy_process
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from chatrt.batch import Batch
    from chatrt.engine import Target
    from chatrt.kvcache import KVCache
    from chatrt_kernels.ops import Ops

NATIVE_PROBE = "native"
TORCH_PROBE = "torch sum"
NUM_WARM_UP_ROUNDS = 2
NUM_CONTENDED_ROUNDS = 2
_PROBE_BYTES = 256 * 2**20
_NUM_SEQUENCES = 4
_MAX_LONG_ROUNDS = 5  # for prefill and profiles: long forwards vary less


@runtime_checkable
class ReadProbe(Protocol):
    """An executor that can measure how fast its own threads read memory."""

    def read_bandwidth_gbs(self) -> float | None:
        """10⁹ bytes a second of one pass over a buffer that no cache holds; None if it cannot."""
        ...


@runtime_checkable
class Profiles(Protocol):
    """A decoder that can time the parts of a forward."""

    def profile(self, batch: Batch, kv: KVCache) -> Mapping[str, float] | None:
        """Run a forward and return milliseconds by op family; None where the executor cannot."""
        ...


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What is timed: rows of a step, lengths of a prefill and contexts, in tokens.

    One row at context 0 is always among it: the other figures are relative to it.
    """

    rows: tuple[int, ...] = (1, 2, 4, 5, 8, 16)
    prefill: tuple[int, ...] = (128, 512, 2048)
    contexts: tuple[int, ...] = (0, 1024, 4096)
    repeats: int = 30
    seed: int = 0

    @property
    def long_repeats(self) -> int:
        """Samples of each prefill and of each profile."""
        return min(self.repeats, _MAX_LONG_ROUNDS)


@dataclass(frozen=True, slots=True)
class Room:
    """What a step and a sequence of the target hold."""

    max_rows: int
    max_sequences: int
    max_context: int  # tokens


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that is timed: a forward, or those of a prefill, chunk by chunk.

    `kind` is "rows", "sequences", "context" or "prefill", `size` how many of it. A forward is the
    rows of each of its sequences.
    """

    kind: str
    size: int
    forwards: tuple[tuple[BatchRows, ...], ...]

    @property
    def name(self) -> str:
        """Such as `rows 5`."""
        return f"{self.kind} {self.size}"


@dataclass(slots=True)
class StepSamples:
    """Raw samples in the order in which they were taken; what is missing was not measured.

    `forward_ms` goes by kind, then size; `stage_ms` by a case's name, then op family; `turn_ms` by
    sampling: what a step of the engine takes beside its forward.
    """

    forward_ms: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    read_bandwidth_gbs: list[float] = field(default_factory=list)
    stage_ms: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    turn_ms: dict[str, list[float]] = field(default_factory=dict)
    quiet_ms: list[float] = field(default_factory=list)
    contended_ms: list[float] = field(default_factory=list)


class StepBench:
    """Times forwards of a target that nobody else uses: it writes to the pages `[0, …)`.

    Args:
        target: The model with its cache.
        ops: The executor of its decoder.
        options: What is timed; contexts and prefills are clipped to the room.
        room: What the target holds.
        clock: Nanoseconds, monotonic.

    Raises:
        InvalidValue: More rows are asked for than a step or a sequence holds.
    """

    def __init__(
        self,
        target: Target,
        ops: Ops,
        options: StepOptions,
        room: Room,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.samples = StepSamples()
        self.options = options
        self._target = target
        self._ops = ops
        self._clock = clock
        self._device = target.kv.data.device
        self._probe_buffer: torch.Tensor | None = None
        cases = _Cases(target, room, options)
        self._history = cases.prefill(cases.longest)
        self._decode = cases.rows(1)
        self._short = [
            self._decode,
            *(cases.rows(count) for count in _ordered(options.rows) if count > 1),
            *cases.sequences(),
            *(cases.context(length) for length in cases.clipped(options.contexts)),
        ]
        self._long = [cases.prefill(length) for length in cases.clipped(options.prefill)]

    @property
    def num_rounds(self) -> int:
        """Rounds of `run`: how often it calls `advance`."""
        return NUM_WARM_UP_ROUNDS + self.options.repeats + 2 * self.options.long_repeats

    @property
    def read_probe(self) -> str:
        """Which probe the bandwidth is measured with."""
        return TORCH_PROBE if self._probe_buffer is not None else NATIVE_PROBE

    def run(self, advance: Callable[[], None]) -> None:
        """Take all samples of forwards; `advance` is called behind each round."""
        self._forward_ms(self._history)  # the rows that contexts read
        for _ in range(NUM_WARM_UP_ROUNDS):
            for case in (*self._short, *self._long[:1]):
                self._forward_ms(case)
            self._read_gbs()
            advance()
        for index in range(self.options.repeats):
            self.samples.read_bandwidth_gbs.append(self._read_gbs())
            self._time(self._short, index)
            advance()
        for index in range(self.options.long_repeats):
            self._time(self._long, index)
            advance()
        for _ in range(self.options.long_repeats):
            self._profile()
            advance()

    def run_contended(self, advance: Callable[[], None], *, block_ms: float = 1000.0) -> None:
        """Decode in turns alone and beside a busy process, each time for `block_ms` in all."""
        for _ in range(NUM_CONTENDED_ROUNDS):
            self._decode_for(block_ms, self.samples.quiet_ms)
            with busy_process():
                self._decode_for(block_ms, self.samples.contended_ms)
            advance()

    def _decode_for(self, block_ms: float, samples: list[float]) -> None:
        self._forward_ms(self._decode)
        total_ms = 0.0
        while total_ms < block_ms:
            samples.append(self._forward_ms(self._decode))
            total_ms += samples[-1]

    def _time(self, cases: Sequence[Case], index: int) -> None:
        first = index % len(cases) if cases else 0
        for case in (*cases[first:], *cases[:first]):
            by_size = self.samples.forward_ms.setdefault(case.kind, {})
            by_size.setdefault(case.size, []).append(self._forward_ms(case))

    def _forward_ms(self, case: Case) -> float:
        """Of all forwards of the case together; laying the rows out is not in it."""
        total_ns = 0
        for rows in case.forwards:
            batch = self._target.batches.build(rows)
            started_ns = self._clock()
            self._target.decoder.forward(batch, self._target.kv)
            self._synchronize()
            total_ns += self._clock() - started_ns
        return total_ns / 1e6

    def _profile(self) -> None:
        decoder = self._target.decoder
        if not isinstance(decoder, Profiles):
            return
        for case in (*self._short, *self._long):
            totals: dict[str, float] = {}
            for rows in case.forwards:
                parts_ms = decoder.profile(self._target.batches.build(rows), self._target.kv)
                for family, part_ms in (parts_ms or {}).items():
                    totals[family] = totals.get(family, 0.0) + part_ms
            for family, total_ms in totals.items():
                by_family = self.samples.stage_ms.setdefault(case.name, {})
                by_family.setdefault(family, []).append(total_ms)

    def _read_gbs(self) -> float:
        if self._probe_buffer is None and isinstance(self._ops, ReadProbe):
            measured = self._ops.read_bandwidth_gbs()
            if measured is not None:
                return measured
        if self._probe_buffer is None:
            self._probe_buffer = torch.ones(_PROBE_BYTES // 4, device=self._device)
        started_ns = self._clock()
        self._probe_buffer.sum()
        self._synchronize()
        return self._probe_buffer.nbytes / max(self._clock() - started_ns, 1)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Cases:
    """Makes cases.

    Position i of every sequence has the same token, so writing its row again changes nothing.
    """

    def __init__(self, target: Target, room: Room, options: StepOptions) -> None:
        self._page_size = target.kv.page_size
        self._room = room
        self.longest = min(room.max_context, 1 + max((0, *options.contexts, *options.prefill)))
        most_rows = min(room.max_rows, room.max_context)
        if max(options.rows) > most_rows:
            raise InvalidValue(
                f"--rows has {max(options.rows)}, a step holds {most_rows} rows of a sequence"
            )
        most_tokens = max(self.longest, *options.rows)
        self._token_ids = Random(options.seed).choices(range(target.vocab_size), k=most_tokens)

    def clipped(self, lengths: Sequence[int]) -> list[int]:
        """The lengths above 0, each once, that leave a position for one more row."""
        most = self._room.max_context - 1
        return _ordered(min(length, most) for length in lengths if min(length, most) > 0)

    def rows(self, count: int) -> Case:
        """As verification has them: of one sequence, at its start, all with logits."""
        return Case("rows", count, ((self._sequence(0, count, range(count)),),))

    def sequences(self) -> list[Case]:
        """One row for each of several sequences, which have a page each; none without room."""
        room = self._room
        num_pages = room.max_context // self._page_size
        count = min(_NUM_SEQUENCES, room.max_rows, room.max_sequences, num_pages)
        if count < _NUM_SEQUENCES:
            return []
        rows = (BatchRows(self._token_ids[:1], 0, [page], range(1)) for page in range(count))
        return [Case("sequences", count, (tuple(rows),))]

    def context(self, length: int) -> Case:
        """One row behind so many positions."""
        return Case("context", length, ((self._sequence(length, 1, range(1)),),))

    def prefill(self, length: int) -> Case:
        """A prompt in chunks as large as a step allows; logits of the last row only."""
        borders = [*range(0, length, self._room.max_rows), length]
        forwards = []
        for start, stop in pairwise(borders):
            count = stop - start
            wanted = range(count - 1, count) if stop == length else NO_SAMPLES
            forwards.append((self._sequence(start, count, wanted),))
        return Case("prefill", length, tuple(forwards))

    def _sequence(self, start: int, count: int, sample_rows: range) -> BatchRows:
        num_pages = -(-(start + count) // self._page_size)
        token_ids = self._token_ids[start : start + count]
        return BatchRows(token_ids, start, range(num_pages), sample_rows)


def _ordered(numbers: Iterable[int]) -> list[int]:
    return sorted(set(numbers))
