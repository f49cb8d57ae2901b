from __future__ import annotations

from typing import Any

import pytest

from chatrt.bench.goodput import Targets, goodput, session_summaries
from chatrt.bench.turn_sample import TurnSample

TARGETS = Targets(ttft_ms=100.0, tpot_ms=10.0)


def sample(session_index: int = 0, **fields: object) -> TurnSample:
    known: dict[str, object] = {
        "session_index": session_index,
        "turn_index": 0,
        "kind": "warm",
        "started_ms": 0.0,
        "status": "completed",
        "history_tokens": 0,
        "ttft_ms": 50.0,
        "tpot_ms": 5.0,
    }
    return TurnSample(**(known | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "meets"),
    [
        ({}, True),
        ({"ttft_ms": 100.0, "tpot_ms": 10.0}, True),
        ({"ttft_ms": 100.1}, False),
        ({"tpot_ms": 10.1}, False),
        ({"tpot_ms": None}, None),
        ({"ttft_ms": 100.1, "tpot_ms": None}, None),
        ({"tpot_ms": None, "error": "gone"}, False),
        ({"ttft_ms": None}, False),
        ({"error": "kv_exhausted: need 2 pages"}, False),
        ({"status": "cancelled"}, True),
    ],
)
def test_a_turn_meets_the_targets_if_it_went_as_planned_and_in_time(
    fields: dict[str, Any], meets: bool | None
) -> None:
    assert TARGETS.met_by(sample(**fields)) is meets


def test_goodput_is_good_turns_by_the_time_in_which_all_ended() -> None:
    samples = [
        sample(0, ended_ms=400.0),
        sample(0, ended_ms=2000.0, ttft_ms=200.0),
        sample(1, ended_ms=500.0),
        sample(1, ended_ms=900.0),
    ]
    found = goodput(samples, TARGETS)
    assert (found.turns, found.good_turns, found.turns_share) == (4, 3, 0.75)
    assert (found.duration_s, found.turns_per_s) == (2.0, 1.5)
    assert (found.sessions, found.good_sessions, found.sessions_share) == (2, 1, 0.5)
    assert (found.ttft_target_ms, found.tpot_target_ms) == (100.0, 10.0)


def test_turns_without_a_time_per_token_are_neither_good_nor_bad() -> None:
    left = sample(1, tpot_ms=None, ended_ms=500.0)
    found = goodput([sample(0, ended_ms=1000.0), left], TARGETS)
    assert (found.turns, found.good_turns, found.not_judged) == (1, 1, 1)
    assert (found.turns_per_s, found.sessions, found.good_sessions) == (1.0, 1, 1)
    _, second = session_summaries([sample(0), left], TARGETS)
    assert (second.turns, second.good_turns, second.meets_targets) == (1, 0, None)


def test_a_failed_turn_takes_its_session_from_the_good_ones() -> None:
    found = goodput([sample(ended_ms=1.0), sample(error="x")], TARGETS)
    assert (found.good_turns, found.good_sessions) == (1, 0)


def test_the_time_of_a_restart_is_in_no_rate() -> None:
    samples = [
        sample(ended_ms=1000.0),
        sample(ended_ms=60_000.0, after_restart=True),
    ]
    found = goodput(samples, TARGETS)
    assert (found.good_turns, found.duration_s, found.turns_per_s) == (2, 1.0, 1.0)


def test_a_run_without_turns_has_no_goodput() -> None:
    found = goodput([], TARGETS)
    assert (found.turns, found.turns_share, found.turns_per_s) == (0, None, None)
    assert (found.sessions, found.sessions_share) == (0, None)


def test_a_sessions_p50_is_nearest_rank_as_all_percentiles_are() -> None:
    (only,) = session_summaries([sample(ttft_ms=10.0), sample(ttft_ms=90.0)], TARGETS)
    assert only.ttft_p50_ms == 10.0


def test_a_session_is_summed_up_by_its_p50_and_its_worst() -> None:
    samples = [
        sample(1, ttft_ms=30.0, tpot_ms=None),
        sample(0, ttft_ms=300.0, tpot_ms=4.0),
        sample(0, ttft_ms=20.0, tpot_ms=6.0),
        sample(0, ttft_ms=40.0, tpot_ms=5.0),
        sample(0, ttft_ms=1.0, tpot_ms=1.0, error="failed half way"),
    ]
    first, second = session_summaries(samples, TARGETS)
    assert (first.session_index, first.turns, first.good_turns) == (0, 4, 2)
    assert (first.ttft_p50_ms, first.ttft_worst_ms, first.tpot_ms) == (40.0, 300.0, 5.0)
    assert (first.meets_targets, second.meets_targets) == (False, None)
    assert (second.session_index, second.tpot_ms) == (1, None)
