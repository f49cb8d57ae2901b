"""The words, columns and bars of `chatrt top`, and its frame for pipes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from chatrt.wire.live import (
    Acceptance,
    LiveFigures,
    LiveServer,
    LiveTurn,
    RecentTurn,
    Sockets,
    Steps,
)
from chatrt_tui import top_figures
from chatrt_tui.top_figures import LIVE_COLUMNS, ORDERS, RECENT_COLUMNS, Column, fitting, ordered
from chatrt_tui.top_print import frame


@pytest.mark.parametrize(
    ("value_ms", "told"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.04, "0.0"),
        (9.94, "9.9"),
        (9.96, "10"),
        (1234.4, "1234"),
        (123_456.0, "123s"),
    ],
)
def test_milliseconds_take_five_characters(value_ms: float | None, told: str) -> None:
    assert top_figures.ms(value_ms) == told
    assert len(told) <= 5


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.04, "0.0s"), (9.94, "9.9s"), (59.9, "60s"), (60, "1m"), (7300, "2h"), (200_000, "2d")],
)
def test_an_age_takes_four_characters(seconds: float, told: str) -> None:
    assert top_figures.age(seconds) == told
    assert len(told) <= 4


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(5.4, "5 s"), (75, "1 min 15 s"), (7384, "2 h 3 min"), (190_000, "2 d 4 h")],
)
def test_an_uptime_has_two_units(seconds: float, told: str) -> None:
    assert top_figures.uptime(seconds) == told


@pytest.mark.parametrize(
    ("num_bytes", "told"), [(0, "0B"), (999, "999B"), (1400, "1kB"), (32_000_000, "32MB")]
)
def test_bytes_take_six_characters(num_bytes: int, told: str) -> None:
    assert top_figures.size(num_bytes) == told


@pytest.mark.parametrize("num_cells", [1, 7, 78, 200])
@pytest.mark.parametrize("parts", [(0, 0, 9), (1, 1, 16_000), (30, 12, 22), (1, 0, 0)])
def test_the_cells_of_a_bar_add_up_and_nothing_that_is_there_is_missing(
    parts: tuple[int, ...], num_cells: int
) -> None:
    cells = top_figures.cells_of(parts, num_cells)
    assert [count == 0 for count in cells if num_cells > 2] == [
        part == 0 for part in parts if num_cells > 2
    ]
    assert sum(cells) == num_cells or num_cells < len(parts)
    assert top_figures.cells_of((0, 0, 0), num_cells) == [0, 0, 0]


@pytest.mark.parametrize("columns", [LIVE_COLUMNS, RECENT_COLUMNS])
@pytest.mark.parametrize("num_cells", [80, 108, 130])
def test_the_columns_fit_a_screen_of_their_width(
    columns: tuple[Column[LiveTurn], ...] | tuple[Column[RecentTurn], ...], num_cells: int
) -> None:
    shown = [column for column in columns if column.from_cells <= num_cells]
    assert sum(column.width + 2 for column in shown) <= num_cells - 3  # the edges, and a scroll bar
    assert all(len(column.title) <= column.width for column in shown)


def test_a_narrow_screen_leaves_columns_out() -> None:
    narrow, wide = fitting(LIVE_COLUMNS, 80), fitting(LIVE_COLUMNS, 200)
    assert "t/pass" not in [column.title for column in narrow]
    assert [column.title for column in wide] == [column.title for column in LIVE_COLUMNS]


def test_a_turn_of_which_nothing_is_known_yet_fills_its_columns_with_dashes() -> None:
    turn = LiveTurn(response_id="resp_0123456789")
    cells = {column.title: column.text(turn) for column in LIVE_COLUMNS}
    assert cells["response"] == "01234567"
    assert cells["phase"] == "queued"
    assert {cells[name] for name in ("convers.", "TTFT", "gap", "t/pass", "prefix")} == {"–"}


def test_how_a_turn_ended_is_said_in_words() -> None:
    (ended,) = [column for column in RECENT_COLUMNS if column.title == "ended"]
    told = [
        ended.text(RecentTurn(response_id="r", status=status))
        for status in ("end_of_turn", "max_output_tokens", "cancelled", "some_other")
    ]
    assert told == ["complete", "cut off", "cancelled", "some other"]


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_holds_turns_of_which_little_is_known(order: str) -> None:
    turns = [LiveTurn(response_id="a"), LiveTurn(response_id="b", ttft_ms=1.0, mean_gap_ms=1.0)]
    assert {turn.response_id for turn in ordered(turns, order)} == {"a", "b"}


def test_without_turns_and_steps_the_lines_say_that_there_are_none() -> None:
    server = LiveServer(model="m", version="1")
    assert top_figures.headline(server) == "m · up 0 s · 0 connections · v1"
    assert top_figures.work_line(server) == "running 0 · queue 0 · 0 sessions parked · 0 steps/s"
    assert top_figures.drafts_line(server) == "no passes in the last 0 s · outboxes 0B"
    assert [series.title for series in top_figures.meters(LiveFigures())] == [
        "TTFT –",
        "gap –",
        "step –",
    ]


def test_what_nobody_asked_for_is_told_beside_what_runs() -> None:
    server = LiveServer(num_running=1, phases={"decode": 1, "prepared": 2}, num_waiting=3)
    assert top_figures.work_line(server).startswith("running 1: 1 decode · 2 prepared · queue 3")


def test_what_was_compiled_after_the_server_was_ready_is_told_if_anything_was() -> None:
    none = LiveServer(late_compilations={"kernel": 0, "graph": 0})
    assert "compiled" not in top_figures.work_line(none)
    some = LiveServer(late_compilations={"kernel": 2, "graph": 1})
    assert top_figures.work_line(some).endswith(" · 3 compiled late")


def test_a_drafting_server_says_how_drafts_fared_and_over_which_time() -> None:
    made = Acceptance(window_s=60.0, drafted=4, accepted=3, num_passes=2, num_emitted=5)
    server = LiveServer(acceptance=made, sockets=Sockets(1, 2000, 1500))
    assert top_figures.drafts_line(server) == (
        "75 % of 4 drafts accepted, 2.50 tokens/pass in the last 60 s · outboxes 2kB, largest 2kB"
    )


def test_meters_leave_out_turns_without_the_figure() -> None:
    recent = (
        RecentTurn(response_id="a", ttft_ms=10.0, gap_p50_ms=3.0, gap_p95_ms=7.0),
        RecentTurn(response_id="b", status="failed"),
        RecentTurn(response_id="c", ttft_ms=30.0),
    )
    server = LiveServer(steps=Steps(5.0, 1.0, 2.0, 4.0, 3.0, (2.0, 3.0)))
    ttft, gap, step = top_figures.meters(LiveFigures(server=server, recent=recent))
    assert (ttft.values_ms, ttft.title) == ((10.0, 30.0), "TTFT p50 10 p95 30 ms")
    assert (gap.values_ms, gap.title) == ((7.0,), "gap p50 3.0 p95 7.0 ms")
    assert (step.values_ms, step.title) == ((2.0, 3.0), "step p50 2.0 p95 4.0 ms")


def test_a_frame_for_pipes_has_the_same_words_and_no_line_wraps() -> None:
    turn = LiveTurn(response_id="resp_aaaaaaaa1", phase="decode", age_ms=500.0)
    recent = tuple(
        RecentTurn(response_id=f"resp_{name}", status="cancelled") for name in ("old", "new")
    )
    server = LiveServer(model="m" * 100, pages={"free": 1, "held": 2, "total": 3})
    out = io.StringIO()
    console = Console(file=out, width=80)
    console.print(frame(LiveFigures(server=server, turns=(turn,), recent=recent), 80))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].endswith("…")
    assert "cached 0 · other 2 · free 1 of 3 pages · 0 shared" in lines
    assert any(line.startswith("aaaaaaaa") and "decode" in line for line in lines)
    order = [line.split()[0] for line in lines if line.startswith(("old", "new"))]
    assert order == ["new", "old"]


def test_a_frame_of_an_idle_server_has_no_empty_tables() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(frame(LiveFigures(), 80))
    assert "Your turns that run: none" in out.getvalue()
    assert "t/pass" not in out.getvalue()
