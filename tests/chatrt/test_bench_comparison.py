from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from chatrt.bench.comparison import compare_documents, comparison_report, read_document
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from pathlib import Path

A = {
    "benchmark": "stall",
    "seed": 1,
    "settings": {"num_streams": 2},
    "gap_ms_busy": {"p99": 20.0, "n": 300, "max": 90.0},
    "prefill_ms": {"alone": {"p50": 100.0}},
    "zero": 0.0,
    "within_gap": True,
    "budgets": [{"prompt_delay_ratio": 1.5}],
    "samples": [{"sent_ms": 1.0}],
}
B = {**A, "gap_ms_busy": {"p99": 15.0, "n": 400}, "prefill_ms": {}, "zero": 1.0}


def test_figures_that_both_have_stand_side_by_side() -> None:
    assert compare_documents(A, B) == {
        "gap_ms_busy.p99": {"a": 20.0, "b": 15.0, "ratio": 0.75},
        "zero": {"a": 0.0, "b": 1.0},
        "budgets.0.prompt_delay_ratio": {"a": 1.5, "b": 1.5, "ratio": 1.0},
    }


def test_the_table_has_a_row_for_each_figure_and_no_ratio_to_nothing() -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(comparison_report(compare_documents(A, B), ["a note"]))
    rows = [line.split() for line in capture.get().splitlines()]
    assert ["gap_ms_busy.p99", "20", "15", "0.75"] in rows
    assert ["zero", "0", "1", "-"] in rows
    assert ["a", "note"] in rows


def test_another_measurements_document_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"benchmark": "sessions"}', encoding="utf-8")
    with pytest.raises(InvalidValue, match=r"bench stall, .*a\.json is of 'sessions'"):
        read_document(file, "stall")


def test_a_file_that_is_no_document_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("[", encoding="utf-8")
    with pytest.raises(InvalidValue, match=r"a\.json is not the JSON document"):
        read_document(file, "stall")
