from __future__ import annotations

from rich.console import Console, RenderableType

from chatrt.bench.bookkeeping import BookkeepingFigures
from chatrt.bench.figures import session_figures
from chatrt.bench.report import bookkeeping_report, sessions_report
from chatrt.bench.turn_sample import TurnSample

# TTFT, the server's, TPOT, median and largest gap
TIMES = ["12.3", "11.5", "-", "4.50", "5.00"]


def sample(turn_index: int, **fields: object) -> TurnSample:
    known: dict[str, object] = {
        "session_index": 0,
        "turn_index": turn_index,
        "kind": "warm" if turn_index else "cold",
        "started_ms": 0.0,
        "status": "completed",
        "history_tokens": 300 * turn_index,
        "input_tokens": 40,
        "cached_tokens": 30 * turn_index,
        "ttft_ms": 12.345,
        "server_ttft_ms": 11.5,
        "stages_ms": {"queue_ms": 1.0, "prefill_ms": 10.5},
        "gaps_ms": (4.0, 5.0),
    }
    return TurnSample(**(known | fields))  # type: ignore[arg-type]


def printed(report: RenderableType, *, styled: bool = False) -> str:
    console = Console(width=140, force_terminal=styled, color_system="standard" if styled else None)
    with console.capture() as capture:
        console.print(report)
    return capture.get()


def report(samples: list[TurnSample], *, per_session: bool = False) -> RenderableType:
    figures = session_figures(samples, num_planned=4)
    return sessions_report(figures, samples, per_session=per_session, notes=["a note"])


def line_of(text: str, start: str) -> list[str]:
    (line,) = [one for one in text.splitlines() if one.strip().startswith(start)]
    return line.split()


def test_a_row_of_ttft_has_n_percentiles_and_the_cached_share() -> None:
    text = printed(report([sample(0), sample(1)]))
    (row,) = [one for one in text.splitlines() if "75.0%" in one]
    assert row.split() == ["warm", "1", "12.3", "12.3", "12.3", "12.3", "11.5", "75.0%"]
    assert "a note" in text


def test_kinds_without_turns_show_dashes_and_no_numbers() -> None:
    rows = [one.split() for one in printed(report([sample(0)])).splitlines()]
    assert ["forked", "0", "-", "-", "-", "-", "-", "-"] in rows


def test_history_is_shown_in_buckets() -> None:
    text = printed(report([sample(0), sample(1)]))
    assert line_of(text, "256 to 511")[3] == "1"


def test_failures_and_turns_that_never_ran_are_said() -> None:
    failed = sample(1, status="failed", error="kv_exhausted: need 2 pages")
    text = printed(report([sample(0), failed]))
    assert "1 of 4 turns failed, 2 were not run" in text
    assert "1 × kv_exhausted: need 2 pages" in text


def test_every_turn_is_listed_on_request_only() -> None:
    samples = [sample(0), sample(1)]
    assert "Turns, as session.turn" not in printed(report(samples))
    listed = printed(report(samples, per_session=True))
    rows = [line.split() for line in listed.splitlines()]
    assert ["0.1", "warm", "300", "40", "30", "0", *TIMES] in rows
    assert ["0.1", "warm", "1.00", "10.5"] in rows


def test_the_widest_tables_fit_in_80_columns() -> None:
    wide = sample(1, ttft_ms=12345.6, server_ttft_ms=12345.6, tpot_ms=1234.5, gaps_ms=(1234.5,))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(report([wide], per_session=True))
    assert "…" not in capture.get()
    assert "12346" in capture.get()


def test_goodput_has_its_targets_its_shares_and_its_rate() -> None:
    samples = [
        sample(0, ended_ms=2000.0, tpot_ms=4.0),
        sample(1, ended_ms=1000.0, ttft_ms=900.0, tpot_ms=4.0),
        sample(2, ended_ms=1000.0),
    ]
    text = printed(report(samples))
    assert "1 turns have no TPOT, and are neither good nor bad" in text
    assert "Goodput (TTFT ≤ 200 ms and TPOT ≤ 50 ms)" in text
    assert line_of(text.partition("Goodput")[2], "turns   ") == ["turns", "2", "1", "50.0%", "0.50"]
    assert line_of(text, "sessions") == ["sessions", "1", "0", "0.0%"]


def test_every_session_is_summed_up_with_its_turns() -> None:
    samples = [sample(i, ttft_ms=ms, tpot_ms=4.0) for i, ms in enumerate((10.0, 20.0, 300.0))]
    assert "Sessions (ms)" not in printed(report(samples))
    rows = [line.split() for line in printed(report(samples, per_session=True)).splitlines()]
    assert ["0", "3", "20.0", "300.0", "4.00", "2", "no"] in rows


def test_turns_that_were_cut_are_marked_and_counted() -> None:
    samples = [
        sample(0, status="cancelled", cancel_ms=3.5),
        sample(1, status="abandoned"),
    ]
    text = printed(report(samples, per_session=True))
    assert "1 turns were cancelled and 1 left in mid-answer, as planned" in text
    assert line_of(text, "cancel → end")[-5:] == ["1", "3.50", "3.50", "3.50", "3.50"]
    assert "0.0c cold" in text
    assert "0.1a warm" in text


def test_a_client_that_is_late_says_so() -> None:
    assert "The client itself was late" not in printed(report([sample(0, late_ms=0.4)]))
    text = printed(report([sample(0, late_ms=12.0)]))
    assert "it sent turns up to 12.0 ms (p99) after they were due" in text
    assert line_of(text, "sent later than due")[4:6] == ["1", "12.0"]


def test_a_restart_that_brings_nothing_back_is_said() -> None:
    text = printed(report([sample(1, kind="restored", after_restart=True)]))
    assert "For 1 turns behind the restart no page was brought back." in text
    assert line_of(text.partition("Stream")[0], "restored  ")[1:3] == ["1", "12.3"]


def test_a_p99_of_few_values_is_greyed_and_one_of_many_is_not() -> None:
    few = [sample(1, gaps_ms=(4.0,) * 99)]
    many = [sample(1, gaps_ms=(4.0,) * 100)]
    dim = "\x1b[2m4.00\x1b[0m"

    def gap_row(samples: list[TurnSample]) -> str:
        text = printed(report(samples), styled=True)
        return next(line for line in text.splitlines() if "chunk gap" in line)

    assert dim in gap_row(few)
    assert dim not in gap_row(many)


def test_bookkeeping_stands_beside_its_bar() -> None:
    figures = {1: BookkeepingFigures(5.0, 40.0, 2.0, 47.25)}
    text = printed(bookkeeping_report(figures, {1: 100.0}))
    assert line_of(text, "1 ") == ["1", "5.0", "40.0", "2.0", "47.2", "100"]


def test_a_server_with_figures_of_fewer_turns_says_of_how_many() -> None:
    left = sample(1, status="abandoned", server_ttft_ms=None, stages_ms={})
    assert "11.5 (n = 1)" in printed(report([sample(0), sample(1), left]))
