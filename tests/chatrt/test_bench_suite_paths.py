"""README's figures lie where the measurements' own code puts them: each one is told."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from chatrt.bench.document import encode_line
from chatrt.bench.figures import session_figures
from chatrt.bench.peers_figures import comparisons, ratios_document
from chatrt.bench.quality import Perplexities, QualityFigures
from chatrt.bench.resident import ResidentMemory
from chatrt.bench.speculation_figures import figures_by_temperature
from chatrt.bench.stall import PromptSample, StreamSample
from chatrt.bench.stall_figures import stall_figures
from chatrt.bench.step import StepSamples
from chatrt.bench.step_figures import StepBytes, step_figures
from chatrt.bench.suite import ROWS
from chatrt.bench.terminal import CASES, PaintSample, StartSample
from chatrt.bench.terminal_report import terminal_figures
from chatrt.bench.turn_figures import TurnFigures
from chatrt.turn import SpeculationFigures
from tests.chatrt import test_bench_figures, test_bench_peers_figures
from tests.chatrt.test_bench_speculation_figures import pair

if TYPE_CHECKING:
    from chatrt.bench.peers import Measure
    from chatrt.bench.suite import Document


def step_document() -> dict[str, Any]:
    samples = StepSamples(
        forward_ms={
            "rows": {1: [3.0], 5: [4.0], 8: [5.0], 16: [9.0]},
            "context": {4096: [7.0]},
            "prefill": {512: [300.0]},
        },
        read_bandwidth_gbs=[30.0],
        turn_ms={"greedy": [0.2], "sampled": [0.3]},
        quiet_ms=[3.0],
        contended_ms=[5.0],
    )
    memory = ResidentMemory(300_000_000, 90_000_000, 10**9, 20_000_000)
    figures = step_figures(samples, StepBytes(96_000_000, 23_040))
    return dataclasses.asdict(figures) | {
        "load_s": 2.0,
        "memory": dataclasses.asdict(memory) | {"other_bytes": memory.other_bytes},
    }


def quality_document() -> dict[str, Any]:
    return dataclasses.asdict(QualityFigures(Perplexities(9.0, 9.0), 1.0, 0.001, 0.99, 0.5, 100))


def sessions_document() -> dict[str, Any]:
    times: dict[str, Any] = {"ttft_ms": 9.0, "server_ttft_ms": 8.5, "tpot_ms": 4.0}
    kinds: tuple[Any, ...] = ("cold", "warm", "forked")
    samples = [test_bench_figures.sample(kind, **times) for kind in kinds]
    figures = session_figures(samples, num_planned=len(samples))
    return dataclasses.asdict(figures) | {"duration_s": 9.0}


def terminal_document() -> dict[str, Any]:
    paints = [PaintSample(case, 0, 50.0, 10.0) for case in CASES]
    return dataclasses.asdict(terminal_figures([StartSample(500.0)], paints))


def stall_document() -> dict[str, Any]:
    streams = [StreamSample(0, 0, 0.0, [5.0 * at for at in range(30)], [1] * 30)]
    figures = TurnFigures(input_tokens=4096, ttft_ms=20.0)
    prompts = [
        PromptSample(0, False, -30.0, -10.0, figures),
        PromptSample(0, True, 92.0, 112.0, figures),
    ]
    return dataclasses.asdict(stall_figures(streams, prompts, max_gap_ms=20.0))


def speculation_document() -> dict[str, Any]:
    drafted = SpeculationFigures(steps=5, emitted=10, depths=(0, 5))
    pairs = [
        pair(name, temperature=one, on_ms=5.0, speculation=drafted)
        for one in (0.0, 0.8, 2.0)
        for name in "ab"
    ]
    found = figures_by_temperature(pairs, seed=0)
    return {"drafters": {"auto": {f"{t:g}": dataclasses.asdict(one) for t, one in found.items()}}}


def peers_document() -> dict[str, Any]:
    measures: tuple[Measure, ...] = (
        *("decode", "decode_speculation", "prefill"),
        *("ttft_cold", "ttft_warm"),
    )
    samples = [
        test_bench_peers_figures.sample(engine, measure, 10.0, history=260)
        for engine in ("chatrt", "llama_cpp", "transformers")
        for measure in measures
    ]
    rows = comparisons(samples, ["llama_cpp", "transformers"])
    return ratios_document(rows, prefill_tokens=512)


DOCUMENTS = {
    "step": step_document(),
    "quality": quality_document(),
    "one-session": sessions_document(),
    "sessions": sessions_document(),
    "terminal": terminal_document(),
    "stall": stall_document(),
    "speculation": speculation_document(),
    "speculation-depth-4": speculation_document(),
    "speculation-random": speculation_document(),
    "speculation-at-once": speculation_document(),
    "peers": peers_document(),
}
MEASURED_FOR_REAL = "bookkeeping"  # in test_bench_suite


def saved(document: dict[str, Any]) -> Document:
    return msgspec.json.decode(encode_line(document), type=dict[str, Any])


def test_every_run_that_is_told_has_a_document_here() -> None:
    assert {row.run for row in ROWS} == {*DOCUMENTS, MEASURED_FOR_REAL}


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.run in DOCUMENTS], ids=lambda row: row.what[:40]
)
def test_every_figure_of_a_line_is_found_in_its_document(row: Any) -> None:
    told = row.told(saved(DOCUMENTS[row.run]))
    assert len(told) == len(row.figures)
    assert all(one.text for one in told)
