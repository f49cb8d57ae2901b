"""Rows of a head that are not written in the target's pass: their features wait, and go together.

    # a pass in which nobody drafts    features of its rows → places      a copy each
    # later                            places → keys and values           up to a page at once

Knows: static buffers, places, the network's own description of how rows are written.
Does not know: sessions, who waits where, when it is time.
Invariant: rows are the same bits as those of a pass that writes them itself.
Cost: 6 µs for a row that is kept, 0.4 ms for a page of them that is written (the default model's
head, two cores): 30 µs a token instead of 80 in its own pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chatrt_kernels.ops import ForwardInputs

if TYPE_CHECKING:
    from torch import Tensor

    from chatrt.batch import BatchBuilder, BatchRows
    from chatrt_drafts.head_network import HeadNetwork
    from chatrt_kernels.ops import Calls, Ops


class RowCopies:
    """Copies rows of a contiguous buffer `[rows, width]` to rows of another like it, or itself.

    In main memory by plain bytes: 6 µs behind a pass of the target, which leaves nothing of Python
    in the caches, where numpy takes 20 and torch 30.
    """

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source, self._target = source, target
        self._bytes: tuple[memoryview, memoryview] | None = None
        self._row_bytes = source.shape[1] * source.element_size()
        if source.device.type == target.device.type == "cpu":
            self._bytes = (_bytes_of(source), _bytes_of(target))

    def copy(self, source_row: int, target_row: int) -> None:
        """Copy one row."""
        if self._bytes is None:
            self._target[target_row] = self._source[source_row]
            return
        size = self._row_bytes
        (source, target), start, at = self._bytes, source_row * size, target_row * size
        target[at : at + size] = source[start : start + size]


def _bytes_of(buffer: Tensor) -> memoryview:
    """The buffer's own memory."""
    return buffer.view(torch.uint8).view(-1).numpy().data


class DeferredRows:
    """Keeps features of single rows, and writes the rows of one sequence.

    Args:
        network: Whose features and rows they are. `first_base` and those behind it are rows of its
            `bases` that nobody else uses, as many as the builder has rows.
        ops: Its executor.
        largest: Inputs with as many rows, feature rows and logit rows as the builder has rows.
        batches: A builder that nobody else uses; its rows bound how many are written at once.
        num_places: How many rows can wait.
        first_base: See above.
    """

    def __init__(
        self,
        network: HeadNetwork,
        ops: Ops,
        largest: ForwardInputs,
        batches: BatchBuilder,
        *,
        num_places: int,
        first_base: int,
    ) -> None:
        features = network.features
        self._network = network
        self._batches = batches
        self._first_base = first_base
        self._kept = features.new_empty(num_places, features.shape[1])
        self._copies = RowCopies(features, self._kept)
        self._places = torch.arange(num_places, device=features.device)
        self._taken = features.new_empty(batches.max_rows, features.shape[1])
        self._program = ops.compile(self._describe, largest, [network.bases])

    @property
    def max_rows(self) -> int:
        """Rows that can be written at once."""
        return self._batches.max_rows

    @property
    def num_places(self) -> int:
        """Rows that can wait."""
        return len(self._places)

    def keep(self, row: int, place: int) -> None:
        """Copy the features of a row of the last pass to a place."""
        self._copies.copy(row, place)

    def write(self, rows: BatchRows, first_place: int, base_row: int) -> int:
        """Write the keys and values of rows whose features wait from `first_place` on.

        The first of them starts from row `base_row` of the network's `bases`. Returns the one that
        their successor starts from, valid until the next call.
        """
        first, num_rows = self._first_base, len(rows.token_ids)
        batch = self._batches.build([rows])
        base_rows = self._network.choose_bases([base_row, *range(first, first + num_rows - 1)])
        places = self._places[first_place : first_place + num_rows]
        self._program.run(ForwardInputs(batch.meta, places, base_rows, batch.num_positions))
        return first + num_rows - 1

    def _describe(self, ops: Calls, inputs: ForwardInputs) -> None:
        """As behind a pass; which places are read is said where others say who gets logits."""
        num_rows = inputs.meta.token_ids.shape[0]
        features = self._taken[:num_rows]
        ops.gather_rows(self._kept, inputs.logit_rows, out=features)
        following = self._network.bases[self._first_base : self._first_base + num_rows]
        self._network.write_rows(ops, inputs, features, following)
