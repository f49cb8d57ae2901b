"""One ragged batch: sequences of different lengths laid out as rows for a single forward.

Knows: token ids, positions, page ids, and the integer tensors that ops read.
Does not know: sessions, plans, models.
Invariant: the tensors are allocated once and refilled, so a recorded forward can be replayed; a
`Batch` is therefore valid until the next `build`.
Cost: 10 µs for a row or a few, a decode step's, and about 40 µs for 8 sequences with 32 pages each;
linear in rows and page-table entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from chatrt_kernels.ops import RowMeta

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_SAMPLES = range(0)
# Up to so many rows, plain loops beat the fixed cost of array operations.
_FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of one sequence.

    They hold positions `[start, start + len(token_ids))`; `page_ids` is the sequence's page table
    from position 0 and covers them. `sample_rows` are those of the rows, counted from the first of
    them, whose logits are wanted.
    """

    token_ids: Sequence[int]
    start: int
    page_ids: Sequence[int]
    sample_rows: range = NO_SAMPLES


@dataclass(frozen=True, slots=True)
class Batch:
    """What a forward reads; the tensors are views of the builder's, valid until its next `build`.

    `logit_rows` int64 `[num_logit_rows]` are the rows whose logits are wanted;
    `logit_ranges[s]` says which of these belong to sequence s. The longest sequence has
    `num_positions` positions.
    """

    meta: RowMeta
    logit_rows: torch.Tensor
    logit_ranges: tuple[range, ...]
    num_positions: int

    @property
    def num_rows(self) -> int:
        """Rows of all sequences."""
        return self.meta.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        """Sequences that have rows here."""
        return self.meta.kv_len.shape[0]


class BatchBuilder:
    """Fills the same integer tensors every step.

    Device tensors are copied from a page-locked twin on GPUs and are the twin itself on a CPU.
    """

    def __init__(
        self,
        max_rows: int,
        max_sequences: int,
        max_pages_per_sequence: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self._page_size = page_size
        pinned = device.type == "cuda"
        # row values: token ids, positions, write slots, logit rows
        self._host_rows = torch.zeros(4, max_rows, dtype=torch.int64, pin_memory=pinned)
        self._host_pages = torch.zeros(
            max_sequences, max_pages_per_sequence, dtype=torch.int32, pin_memory=pinned
        )
        # bounds: q_start, then kv_len
        self._host_bounds = torch.zeros(2 * max_sequences + 1, dtype=torch.int32, pin_memory=pinned)
        self._twins = [
            (host, host if device.type == "cpu" else host.to(device))
            for host in (self._host_rows, self._host_pages, self._host_bounds)
        ]
        self._rows, self._pages, self._bounds = (
            host.numpy() for host in (self._host_rows, self._host_pages, self._host_bounds)
        )
        self._num_filled_pages = [0] * max_sequences
        self._counting = np.arange(max_rows, dtype=np.int64)
        # the same memory, for writing single numbers
        self._row_views = [values.data for values in self._rows]
        self._bounds_view = self._bounds.data
        self._metas: dict[tuple[int, int], RowMeta] = {}
        self._logit_rows: dict[int, torch.Tensor] = {}

    @property
    def max_rows(self) -> int:
        """Rows that one batch can hold."""
        return self._host_rows.shape[1]

    @property
    def max_sequences(self) -> int:
        """Sequences that one batch can hold."""
        return self._host_pages.shape[0]

    @property
    def max_pages_per_sequence(self) -> int:
        """Pages that one sequence of a batch can have."""
        return self._host_pages.shape[1]

    def build(self, rows: Sequence[BatchRows]) -> Batch:
        """Lay the sequences out, one after the other, and return views of the filled tensors.

        Sizes beyond the builder's are the caller's bug, not an error of a person's.
        """
        counts = [len(sequence.token_ids) for sequence in rows]
        num_sequences, num_rows = len(rows), sum(counts)
        assert num_sequences <= self.max_sequences, (num_sequences, self.max_sequences)
        assert num_rows <= self.max_rows, (num_rows, self.max_rows)
        self._fill_bounds(rows, counts)
        self._fill_pages(rows)
        logit_ranges, logit_rows = _logit_layout(rows, counts)
        if num_rows <= _FEW_ROWS:
            self._fill_few_rows(rows, logit_rows)
        else:
            self._fill_rows(rows, counts, num_rows)
            self._rows[3, : len(logit_rows)] = logit_rows
        num_positions = max((one.start + len(one.token_ids) for one in rows), default=0)
        meta, wanted = self._hand_out(num_rows, num_sequences, len(logit_rows))
        return Batch(meta, wanted, logit_ranges, num_positions)

    def _fill_bounds(self, rows: Sequence[BatchRows], counts: Sequence[int]) -> None:
        bounds, kv_from = self._bounds_view, self.max_sequences + 1
        end = 0
        for s, (sequence, count) in enumerate(zip(rows, counts, strict=True)):
            end += count
            bounds[s + 1] = end
            bounds[kv_from + s] = sequence.start + count

    def _fill_pages(self, rows: Sequence[BatchRows]) -> None:
        filled = self._num_filled_pages
        for s, sequence in enumerate(rows):
            num_pages = len(sequence.page_ids)
            assert sequence.start + len(sequence.token_ids) <= num_pages * self._page_size
            table = self._pages[s]
            table[:num_pages] = sequence.page_ids
            if filled[s] > num_pages:
                table[num_pages : filled[s]] = 0
            filled[s] = num_pages

    def _fill_rows(self, rows: Sequence[BatchRows], counts: list[int], num_rows: int) -> None:
        repeats = np.array(counts, dtype=np.int64)
        token_ids, positions, write_slots = self._rows[:3, :num_rows]
        token_ids[:] = list(chain.from_iterable(sequence.token_ids for sequence in rows))
        shifts = np.array([sequence.start for sequence in rows], dtype=np.int64)
        shifts -= self._bounds[: len(rows)]
        np.add(self._counting[:num_rows], np.repeat(shifts, repeats), out=positions)
        owners = np.repeat(self._counting[: len(rows)], repeats)
        pages, offsets = np.divmod(positions, self._page_size)
        np.multiply(self._pages[owners, pages], self._page_size, out=write_slots, dtype=np.int64)
        write_slots += offsets

    def _fill_few_rows(self, rows: Sequence[BatchRows], logit_rows: Sequence[int]) -> None:
        token_ids, positions, write_slots, logits = self._row_views
        page_size = self._page_size
        row = 0
        for sequence in rows:
            for position, token_id in enumerate(sequence.token_ids, start=sequence.start):
                page, offset = divmod(position, page_size)
                token_ids[row], positions[row] = token_id, position
                write_slots[row] = sequence.page_ids[page] * page_size + offset
                row += 1
        for index, logit_row in enumerate(logit_rows):
            logits[index] = logit_row

    def _hand_out(
        self, num_rows: int, num_sequences: int, num_logits: int
    ) -> tuple[RowMeta, torch.Tensor]:
        """Views of the device's tensors: metadata, rows whose logits are wanted."""
        # blocking: the host side is refilled by the next build
        rows, pages, bounds = self._twins
        for host, twin in (rows, bounds):
            if host is not twin:
                twin.copy_(host)
        if pages[0] is not pages[1]:  # the widest one: only what this batch has of it
            pages[1][:num_sequences].copy_(pages[0][:num_sequences])
        meta = self._metas.get((num_rows, num_sequences))
        if meta is None:
            meta = self._metas[num_rows, num_sequences] = self._views(num_rows, num_sequences)
        logit_rows = self._logit_rows.get(num_logits)
        if logit_rows is None:
            logit_rows = self._logit_rows[num_logits] = self._twins[0][1][3, :num_logits]
        return meta, logit_rows

    def _views(self, num_rows: int, num_sequences: int) -> RowMeta:
        """Views of the filled part of the tensors, the same objects for the same sizes."""
        values, pages, bounds = (twin for _, twin in self._twins)
        kv_from = self.max_sequences + 1
        return RowMeta(
            token_ids=values[0, :num_rows],
            positions=values[1, :num_rows],
            write_slots=values[2, :num_rows],
            page_table=pages[:num_sequences],
            q_start=bounds[: num_sequences + 1],
            kv_len=bounds[kv_from : kv_from + num_sequences],
        )


def _logit_layout(
    rows: Sequence[BatchRows], counts: Sequence[int]
) -> tuple[tuple[range, ...], list[int]]:
    ranges: list[range] = []
    logit_rows: list[int] = []
    first_row = 0
    for sequence, count in zip(rows, counts, strict=True):
        wanted = sequence.sample_rows
        ranges.append(range(len(logit_rows), len(logit_rows) + len(wanted)))
        logit_rows.extend(first_row + row for row in wanted)
        first_row += count
    return tuple(ranges), logit_rows
