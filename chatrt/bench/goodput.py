"""How many turns were good enough for the person who waited, and how each session fared.

Knows: targets of TTFT and TPOT. Does not know: servers, tables.
Invariant: a turn that failed meets no target; one that has no TPOT (a single token, an answer that
was left or cancelled early) is not judged, and counted as that. A session is good if all its judged
turns are, and it has some.
Turns behind a restart take part in sessions, not in the rate: nobody arrives at a server that is
down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatrt.percentiles import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.bench.turn_sample import TurnSample


@dataclass(frozen=True, slots=True)
class Targets:
    """What a turn has to meet, both included."""

    ttft_ms: float = 200.0
    tpot_ms: float = 50.0

    def met_by(self, sample: TurnSample) -> bool | None:
        """Whether a turn went as planned and in time; None for one that has no TPOT."""
        if sample.error is not None:
            return False
        if sample.tpot_ms is None:
            return None
        is_prompt = sample.ttft_ms is not None and sample.ttft_ms <= self.ttft_ms
        return is_prompt and sample.tpot_ms <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class Goodput:
    """`good_turns` of `turns` met both targets, `good_sessions` of `sessions` in all their turns.

    `turns` are those that were judged, failed ones included, `not_judged` those without a TPOT;
    shares are of the judged. `turns_per_s` is good turns by the `duration_s` from the start of the
    run to the end of its last turn, a restart and what follows it left out. None without any.
    """

    ttft_target_ms: float
    tpot_target_ms: float
    turns: int
    good_turns: int
    not_judged: int
    turns_share: float | None
    duration_s: float
    turns_per_s: float | None
    sessions: int
    good_sessions: int
    sessions_share: float | None


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """One session: its turns, p50 and worst of its TTFT, whether all judged turns met the targets.

    `good_turns` of its `turns` did; `tpot_ms` is the p50 of its turns. `meets_targets` is None
    where no turn can be judged.
    """

    session_index: int
    turns: int
    good_turns: int
    ttft_p50_ms: float | None
    ttft_worst_ms: float | None
    tpot_ms: float | None
    meets_targets: bool | None


def goodput(samples: Sequence[TurnSample], targets: Targets) -> Goodput:
    """What `samples` come to under `targets`."""
    judged = [sample for sample in samples if targets.met_by(sample) is not None]
    num_good = sum(map(bool, map(targets.met_by, judged)))
    summaries = session_summaries(samples, targets)
    sessions = [one for one in summaries if one.meets_targets is not None]
    num_good_sessions = sum(map(bool, (one.meets_targets for one in sessions)))
    running = [sample for sample in samples if not sample.after_restart]
    duration_s = max((sample.ended_ms for sample in running), default=0.0) / 1e3
    good_before = sum(map(bool, map(targets.met_by, running)))
    return Goodput(
        ttft_target_ms=targets.ttft_ms,
        tpot_target_ms=targets.tpot_ms,
        turns=len(judged),
        good_turns=num_good,
        not_judged=len(samples) - len(judged),
        turns_share=num_good / len(judged) if judged else None,
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
    verdicts = [met for met in map(targets.met_by, turns) if met is not None]
    return SessionSummary(
        session_index=index,
        turns=len(turns),
        good_turns=sum(verdicts),
        ttft_p50_ms=percentile(sorted(ttfts), 0.50),
        ttft_worst_ms=max(ttfts, default=None),
        tpot_ms=percentile(sorted(tpots), 0.50),
        meets_targets=all(verdicts) if verdicts else None,
    )
