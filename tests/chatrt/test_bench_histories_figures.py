from __future__ import annotations

import pytest
from rich.console import Console

from chatrt.bench.histories import Case, HistorySample
from chatrt.bench.histories_figures import histories_figures
from chatrt.bench.histories_peer import PeerSample
from chatrt.bench.histories_report import histories_report
from chatrt.bench.turn_figures import TurnFigures


def sample(case: Case, history: int, ttft_ms: float, **figures: object) -> HistorySample:
    fields = {"input_tokens": 100, "cached_tokens": 80, "server_ttft_ms": ttft_ms - 1, **figures}
    return HistorySample(case, history, 0, history, TurnFigures(ttft_ms=ttft_ms, **fields))  # type: ignore[arg-type]


SAMPLES = [
    sample("cold", 260, 200.0, cached_tokens=0, stages_ms={"prefill_ms": 180.0}),
    sample("follow_up", 260, 21.0, pass_ms=6.0),
    sample("typed_ahead", 260, 9.0, typed_ahead_tokens=14, pass_ms=5.0),
    sample("regenerate", 260, 6.0),
    sample("fork", 260, 7.0),
    sample("branch_switch", 260, 23.0),
    sample("plain", 260, 20.0, tpot_ms=4.0, pass_ms=4.0),
    sample("restored", 260, 40.0, stages_ms={"restore_ms": 18.0}),
    HistorySample("follow_up", 260, 1, 260, TurnFigures(), error="kv_exhausted: none left"),
]


def test_a_servers_ttft_is_told_in_decode_steps_of_its_own_length() -> None:
    (row,) = histories_figures(SAMPLES, num_planned=9).by_history
    assert row.decode_step_ms == 4.0
    assert row.cases["typed_ahead"].decode_steps == pytest.approx(8.0 / 4.0)
    assert row.pass_ms == 5.5


def test_kinds_are_those_of_the_definitions_and_typing_ahead_is_none_of_them() -> None:
    figures = histories_figures(SAMPLES, num_planned=9)
    by_kind = {kind: (one.n, one.max) for kind, one in figures.ttft_ms.items()}
    assert by_kind == {
        "cold": (1, 200.0),
        "warm": (2, 23.0),
        "forked": (2, 7.0),
        "restored": (1, 40.0),
    }


def test_restoring_is_held_against_the_prefill_of_a_cold_turn() -> None:
    (row,) = histories_figures(SAMPLES, num_planned=9).by_history
    assert row.cases["restored"].restore_of_cold == pytest.approx(0.1)
    assert row.cases["typed_ahead"].restore_of_cold is None


def test_failures_are_counted_and_part_of_no_figure() -> None:
    figures = histories_figures(SAMPLES, num_planned=12)
    assert (figures.turns, figures.failed, figures.not_run) == (8, 1, 3)
    assert figures.failures == {"kv_exhausted: none left": 1}
    assert figures.by_history[0].cases["follow_up"].ttft_ms.n == 1
    assert figures.cached_fraction["follow_up"] == pytest.approx(0.8)


def test_another_length_has_no_published_figure() -> None:
    figures = histories_figures([sample("cold", 300, 1.0), *SAMPLES], num_planned=10)
    published = {row.history: row.llama_cpp_published_ms for row in figures.by_history}
    assert published == {260: 105.0, 300: None}


def test_a_run_without_samples_has_no_figures_and_fails_nowhere() -> None:
    figures = histories_figures([], num_planned=3)
    assert (figures.not_run, figures.by_history) == (3, ())
    assert text_of([], peer=None)


def text_of(samples: list[HistorySample], peer: list[PeerSample] | None) -> str:
    console = Console(width=200)
    figures = histories_figures(samples, num_planned=len(samples), peer=peer)
    with console.capture() as capture:
        console.print(histories_report(figures, ["a note"]))
    return capture.get()


def rows_of(text: str, history: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.split()[:1] == [history]]


def test_the_tables_show_every_case_and_how_many_times_ours_the_published_time_is() -> None:
    text = text_of(SAMPLES, peer=None)
    overview, peers, *_ = rows_of(text, "260")
    assert overview == ["260", "200.0", "21.0", "9.00", "6.00", "7.00", "23.0", "40.0", "4.00"]
    assert peers == ["260", "105.0", "5.0", "×", "11.7", "×", *["-"] * 6]
    assert "1 of 9 turns failed" in text
    assert "1 × kv_exhausted: none left" in text
    assert "a note" in text


def test_what_llama_cpp_took_in_the_same_run_stands_beside_it() -> None:
    text = text_of(SAMPLES, peer=[PeerSample(260, 0, 262, 300.0, 84.0)])
    peers = rows_of(text, "260")[1]
    assert peers[6:] == ["84.0", "1", "4.0", "×", "9.3", "×", "300.0", "1.5", "×"]
