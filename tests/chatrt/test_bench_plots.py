"""Plots are drawn from documents, so a document of two turns is enough to draw each of them."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from chatrt.bench.figures import session_figures
from chatrt.bench.histories import CASES, HistorySample
from chatrt.bench.histories_figures import histories_figures
from chatrt.bench.plots import draw_document, require_matplotlib
from chatrt.bench.sessions import TurnSample
from chatrt.bench.stall import PromptSample, StreamSample
from chatrt.bench.stall_figures import stall_figures
from chatrt.bench.step import StepSamples
from chatrt.bench.step_figures import StepBytes, step_figures
from chatrt.bench.turn_figures import TurnFigures
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from pathlib import Path

COMMON = {
    "model": "tiny",
    "device": "cpu",
    "num_threads": 2,
    "started_at": "2026-01-02T03:04:05+00:00",
}
installed = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib, the extra [bench]"
)


def as_saved(benchmark: str, **fields: Any) -> dict[str, Any]:
    """A document as it comes back from its file."""
    encoded = msgspec.json.encode({"benchmark": benchmark, **COMMON, **fields})
    return msgspec.json.decode(encoded, type=dict[str, Any])


def sessions_document(samples: list[TurnSample]) -> dict[str, Any]:
    figures = session_figures(samples, num_planned=len(samples))
    return as_saved(
        "sessions",
        **dataclasses.asdict(figures),
        samples=[dataclasses.asdict(sample) for sample in samples],
    )


def histories_document(samples: list[HistorySample]) -> dict[str, Any]:
    rows = histories_figures(samples, num_planned=len(samples)).by_history
    return as_saved(
        "histories",
        ttft_by_history_tokens={
            str(row.history): {
                **{case: dataclasses.asdict(one) for case, one in row.cases.items()},
                "decode_step_ms": row.decode_step_ms,
                "llama_cpp_published_ms": row.llama_cpp_published_ms,
                "llama_cpp_ms": None,
            }
            for row in rows
        },
        samples=[dataclasses.asdict(sample) for sample in samples],
    )


def stall_document(budgets: tuple[float | None, ...], *, num_deltas: int) -> dict[str, Any]:
    streams = [StreamSample(0, 0, 0.0, [5.0 * at for at in range(num_deltas)], [1] * num_deltas)]
    figures = TurnFigures(input_tokens=4096, ttft_ms=20.0)
    prompts = [
        PromptSample(0, False, -30.0, -10.0, figures),
        PromptSample(0, True, 12.0, 32.0, figures),
    ]
    if num_deltas == 0:
        streams, prompts = [], []
    runs = [stall_figures(streams, prompts, max_gap_ms=budget) for budget in budgets]
    sample = {
        "streams": [dataclasses.asdict(one) for one in streams],
        "prompts": [dataclasses.asdict(one) for one in prompts],
    }
    return as_saved(
        "stall",
        budgets=[dataclasses.asdict(run) for run in runs],
        samples=[{"max_gap_ms": budget, **sample} for budget in budgets],
    )


def turn(kind: Any, index: int, ttft_ms: float, error: str | None = None) -> TurnSample:
    return TurnSample(
        0, index, kind, 0.0, "completed", 100 * index, 120, 90, ttft_ms=ttft_ms, error=error
    )


def step_document(rows: dict[int, list[float]]) -> dict[str, Any]:
    samples = StepSamples(forward_ms={"rows": rows})
    return as_saved(
        "step",
        **dataclasses.asdict(step_figures(samples, StepBytes(96_000_000, 23_040))),
        samples=dataclasses.asdict(samples),
    )


def speculation_document(shares: list[float]) -> dict[str, Any]:
    figures = {"accepted_per_position": {"of_rounds": shares, "of_drafted": shares}}
    return as_saved("speculation", drafters={"auto": {"0": figures, "0.8": figures}})


SESSIONS = [turn("cold", 0, 90.0), turn("warm", 1, 9.0), turn("forked", 2, 8.0)]
HISTORIES = [
    HistorySample(case, history, 0, history, TurnFigures(ttft_ms=5.0 + place, tpot_ms=3.0))
    for history in (260, 920)
    for place, case in enumerate(CASES)
]


def names(paths: list[Path]) -> list[str]:
    return sorted(path.name for path in paths)


@installed
@pytest.mark.parametrize(
    ("document", "plots"),
    [
        (
            sessions_document(SESSIONS),
            ["sessions-ttft-by-history", "sessions-ttft-by-turn", "sessions-ttft-distribution"],
        ),
        (
            histories_document(HISTORIES),
            ["histories-ttft-by-history", "histories-ttft-distribution"],
        ),
        (stall_document((20.0,), num_deltas=9), ["stall-gaps"]),
        (
            stall_document((20.0, 50.0, None), num_deltas=9),
            ["stall-delay-by-budget", "stall-gaps"],
        ),
        (stall_document((None,), num_deltas=9), ["stall-gaps"]),
        (step_document({1: [3.0, 3.2], 16: [9.0]}), ["step-decode-by-rows"]),
        (speculation_document([0.7, 0.4]), ["speculation-acceptance-by-position"]),
    ],
    ids=["sessions", "histories", "stall", "budgets", "no budget", "step", "speculation"],
)
def test_each_plot_is_drawn_as_png_and_svg_on_light_paper_and_on_dark(
    document: dict[str, Any], plots: list[str], tmp_path: Path
) -> None:
    written = draw_document(document, tmp_path / "new" / "folder")
    assert names(written) == [
        f"{name}-{theme}.{suffix}"
        for name in plots
        for theme in ("dark", "light")
        for suffix in ("png", "svg")
    ]
    for path in written:
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG") if path.suffix == ".png" else b"<?xml" in start


@installed
@pytest.mark.parametrize(
    "document",
    [
        sessions_document([]),
        sessions_document([turn("warm", 1, 9.0, error="gone")]),
        histories_document([]),
        stall_document((20.0, None), num_deltas=0),
        step_document({}),
        speculation_document([]),
    ],
    ids=["sessions", "failed sessions", "histories", "stall", "step", "speculation"],
)
def test_a_document_without_values_has_no_plots(document: dict[str, Any], tmp_path: Path) -> None:
    assert draw_document(document, tmp_path) == []


@installed
def test_a_document_made_a_moment_ago_draws_what_its_saved_form_draws(tmp_path: Path) -> None:
    saved = step_document({1: [3.0, 3.2], 16: [9.0]})
    fresh = saved | {"rows_ms": {1: 3.1, 16: 9.0}}
    of_saved, of_fresh = (
        draw_document(document, tmp_path / name)
        for name, document in (("saved", saved), ("fresh", fresh))
    )
    pictures = [
        {path.name: path.read_bytes() for path in paths if path.suffix == ".png"}
        for paths in (of_saved, of_fresh)
    ]
    assert pictures[0] == pictures[1]
    assert pictures[0]["step-decode-by-rows-light.png"] != b""


def test_without_matplotlib_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InvalidValue, match=r"--plot needs matplotlib: .* \[bench\]"):
        require_matplotlib()
