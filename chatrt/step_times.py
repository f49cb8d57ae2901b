"""What passes of the target and drafts take: measured once, and kept true by every step.

Knows: milliseconds by rows of a pass; by steps and sessions of a proposal.
Does not know: sessions, acceptance, what is chosen by these times.
Invariant: a pass of more rows never takes less; one odd measurement moves a time by less than 1 %.
Cost: 6 µs for an observed pass, 3 µs for observed drafts.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Measured times: a single one counts up to a quarter off; then the machine as a whole is taken to
# have changed rather than these numbers of rows.
_MOST_ERROR = 0.25
_OVERALL_RATE, _ROWS_RATE, _DRAFT_RATE = 1 / 32, 1 / 128, 1 / 32
_LEAST_MS = 1e-6


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What drafts of one source take: `fixed_ms` + each step's time, for a proposal of any length.

    A step drafts one token for each session whose chain is not over: `step_ms` for the first of
    the sessions, `row_ms` for each further one. `first_guess` is the chance that a draft is
    accepted if those before it are, until there is experience. `ends_early`: its chains end by
    themselves where they have become unlikely.
    """

    fixed_ms: float
    step_ms: float
    row_ms: float
    first_guess: float = 0.6
    ends_early: bool = False


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step takes: `rows_ms` are (rows, ms of a pass of the target), in ascending order.

    At least one pair is needed. `drafts` has the sources of drafts by name.
    """

    rows_ms: tuple[tuple[int, float], ...]
    drafts: Mapping[str, DraftCost]

    def pass_ms(self, num_rows: int) -> float:
        """Milliseconds of a pass: linear between the pairs, by the last slope behind them."""
        first, share = _bracket([rows for rows, _ in self.rows_ms], num_rows)
        return _between([ms for _, ms in self.rows_ms], first, share)


class StepTimes:
    """`StepCosts` that follow what is measured; `drafts` are the costs of each source now."""

    def __init__(self, costs: StepCosts) -> None:
        assert costs.rows_ms, "the time of at least one number of rows is needed"
        assert all(a < b for (a, _), (b, _) in pairwise(costs.rows_ms)), costs.rows_ms
        self.drafts = dict(costs.drafts)
        self._rows = [rows for rows, _ in costs.rows_ms]
        self._ms = [max(ms, _LEAST_MS) for _, ms in costs.rows_ms]
        self._by_rows: list[float] = []
        self._keep_order(0)

    def pass_ms(self, num_rows: int) -> float:
        """Milliseconds of a pass of so many rows."""
        return self.up_to(num_rows)[num_rows]

    def up_to(self, num_rows: int) -> list[float]:
        """Milliseconds by rows, from 0 to at least `num_rows`; good until the next pass."""
        by_rows = self._by_rows
        for rows in range(len(by_rows), num_rows + 1):
            first, share = _bracket(self._rows, rows)
            by_rows.append(_between(self._ms, first, share))
        return by_rows

    def observe_pass(self, num_rows: int, time_ms: float) -> None:
        """All times follow slowly, those of about so many rows a little more."""
        error = _clamped_error(time_ms, self.pass_ms(num_rows))
        overall = 1 + _OVERALL_RATE * error
        self._ms = [max(ms * overall, _LEAST_MS) for ms in self._ms]
        first, share = _bracket(self._rows, num_rows)
        # Behind the table both ends of the last line move, or its slope would magnify the error.
        low, high = (1 - share, share) if share <= 1 else (1.0, 1.0)
        self._ms[first] *= 1 + _ROWS_RATE * error * low
        if high:
            self._ms[first + 1] *= 1 + _ROWS_RATE * error * high
        self._keep_order(first)
        self._by_rows = []

    def observe_drafts(
        self, source: str, *, num_steps: int, num_sessions: int, time_ms: float
    ) -> None:
        """The error is shared among the parts of the cost by what they have in the expected time.

        Proposals of different lengths tell the parts apart in this way. An unknown source is none
        of ours.
        """
        cost = self.drafts.get(source)
        if cost is None:
            return
        further = num_steps * max(num_sessions - 1, 0)
        parts = (cost.fixed_ms, cost.step_ms * num_steps, cost.row_ms * further)
        expected_ms, squares = sum(parts), sum(part * part for part in parts)
        if squares == 0:
            return
        change = _DRAFT_RATE * _clamped_error(time_ms, expected_ms) * expected_ms / squares
        fixed, step, row = (1 + change * part for part in parts)
        self.drafts[source] = replace(
            cost,
            fixed_ms=cost.fixed_ms * fixed,
            step_ms=cost.step_ms * step,
            row_ms=cost.row_ms * row,
        )

    def _keep_order(self, first: int) -> None:
        """The times at `first` and behind it hold against those of fewer rows."""
        ms = self._ms
        for i in range(first + 1, len(ms)):
            ms[i] = max(ms[i], ms[i - 1])
        for i in range(first - 1, -1, -1):
            ms[i] = min(ms[i], ms[i + 1])


def further_draft_ms(cost: DraftCost, depth: int, deepest: int) -> float:
    """Milliseconds of one more draft, the `depth`-th (from 1) of its chain.

    `deepest` is the longest chain that is drafted by the same source in this step already.
    """
    if depth <= deepest:
        return cost.row_ms
    return cost.step_ms if deepest else cost.fixed_ms + cost.step_ms


def _clamped_error(time_ms: float, expected_ms: float) -> float:
    """How far a time is from the expected one, relative to it."""
    error = time_ms / max(expected_ms, _LEAST_MS) - 1
    return min(max(error, -_MOST_ERROR), _MOST_ERROR)


def _bracket(rows: Sequence[int], num_rows: int) -> tuple[int, float]:
    """The pair of entries whose line holds for `num_rows`: the first one, and where between."""
    if len(rows) == 1:
        return 0, 0.0
    first = min(max(bisect_right(rows, num_rows) - 1, 0), len(rows) - 2)
    return first, max((num_rows - rows[first]) / (rows[first + 1] - rows[first]), 0.0)


def _between(values: Sequence[float], first: int, share: float) -> float:
    if share == 0.0:
        return values[first]
    return values[first] + (values[first + 1] - values[first]) * share
