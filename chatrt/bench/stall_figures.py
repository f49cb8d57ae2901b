"""From the times of deltas and prompts to the figures of `bench stall`.

Knows: which gap is quiet and which lies beside a prompt. Does not know: servers, tables, JSON.
Invariant: every gap is counted once: as busy if a long prompt was at work during any part of it, as
starting if a stream's own short prompt was, else as quiet.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.bench.figures import Distribution

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from chatrt.bench.stall import PromptSample, StreamSample

PROMPT_DELAY_BAR = 2.0  # a long prompt's time beside streams ÷ its time alone


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two deltas of one answer, `[start_ms, end_ms)`; the later one has `num_tokens`."""

    start_ms: float
    end_ms: float
    num_tokens: int

    @property
    def length_ms(self) -> float:
        """How long nothing came."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True, slots=True)
class SortedGaps:
    """All gaps of a run, by what went on during them."""

    quiet: tuple[Gap, ...]
    busy: tuple[Gap, ...]
    starting: tuple[Gap, ...]

    @property
    def busy_ms(self) -> list[float]:
        """Lengths of those beside a long prompt."""
        return [gap.length_ms for gap in self.busy]


@dataclass(frozen=True, slots=True)
class PerToken:
    """Milliseconds per token of a stream, quiet and beside a long prompt."""

    quiet: float | None
    busy: float | None


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """Times of the long prompts, alone and beside the streams."""

    alone: Distribution
    busy: Distribution


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Client TTFT of the streams' questions: asked in quiet, or while a long prompt was at work."""

    quiet: Distribution
    busy: Distribution


@dataclass(frozen=True, slots=True)
class StallFigures:
    """The figures of a run.

    `prefill_ms` is the client's TTFT of the long prompts, `server_prefill_ms` the server's prefill
    stage of the same. `prompt_delay_ratio` is the median of what a prompt took beside the streams
    over what the one before it in its round took alone. `short_prompt_ms` is the TTFT of the
    streams' own questions. `within_gap` says whether the p99 of the busy gaps keeps `max_gap_ms`;
    None without such gaps, or without a budget.
    """

    max_gap_ms: float | None
    gap_ms_quiet: Distribution
    gap_ms_busy: Distribution
    gap_ms_starting: Distribution
    tpot_ms: PerToken
    prefill_ms: PromptTimes
    server_prefill_ms: PromptTimes
    short_prompt_ms: StartTimes
    prompt_tokens: float | None
    cached_tokens: float | None
    prompt_delay_ratio: float | None
    within_gap: bool | None
    within_delay: bool | None
    rounds: int
    failed: int


def stall_figures(
    streams: Sequence[StreamSample],
    prompts: Sequence[PromptSample],
    *,
    max_gap_ms: float | None,
) -> StallFigures:
    """The figures of a run whose server had the gap budget `max_gap_ms` (None: unlimited)."""
    gaps = sorted_gaps(streams, prompts)
    good = [prompt for prompt in prompts if prompt.error is None]
    busy = Distribution.of(gaps.busy_ms)
    ratio = _delay_ratio(good)
    judged = max_gap_ms is not None and busy.p99 is not None
    return StallFigures(
        max_gap_ms=max_gap_ms,
        gap_ms_quiet=Distribution.of(gap.length_ms for gap in gaps.quiet),
        gap_ms_busy=busy,
        gap_ms_starting=Distribution.of(gap.length_ms for gap in gaps.starting),
        tpot_ms=PerToken(_per_token_ms(gaps.quiet), _per_token_ms(gaps.busy)),
        prefill_ms=_prompt_times(good, stage=None),
        server_prefill_ms=_prompt_times(good, stage="prefill_ms"),
        short_prompt_ms=_start_times(streams, prompts),
        prompt_tokens=_median(prompt.figures.input_tokens for prompt in good),
        cached_tokens=_median(prompt.figures.cached_tokens for prompt in good),
        prompt_delay_ratio=ratio,
        within_gap=(busy.p99 or 0.0) <= (max_gap_ms or 0.0) if judged else None,
        within_delay=None if ratio is None else ratio <= PROMPT_DELAY_BAR,
        rounds=sum(prompt.beside_streams for prompt in prompts),
        failed=len(prompts) - len(good),
    )


def sorted_gaps(streams: Sequence[StreamSample], prompts: Sequence[PromptSample]) -> SortedGaps:
    """Every gap of the streams, by what went on during it."""
    busy_times = _busy_times(prompts)
    start_times = [(one.sent_ms, one.delta_ms[0]) for one in streams if one.delta_ms]
    quiet, busy, starting = [], [], []
    for gap in itertools.chain.from_iterable(map(_gaps, streams)):
        if _overlaps(gap, busy_times):
            busy.append(gap)
        elif _overlaps(gap, start_times):
            starting.append(gap)
        else:
            quiet.append(gap)
    return SortedGaps(tuple(quiet), tuple(busy), tuple(starting))


def _busy_times(prompts: Sequence[PromptSample]) -> list[tuple[float, float]]:
    return [
        (prompt.sent_ms, prompt.first_ms)
        for prompt in prompts
        if prompt.beside_streams and prompt.first_ms is not None
    ]


def _start_times(streams: Sequence[StreamSample], prompts: Sequence[PromptSample]) -> StartTimes:
    busy_times = _busy_times(prompts)
    quiet: list[float] = []
    busy: list[float] = []
    for stream in streams:
        if stream.delta_ms:
            at_work = any(start <= stream.sent_ms < end for start, end in busy_times)
            (busy if at_work else quiet).append(stream.delta_ms[0] - stream.sent_ms)
    return StartTimes(Distribution.of(quiet), Distribution.of(busy))


def _gaps(stream: StreamSample) -> list[Gap]:
    pairs = itertools.pairwise(stream.delta_ms)
    return [
        Gap(start_ms, end_ms, num_tokens)
        for (start_ms, end_ms), num_tokens in zip(pairs, stream.delta_tokens[1:], strict=True)
    ]


def _overlaps(gap: Gap, times: Sequence[tuple[float, float]]) -> bool:
    return any(start < gap.end_ms and gap.start_ms < end for start, end in times)


def _per_token_ms(gaps: Sequence[Gap]) -> float | None:
    num_tokens = sum(gap.num_tokens for gap in gaps)
    return sum(gap.length_ms for gap in gaps) / num_tokens if num_tokens else None


def _prompt_times(prompts: Sequence[PromptSample], *, stage: str | None) -> PromptTimes:
    def of(beside_streams: bool) -> Distribution:
        chosen = [one.figures for one in prompts if one.beside_streams == beside_streams]
        return Distribution.of(
            one.ttft_ms if stage is None else one.stages_ms.get(stage) for one in chosen
        )

    return PromptTimes(of(False), of(True))


def _delay_ratio(prompts: Sequence[PromptSample]) -> float | None:
    alone = {one.round_index: one.figures.ttft_ms for one in prompts if not one.beside_streams}
    return _median(
        one.figures.ttft_ms / before
        for one in prompts
        if one.beside_streams
        and one.figures.ttft_ms is not None
        and (before := alone.get(one.round_index))
    )


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return float(statistics.median(found)) if found else None
