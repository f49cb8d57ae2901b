"""How many turns were good enough for the person who waited, and how each session fared.

Knows: targets of TTFT and TPOT. Does not know: servers, tables.
Invariant: a turn that failed meets no target; one that has no TPOT (a single token, an answer that
was left or cancelled early) is judged on its TTFT alone. A session is good if all its turns are.
Turns behind a restart take part in sessions, not in the rate: nobody arrives at a server that is
down.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.bench.turn_sample import TurnSample


@dataclass(frozen=True, slots=True)
class Targets:
    """What a turn has to meet, both included."""

    ttft_ms: float = 200.0
    tpot_ms: float = 50.0

    def met_by(self, sample: TurnSample) -> bool:
        """Whether a turn went as planned and in time."""
        if sample.error is not None or sample.ttft_ms is None or sample.ttft_ms > self.ttft_ms:
            return False
        return sample.tpot_ms is None or sample.tpot_ms <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Goodput:
    """`good_turns` of `turns` met both targets, `good_sessions` of `sessions` in all their turns.

    `turns` are those that ended, failed ones included; shares are of these, `turns_per_s` is good
    turns by the `duration_s` from the start of the run to the end of its last turn, a restart and
    what follows it left out. None where nothing ended.
    """

    ttft_target_ms: float
    tpot_target_ms: float
    turns: int
    good_turns: int
    turns_share: float | None
    duration_s: float
    turns_per_s: float | None
    sessions: int
    good_sessions: int
    sessions_share: float | None


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """One session: its turns, the median and the worst of its TTFT, whether all met the targets.

    `good_turns` of its `turns` did; `tpot_ms` is the median of its turns.
    """

    session_index: int
    turns: int
    good_turns: int
    ttft_p50_ms: float | None
    ttft_worst_ms: float | None
    tpot_ms: float | None
    meets_targets: bool


def goodput(samples: Sequence[TurnSample], targets: Targets) -> Goodput:
    """What `samples` come to under `targets`."""
    sessions = session_summaries(samples, targets)
    num_good = sum(map(targets.met_by, samples))
    num_good_sessions = sum(one.meets_targets for one in sessions)
    running = [sample for sample in samples if not sample.after_restart]
    duration_s = max((sample.ended_ms for sample in running), default=0.0) / 1e3
    good_before = sum(map(targets.met_by, running))
    return Goodput(
        ttft_target_ms=targets.ttft_ms,
        tpot_target_ms=targets.tpot_ms,
        turns=len(samples),
        good_turns=num_good,
        turns_share=num_good / len(samples) if samples else None,
        duration_s=duration_s,
        turns_per_s=good_before / duration_s if duration_s > 0 else None,
        sessions=len(sessions),
        good_sessions=num_good_sessions,
        sessions_share=num_good_sessions / len(sessions) if sessions else None,
    )


def session_summaries(
    samples: Sequence[TurnSample], targets: Targets
) -> tuple[SessionSummary, ...]:
    """One summary for each session that has turns, in their order."""
    by_session: dict[int, list[TurnSample]] = {}
    for sample in sorted(samples, key=lambda one: one.session_index):
        by_session.setdefault(sample.session_index, []).append(sample)
    return tuple(_summary(index, turns, targets) for index, turns in by_session.items())


def _summary(index: int, turns: Sequence[TurnSample], targets: Targets) -> SessionSummary:
    ttfts = [turn.ttft_ms for turn in turns if turn.error is None and turn.ttft_ms is not None]
    tpots = [turn.tpot_ms for turn in turns if turn.error is None and turn.tpot_ms is not None]
    num_good = sum(map(targets.met_by, turns))
    return SessionSummary(
        session_index=index,
        turns=len(turns),
        good_turns=num_good,
        ttft_p50_ms=statistics.median(ttfts) if ttfts else None,
        ttft_worst_ms=max(ttfts, default=None),
        tpot_ms=statistics.median(tpots) if tpots else None,
        meets_targets=num_good == len(turns),
    )
