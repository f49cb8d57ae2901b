"""What a step takes: milliseconds by its rows and by what they attend to.

Knows: rows and positions as numbers, coefficients that were measured.
Does not know: sessions, budgets, who measured, what a step took in the end.
Invariant: a step with more of anything never takes less.
Cost: about a microsecond for a prediction.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class StepLoad:
    """What a step has to compute.

    `decode_rows` counts drafts. `context` is the number of positions computed so far of all
    planned sessions together; `attended` sums over all rows the positions that each looks back at.
    """

    decode_rows: int = 0
    prefill_rows: int = 0
    context: int = 0
    attended: int = 0

    def add_decode(self, num_rows: int, start: int) -> None:
        """Rows `[start, start + num_rows)` of a session that decodes, drafts included."""
        self.decode_rows += num_rows
        self.context += start
        self.attended += looked_back_at(num_rows, start)

    def add_chunk(self, num_rows: int, start: int) -> None:
        """Rows `[start, start + num_rows)` of a prompt."""
        self.prefill_rows += num_rows
        self.context += start
        self.attended += looked_back_at(num_rows, start)

    def with_chunk(self, num_rows: int, start: int) -> StepLoad:
        """This load and one more chunk."""
        return StepLoad(
            self.decode_rows,
            self.prefill_rows + num_rows,
            self.context + start,
            self.attended + looked_back_at(num_rows, start),
        )


def looked_back_at(num_rows: int, start: int) -> int:
    """Positions before its own that each of the rows `[start, start + num_rows)` sees, summed."""
    return num_rows * start + num_rows * (num_rows - 1) // 2


class CostModel(Protocol):
    """Predicts how long a step takes."""

    def step_ms(self, load: StepLoad) -> float:
        """Milliseconds of a step; must not fall when any part of the load grows."""
        ...


@dataclass(frozen=True, slots=True)
class LinearCostModel:
    """A fixed cost for each step, and one for each row and each position of context."""

    fixed_ms: float
    decode_row_ms: float
    prefill_row_ms: float
    context_ms: float = 0.0

    def step_ms(self, load: StepLoad) -> float:
        """Milliseconds of a step."""
        return (
            self.fixed_ms
            + self.decode_row_ms * load.decode_rows
            + self.prefill_row_ms * load.prefill_rows
            + self.context_ms * load.context
        )


@dataclass(frozen=True, slots=True)
class ForwardCosts:
    """The products by their rows, and attention by what it reads and what it computes.

    Args:
        rows: Numbers of rows that were measured, ascending, at least one.
        rows_ms: Milliseconds of one sequence of so many rows whose last one has logits, without
            what it attends to; they never fall. Between two of them, and behind the last, a line.
        logits_ms: What logits of one more row add.
        context_ms: What each position of a sequence's context adds, whatever its rows: it is read.
        attended_ms: What each position adds again for each row that attends to it.
    """

    rows: tuple[int, ...]
    rows_ms: tuple[float, ...]
    logits_ms: float
    context_ms: float
    attended_ms: float

    def step_ms(self, load: StepLoad) -> float:
        """Milliseconds of a step."""
        # One row's logits are in the measured times.
        further = load.decode_rows if load.prefill_rows else max(load.decode_rows - 1, 0)
        return (
            self._rows_ms(load.decode_rows + load.prefill_rows)
            + self.logits_ms * further
            + self.context_ms * load.context
            + self.attended_ms * load.attended
        )

    def describe(self) -> str:
        """The coefficients, in words."""
        rows = ", ".join(f"{n}: {ms:.1f} ms" for n, ms in zip(self.rows, self.rows_ms, strict=True))
        return (
            f"by its rows {rows}; logits of one more row {self.logits_ms:.2f} ms; 1,000 positions "
            f"of context {self.context_ms * 1000:.2f} ms and {self.attended_ms * 1000:.2f} ms for "
            "each row that attends to them"
        )

    def _rows_ms(self, num_rows: int) -> float:
        rows, ms = self.rows, self.rows_ms
        if num_rows <= rows[0] or len(rows) == 1:
            return ms[0]
        low = min(bisect_right(rows, num_rows), len(rows) - 1) - 1
        slope = (ms[low + 1] - ms[low]) / (rows[low + 1] - rows[low])
        return ms[low] + slope * (num_rows - rows[low])
