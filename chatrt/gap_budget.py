"""How long a step may take, so that running streams are even and nobody who arrives waits long.

Knows: a cost model, `max_gap_ms`, what steps took in the end.
Does not know: sessions, pages, who goes first, clocks.
Invariant: a prediction follows what is measured within a few steps; one odd step changes it by
nothing, and the margin of streams by 3 %.
Cost: 2 µs for an observed step, about 1 µs for a prediction, ten predictions for a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt.cost_model import StepLoad

if TYPE_CHECKING:
    from chatrt.cost_model import CostModel

# A step with a prefill chunk may always take this many times as long as its decodes alone: one row
# a step would keep a prompt waiting for minutes and help no stream.
_LEAST_STRETCH = 1.5
# Beside a waiting prompt drafts may fill the decodes' share of the budget, no more: a draft's row
# costs what a prompt's row costs, and a prompt that gets the rest is done in less than twice the
# time that it takes alone.
_DECODE_SHARE = 0.4
# Nobody decodes: whoever arrives, or cancels, waits for the chunk that runs. From some ten times
# the cost of a single row on, a row of a longer chunk costs no less (SmolLM2 on two cores, ms a
# row: 0.65 at 16 rows, 0.60 at 32, 0.59 at 64, 0.63 at 512).
_ALONE_MS, _ALONE_STEPS = 50.0, 10.0
# What is computed before anybody asked: half-typed messages, preparations.
_AHEAD_STRETCH = 1.25
_AHEAD_MS, _AHEAD_STEPS = 10.0, 1.5

# A machine that has become slower is believed at once, what may be noise and a faster one slowly:
# the budget is kept first, and won back behind it.
_NOISE = 0.3
_SLOWER_RATE, _RATE = 1 / 2, 1 / 16
_MOST_FACTOR = 16.0
# One step in 250 may take longer than its margin says, which leaves the 99th percentile some room.
# What is further off than the largest margin no margin can cover: it does not count. A larger one
# would make a prompt beside streams take more than twice its time alone.
_FIRST_MARGIN, _LEAST_MARGIN, _MOST_MARGIN = 1.2, 1.05, 1.4
_MARGIN_RISE = 0.03
_MARGIN_FALL = _MARGIN_RISE / 250
_FULL = 0.75  # of the budget: steps that are predicted to take less say little about those that do


class Pace:
    """How steps compare with what was predicted for them.

    `factor` times the prediction is what steps take now. `margin` times that is what nearly all
    take that were filled up to a stream's budget.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self.margin = _FIRST_MARGIN
        self._before_last = self._last = 1.0

    def observe(self, ratio: float, *, is_full: bool) -> None:
        """A step took `ratio` times its plain prediction; `is_full` if a budget bounded it."""
        ratio = min(max(ratio, 1 / _MOST_FACTOR), _MOST_FACTOR)
        off = ratio / self.factor
        # The median of three: what disturbs a single step is not the machine's pace.
        low, high = sorted((self._before_last, self._last))
        change = min(max(ratio, low), high) - self.factor
        self.factor += change * (_SLOWER_RATE if change > _NOISE * self.factor else _RATE)
        self._before_last, self._last = self._last, ratio
        if not is_full or off > _MOST_MARGIN:
            return
        if off > self.margin:
            self.margin = min(self.margin + _MARGIN_RISE, _MOST_MARGIN)
        else:
            self.margin = max(self.margin - _MARGIN_FALL, _LEAST_MARGIN)


class GapBudget:
    """Milliseconds that a step may take, and the rows that fit into them.

    Args:
        cost_model: What steps take on this machine at first; steps that were observed correct it.
        max_gap_ms: A step takes no longer while a stream decodes; None leaves that open.
    """

    def __init__(self, cost_model: CostModel, max_gap_ms: float | None) -> None:
        self._cost_model = cost_model
        self._max_gap_ms = max_gap_ms
        self.pace = Pace()

    def step_ms(self, load: StepLoad) -> float:
        """Milliseconds that a step takes at the machine's pace of now."""
        return self.pace.factor * self._cost_model.step_ms(load)

    def observe(self, load: StepLoad, time_ms: float) -> None:
        """A step took so long, with all that belongs to it, from its start to the next one's."""
        predicted_ms = self._cost_model.step_ms(load)
        if predicted_ms <= 0:
            return
        is_full = False
        if self._max_gap_ms is not None and load.decode_rows and load.prefill_rows:
            filled_ms = self.pace.factor * self.pace.margin * predicted_ms
            is_full = filled_ms > _FULL * self._max_gap_ms
        self.pace.observe(time_ms / predicted_ms, is_full=is_full)

    def drafting_ms(self) -> float | None:
        """What the decodes may take with their drafts while a prompt waits; None: anything."""
        stream_ms = self._stream_ms()
        return None if stream_ms is None else _DECODE_SHARE * stream_ms

    def prompt_ms(self, load: StepLoad, start: int) -> float | None:
        """What a step of these decodes may take with chunks of prompts; None: anything.

        `start` is where the first chunk starts.
        """
        if not load.decode_rows:
            return max(_ALONE_MS, _ALONE_STEPS * self._single_ms(start))
        stream_ms = self._stream_ms()
        return None if stream_ms is None else max(stream_ms, _LEAST_STRETCH * self.step_ms(load))

    def ahead_ms(self, load: StepLoad, start: int) -> float:
        """What a step of these decodes may take with work that nobody waits for yet.

        Streams hardly notice it, and if there is none, an Enter waits no longer than this.
        `start` is where the first chunk starts.
        """
        if not load.decode_rows:
            return max(_AHEAD_MS, _AHEAD_STEPS * self._single_ms(start))
        stretched_ms, stream_ms = _AHEAD_STRETCH * self.step_ms(load), self._stream_ms()
        return stretched_ms if stream_ms is None else min(stretched_ms, stream_ms)

    def remaining_ms(self, num_rows: int, start: int) -> float:
        """What a prompt with so many rows to compute still takes, by itself."""
        return self.step_ms(StepLoad().with_chunk(num_rows, start))

    def rows_within(self, load: StepLoad, start: int, most: int, limit_ms: float | None) -> int:
        """The longest chunk from `start` on, up to `most` rows, with which a step keeps a limit."""
        if limit_ms is None:
            return most
        if self.step_ms(load.with_chunk(most, start)) <= limit_ms:
            return most
        fits, too_many = 0, most
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.step_ms(load.with_chunk(middle, start)) <= limit_ms:
                fits = middle
            else:
                too_many = middle
        return fits

    def _stream_ms(self) -> float | None:
        """What a step may take on average, so that streams nearly always keep `max_gap_ms`."""
        return None if self._max_gap_ms is None else self._max_gap_ms / self.pace.margin

    def _single_ms(self, start: int) -> float:
        return self.step_ms(StepLoad().with_chunk(1, start))
