"""From turns to ratios, with numbers that can be checked by hand."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console

from chatrt.bench.peers import PeersSample, TurnTimes
from chatrt.bench.peers_figures import (
    Row,
    Spread,
    comparisons,
    gaps_document,
    ratios_document,
)
from chatrt.bench.peers_report import install_lines, peers_report, rounds_table
from chatrt.bench.stall_figures import stall_figures

if TYPE_CHECKING:
    from chatrt.bench.peers import Measure


def sample(
    engine: str,
    measure: Measure,
    time_ms: float | None,
    *,
    round_index: int = 0,
    history: int | None = None,
    cached_tokens: int | None = None,
) -> PeersSample:
    """A turn whose time to first text and time per token are the same."""
    times = TurnTimes(100, cached_tokens, 8, ttft_ms=time_ms or 0.0, tpot_ms=time_ms)
    return PeersSample(engine, measure, history, round_index, times)


def row_of(samples: list[PeersSample], name: str, history: int | None = None) -> Row:
    rows = comparisons(samples, ["llama_cpp"])
    return next(row for row in rows if (row.name, row.history) == (name, history))


def test_a_ratio_is_taken_within_a_round_and_not_of_two_medians() -> None:
    ours, theirs = (10.0, 20.0, 90.0), (40.0, 60.0, 90.0)
    samples = [
        sample(engine, "decode", ms, round_index=index)
        for engine, times in (("chatrt", ours), ("llama_cpp", theirs))
        for index, ms in enumerate(times)
    ]
    row = row_of(samples, "decode")
    assert row.ratio == {"llama_cpp": Spread(3.0, 1.0, 4.0, 3)}
    assert row.time_ms["chatrt"] == Spread(20.0, 10.0, 90.0, 3)
    assert row.time_ms["llama_cpp"].median == 60.0


def test_a_round_that_only_one_of_them_ended_makes_no_ratio() -> None:
    samples = [
        sample("chatrt", "decode", 10.0),
        sample("chatrt", "decode", 10.0, round_index=1),
        sample("chatrt", "decode", None, round_index=2),
        sample("llama_cpp", "decode", 50.0),
        sample("llama_cpp", "decode", None, round_index=1),
        sample("llama_cpp", "decode", 50.0, round_index=2),
        sample("llama_cpp", "decode", 50.0, round_index=3),
    ]
    row = row_of(samples, "decode")
    assert row.ratio["llama_cpp"] == Spread(5.0, 5.0, 5.0, 1)
    assert row.time_ms["llama_cpp"].n == 3


def test_lengths_are_paired_with_themselves_alone_and_together() -> None:
    samples = [
        sample(engine, "ttft_warm", ms * history, history=history, round_index=index)
        for engine, ms in (("chatrt", 1.0), ("llama_cpp", 3.0))
        for history in (260, 920)
        for index in (0, 1)
    ]
    assert row_of(samples, "ttft_warm").ratio["llama_cpp"] == Spread(3.0, 3.0, 3.0, 4)
    assert row_of(samples, "ttft_warm", 920).ratio["llama_cpp"].n == 2
    assert row_of(samples, "ttft_warm", 260).time_ms["chatrt"].median == 260.0


def test_a_peers_plain_decode_stands_against_ours_with_drafts_too() -> None:
    samples = [
        sample("chatrt", "decode", 4.0),
        sample("chatrt", "decode_speculation", 2.0),
        sample("llama_cpp", "decode", 8.0),
    ]
    assert row_of(samples, "decode").ratio["llama_cpp"].median == 2.0
    assert row_of(samples, "decode_speculation").ratio["llama_cpp"].median == 4.0


def test_time_per_token_runs_from_the_first_piece_to_the_last() -> None:
    times = TurnTimes.of_pieces(30, 20, 5, [100.0, 110.0, 140.0], 141.0)
    assert times == TurnTimes(30, 20, 5, ttft_ms=100.0, tpot_ms=10.0)
    assert TurnTimes.of_pieces(30, None, 1, [100.0], 101.0).tpot_ms is None
    # Several tokens that came as one piece have no time between them.
    assert TurnTimes.of_pieces(30, None, 5, [100.0], 101.0).tpot_ms is None


def test_an_answer_that_the_model_ends_at_once_is_timed_until_its_end() -> None:
    times = TurnTimes.of_pieces(30, 20, 1, [], 101.0)
    assert times == TurnTimes(30, 20, 1, ttft_ms=101.0, tpot_ms=None)


def test_the_document_has_every_peer_and_null_for_what_was_not_measured() -> None:
    samples = [
        sample("chatrt", "prefill", 10.0, cached_tokens=25),
        sample("llama_cpp", "prefill", 50.0),
        sample("chatrt", "ttft_warm", 10.0, history=260),
        sample("llama_cpp", "ttft_warm", 20.0, history=260),
    ]
    document = ratios_document(comparisons(samples, ["llama_cpp"]), prefill_tokens=512)
    assert document["ratio"]["prefill_512"]["transformers"] is None
    assert document["ratio"]["prefill_512"]["llama_cpp"] == {
        "median": 5.0,
        "min": 5.0,
        "max": 5.0,
        "n": 1,
    }
    assert document["ratio"]["decode"]["llama_cpp"]["n"] == 0
    assert document["computed_tokens"]["prefill_512"] == {
        "chatrt": 75.0,
        "llama_cpp": None,
        "transformers": None,
    }
    assert document["by_history"]["260"]["ratio"]["ttft_warm"]["llama_cpp"]["median"] == 2.0


def test_a_peer_that_serves_one_conversation_has_no_gap_and_a_reason() -> None:
    document = gaps_document(stall_figures([], [], max_gap_ms=30.0))
    assert document["gap_ms"]["chatrt"]["alone"]["n"] == 0
    assert document["gap_ms"]["llama_cpp"] is None
    assert document["gap_ms"]["transformers"] is None
    assert "one conversation at a time" in document["gap_notes"]["llama_cpp"]
    assert gaps_document(None)["gap_ms"]["chatrt"] is None


def test_the_table_shows_the_middle_and_both_ends_of_a_ratio() -> None:
    samples = [
        sample(engine, "decode", ms, round_index=index)
        for engine, times in (("chatrt", (10.0, 10.0)), ("llama_cpp", (20.0, 35.0)))
        for index, ms in enumerate(times)
    ]
    report = peers_report(comparisons(samples, ["llama_cpp"]), ["llama_cpp"], None, ["a note"])
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(report)
    text = console.export_text()
    assert "2.75 × [2.00 to 3.50]" in text
    assert "transformers ÷" not in text
    assert "a note" in text


def test_every_turn_has_its_time_in_each_engine_round_by_round() -> None:
    samples = [
        sample("chatrt", "decode", 10.0),
        sample("llama_cpp", "decode", 20.0),
        sample("llama_cpp", "ttft_warm", 44.0, history=260, round_index=1),
    ]
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(rounds_table(samples, ["llama_cpp"]))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["1", "decode,", "per", "token", "10.0", "20.0"] in lines
    assert ["2", "TTFT", "follow-up", "260", "-", "44.0"] in lines


def test_a_missing_peer_is_one_line_that_says_how_it_is_installed() -> None:
    (line,) = install_lines({"transformers": ["accelerate", "gguf"]})
    assert line == (
        "transformers is left out: the peers' Python lacks accelerate and gguf "
        "(make bench-peers installs the peers)"
    )
