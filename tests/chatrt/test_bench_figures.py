from __future__ import annotations

from typing import Any

import pytest

from chatrt.bench.figures import Distribution, session_figures
from chatrt.bench.goodput import Targets
from chatrt.bench.turn_sample import Kind, TurnSample


def sample(kind: Kind = "warm", **fields: object) -> TurnSample:
    known: dict[str, object] = {
        "session_index": 0,
        "turn_index": 0,
        "kind": kind,
        "started_ms": 0.0,
        "status": "completed",
        "history_tokens": 0,
    }
    return TurnSample(**(known | fields))  # type: ignore[arg-type]


def test_a_distribution_counts_only_the_values_that_there_are() -> None:
    assert Distribution.of([3.0, None, 1.0, 2.0]) == Distribution(3, 2.0, 3.0, 3.0, 3.0)
    assert Distribution.of([None]) == Distribution(0, None, None, None, None)


def test_times_to_first_token_go_by_kind() -> None:
    samples = [
        sample("cold", ttft_ms=100.0, server_ttft_ms=99.0),
        sample("warm", ttft_ms=10.0, server_ttft_ms=9.5),
        sample("warm", ttft_ms=20.0, server_ttft_ms=19.0),
        sample("forked", ttft_ms=30.0),
    ]
    figures = session_figures(samples, num_planned=4)
    assert {kind: (d.n, d.p50, d.max) for kind, d in figures.ttft_ms.items()} == {
        "cold": (1, 100.0, 100.0),
        "warm": (2, 10.0, 20.0),
        "forked": (1, 30.0, 30.0),
        "restored": (0, None, None),
    }
    assert figures.server_ttft_ms["forked"].n == 0
    assert figures.client_minus_server_ms == Distribution(3, 1.0, 1.0, 1.0, 1.0)


def test_failed_turns_are_counted_and_not_measured() -> None:
    samples = [
        sample(ttft_ms=10.0),
        sample(ttft_ms=1.0, status="failed", error="kv_exhausted: need 2 pages"),
        sample(status="failed", error="kv_exhausted: need 2 pages"),
    ]
    figures = session_figures(samples, num_planned=8)
    assert (figures.turns, figures.failed, figures.not_run) == (1, 2, 5)
    assert figures.failures == {"kv_exhausted: need 2 pages": 2}
    assert figures.ttft_ms["warm"] == Distribution(1, 10.0, 10.0, 10.0, 10.0)


def test_the_cached_fraction_is_of_tokens_not_of_turns() -> None:
    samples = [
        sample("cold", input_tokens=100),
        sample("warm", input_tokens=100, cached_tokens=50),
        sample("warm", input_tokens=300, cached_tokens=250),
    ]
    assert session_figures(samples, num_planned=3).cached_fraction == {
        "cold": 0.0,
        "warm": 0.75,
        "forked": None,
        "restored": None,
        "all": 0.6,
    }


def test_gaps_and_tokens_of_all_turns_are_taken_together() -> None:
    samples = [sample(gaps_ms=(1.0, 2.0), tpot_ms=1.5), sample(gaps_ms=(3.0,)), sample()]
    figures = session_figures(samples, num_planned=3)
    assert (figures.gap_ms.n, figures.gap_ms.p50, figures.gap_ms.max) == (3, 2.0, 3.0)
    assert figures.tpot_ms == Distribution(1, 1.5, 1.5, 1.5, 1.5)


def test_stages_are_medians_by_kind_in_the_order_in_which_they_follow() -> None:
    samples = [
        sample(stages_ms={"queue_ms": queue_ms, "prefill_ms": 5.0}) for queue_ms in (1.0, 2.0, 9.0)
    ]
    stages = session_figures(samples, num_planned=3).stages_ms
    assert list(stages["warm"].items()) == [("queue_ms", 2.0), ("prefill_ms", 5.0)]
    assert stages["cold"] == {}


@pytest.mark.parametrize(
    ("history_tokens", "bucket"),
    [(0, (0, 128)), (127, (0, 128)), (128, (128, 256)), (255, (128, 256)), (4096, (4096, 8192))],
)
def test_buckets_of_history_double_and_are_half_open(
    history_tokens: int, bucket: tuple[int, int]
) -> None:
    samples = [sample("forked", history_tokens=history_tokens, ttft_ms=7.0), sample("cold")]
    (found,) = session_figures(samples, num_planned=2).ttft_by_history_tokens
    assert (found.from_tokens, found.to_tokens) == bucket
    assert found.ttft_ms == Distribution(1, 7.0, 7.0, 7.0, 7.0)


def test_a_run_without_turns_has_figures() -> None:
    figures = session_figures([], num_planned=12)
    assert (figures.turns, figures.failed, figures.not_run) == (0, 0, 12)
    assert figures.cached_fraction["all"] is None


def test_cancelled_and_left_turns_count_with_their_time_to_first_token() -> None:
    samples = [
        sample(status="cancelled", ttft_ms=10.0, cancel_ms=3.0),
        sample(status="abandoned", ttft_ms=20.0),
        sample(ttft_ms=30.0),
    ]
    figures = session_figures(samples, num_planned=3)
    assert (figures.turns, figures.failed) == (3, 0)
    assert (figures.cancelled, figures.abandoned) == (1, 1)
    assert figures.ttft_ms["warm"].n == 3
    assert figures.cancel_ms == Distribution(1, 3.0, 3.0, 3.0, 3.0)


def test_what_lies_between_client_and_server_is_without_the_clients_own_delay() -> None:
    times: dict[str, Any] = {"ttft_ms": 50.0, "server_ttft_ms": 9.0, "late_ms": 40.0}
    samples = [sample(**times, from_due=True), sample(**times)]
    figures = session_figures(samples, num_planned=2)
    assert figures.client_minus_server_ms == Distribution(2, 1.0, 41.0, 41.0, 41.0)
    assert figures.late_ms.max == 40.0


def test_restored_turns_are_a_kind_and_those_without_pages_are_counted() -> None:
    samples = [
        sample("restored", ttft_ms=70.0, restored_tokens=320, after_restart=True),
        sample("restored", ttft_ms=90.0, after_restart=True),
        sample("restored", ttft_ms=80.0, restored_tokens=16),
    ]
    figures = session_figures(samples, num_planned=3)
    assert (figures.ttft_ms["restored"].n, figures.ttft_ms["restored"].p50) == (3, 80.0)
    assert figures.restored_nothing == 1


def test_goodput_stands_under_the_targets_that_were_asked_for() -> None:
    samples = [sample(ttft_ms=10.0, tpot_ms=10.0, ended_ms=500.0)]
    usual = session_figures(samples, num_planned=1).goodput
    assert (usual.ttft_target_ms, usual.tpot_target_ms, usual.turns_per_s) == (200.0, 50.0, 2.0)
    strict = session_figures(samples, num_planned=1, targets=Targets(5.0, 5.0))
    assert strict.goodput.good_turns == 0
    assert [one.meets_targets for one in strict.by_session] == [False]
