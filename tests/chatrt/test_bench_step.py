"""`bench step`: what is timed and how often, what the figures are, what the tables say."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console

from chatrt.bench.resident import ResidentMemory
from chatrt.bench.step import (
    NATIVE_PROBE,
    NUM_WARM_UP_ROUNDS,
    TORCH_PROBE,
    Room,
    StepBench,
    StepOptions,
    StepSamples,
)
from chatrt.bench.step_figures import StepBytes, step_figures
from chatrt.bench.step_report import step_report
from chatrt.errors import InvalidValue
from chatrt.models.decoder import Logits
from chatrt.testing.engine import PAGE_SIZE, tiny_target
from chatrt.testing.tokenizer import tiny_tokenizer
from chatrt_kernels.reference import ReferenceOps

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from chatrt.batch import Batch
    from chatrt.engine import Target
    from chatrt.kvcache import KVCache

ROOM = Room(max_rows=64, max_sequences=64, max_context=256)
SMALL = StepOptions(rows=(1, 5), prefill=(32, 100), contexts=(0, 200), repeats=3)
FAMILIES = {"linear": 3.0, "attention": 1.0}


class Clock:
    """Stands still but for what the fake forward takes."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class ProbingOps(ReferenceOps):
    """The reference with a probe of its own, which knows the bandwidth or does not."""

    def __init__(self, gbs: float | None = 10.0) -> None:
        super().__init__()
        self.gbs = gbs

    def read_bandwidth_gbs(self) -> float | None:
        return self.gbs


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return tiny_target(tiny_tokenizer(tmp_path))


def priced(target: Target, monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, list[Batch]]:
    """5 ms a forward, 1 ms a further row, 0.01 ms a position of context; and what was forwarded."""
    clock, forwards = Clock(), []

    def forward(batch: Batch, _kv: object) -> Logits:
        forwards.append(replace(batch, meta=replace(batch.meta, kv_len=batch.meta.kv_len.clone())))
        context = int(batch.meta.kv_len.sum()) - batch.num_rows
        clock.now_ns += int((5 + (batch.num_rows - 1) + 0.01 * context) * 1e6)
        return Logits(torch.zeros(1, 1))

    monkeypatch.setattr(target.decoder, "forward", forward)
    return clock, forwards


def bench(target: Target, options: StepOptions = SMALL, **fields: Any) -> StepBench:
    return StepBench(target, ProbingOps(), options, ROOM, **fields)


def test_the_figures_are_those_of_the_forward(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, _ = priced(target, monkeypatch)
    run = bench(target, clock=clock)
    run.run(lambda: None)
    run.run_contended(lambda: None, block_ms=20)
    figures = step_figures(run.samples, StepBytes(weight_bytes=40_000_000, kv_bytes_per_token=1000))
    assert figures.rows_ms == {1: 5.0, 5: 9.0}
    assert figures.rows_ratio == {1: 1.0, 5: 1.8}
    assert figures.sequences_ms == {4: 8.0}
    assert figures.decode_ms == 5.0
    assert figures.decode_ms_by_context == pytest.approx({0: 5.0, 200: 7.0})
    assert figures.kv_bytes_by_context == {0: 0, 200: 200_000}
    # 100 tokens are chunks of 64 and 36 rows
    assert figures.prefill_ms == pytest.approx({32: 36.0, 100: 68.0 + 40.64})
    assert figures.prefill_tps[32] == pytest.approx(32 / 0.036)
    # 40 MB at 10 GB/s take 4 ms of the 5; 200 kB of KV take 0.02 ms, and 2 ms came on top
    assert figures.roofline_fraction == pytest.approx(0.8)
    assert figures.roofline_fraction_by_context[200] == pytest.approx(4.02 / 7)
    assert figures.kv_added_ratio == pytest.approx(100)
    assert figures.contended_ratio == pytest.approx(1.0)
    assert len(run.samples.contended_ms) == len(run.samples.quiet_ms) == 8


def test_every_round_times_each_case_once_and_starts_with_another(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, forwards = priced(target, monkeypatch)
    rounds: list[int] = []
    run = bench(target, replace(SMALL, rows=(2, 3), contexts=(), prefill=()), clock=clock)
    run.run(lambda: rounds.append(len(forwards)))
    assert len(rounds) == run.num_rounds
    in_rounds = [
        [batch.num_rows for batch in forwards[start:stop]]
        for start, stop in itertools.pairwise(rounds)
    ]
    measured = in_rounds[NUM_WARM_UP_ROUNDS - 1 :][: SMALL.repeats]
    assert measured == [[1, 2, 3, 4], [2, 3, 4, 1], [3, 4, 1, 2]]
    counts = {len(times) for kind in run.samples.forward_ms.values() for times in kind.values()}
    assert counts == {SMALL.repeats}
    assert run.samples.read_bandwidth_gbs == [10.0] * SMALL.repeats


def test_rows_are_of_one_sequence_and_all_with_logits(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, forwards = priced(target, monkeypatch)
    bench(target, replace(SMALL, rows=(7,), prefill=(100,)), clock=clock).run(lambda: None)
    shapes = {(b.num_sequences, b.num_rows, b.logit_rows.shape[0]) for b in forwards}
    # one row, seven, four sequences, and the chunks of the prompt (the history's last is 37 long)
    assert shapes == {(1, 1, 1), (1, 7, 7), (4, 4, 4), (1, 64, 0), (1, 36, 1), (1, 9, 1)}


def test_contexts_and_prompts_are_clipped_to_the_conversation(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, _ = priced(target, monkeypatch)
    options = replace(SMALL, contexts=(0, 1024, 4096), prefill=(0, 16, 9999), repeats=1)
    run = bench(target, options, clock=clock)
    run.run(lambda: None)
    assert list(run.samples.forward_ms["context"]) == [255]
    assert list(run.samples.forward_ms["prefill"]) == [16, 255]


def test_what_a_forward_reads_was_written_before(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, finite = target.decoder.forward, []

    def checked(batch: Batch, kv: KVCache) -> Logits:
        logits = forward(batch, kv)
        finite.append(bool(logits.values.isfinite().all()))
        return logits

    monkeypatch.setattr(target.decoder, "forward", checked)
    bench(target).run(lambda: None)  # rows that nobody wrote are NaN
    assert finite
    assert all(finite)


def test_more_rows_than_a_step_holds_are_refused(target: Target) -> None:
    with pytest.raises(InvalidValue, match="--rows has 65, a step holds 64 rows"):
        bench(target, replace(SMALL, rows=(1, 65)))


def test_a_tiny_pool_is_measured_without_several_sequences(tmp_path: Path) -> None:
    target = tiny_target(tiny_tokenizer(tmp_path), num_pages=1)
    run = StepBench(
        target, ProbingOps(), replace(SMALL, repeats=1), replace(ROOM, max_context=PAGE_SIZE)
    )
    run.run(lambda: None)
    assert "sequences" not in run.samples.forward_ms
    assert list(run.samples.forward_ms["context"]) == [PAGE_SIZE - 1]


@pytest.mark.parametrize(
    ("ops", "probe"),
    [
        (ProbingOps(), NATIVE_PROBE),
        (ProbingOps(None), TORCH_PROBE),
        (ReferenceOps(), TORCH_PROBE),
    ],
)
def test_the_bandwidth_is_the_executors_own_where_it_can(
    ops: ReferenceOps, probe: str, target: Target
) -> None:
    run = StepBench(target, ops, StepOptions((1,), (), (), repeats=1), ROOM)
    run.run(lambda: None)
    assert run.read_probe == probe
    (bandwidth_gbs,) = run.samples.read_bandwidth_gbs
    assert (bandwidth_gbs == 10.0) == (probe == NATIVE_PROBE)
    assert bandwidth_gbs > 0


@pytest.mark.parametrize("parts", [FAMILIES, None])
def test_parts_are_shown_where_the_decoder_times_them(
    parts: Mapping[str, float] | None, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.decoder, "profile", lambda _batch, _kv: parts, raising=False)
    run = bench(target)
    run.run(lambda: None)
    figures = step_figures(run.samples, StepBytes(1, 1))
    assert figures.stage_ms == parts
    text = report_text(run)
    if parts is None:
        assert figures.stage_ms_by_case is None
        assert "does not time its parts" in text
    else:
        assert figures.stage_ms_by_case is not None
        # two chunks
        assert figures.stage_ms_by_case["prefill 100"] == {"linear": 6.0, "attention": 2.0}
        assert "attention" in text


def test_a_step_reads_the_layers_and_the_head_once(target: Target) -> None:
    weights = target.decoder.weights
    config = target.decoder.config
    end = config.vocab_size * config.hidden_size * 4
    layers = weights.num_bytes - 2 * end
    kv_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    assert StepBytes.of(weights, target.kv) == StepBytes(layers + end, kv_per_token)
    tied = replace(weights, head=weights.embedding)
    assert StepBytes.of(tied, target.kv) == StepBytes(layers + end, kv_per_token)


def test_an_interrupted_run_has_the_figures_that_it_can_have() -> None:
    figures = step_figures(StepSamples(), StepBytes(1, 1))
    assert (figures.decode_ms, figures.roofline_fraction, figures.contended_ratio) == (None,) * 3
    assert figures.rows_ms == figures.kv_added_ratio_by_context == {}
    partial = StepSamples(forward_ms={"context": {64: [2.0]}, "rows": {5: [4.0]}})
    figures = step_figures(partial, StepBytes(1, 1))
    assert figures.decode_ms_by_context == {64: 2.0}
    assert (figures.rows_ms, figures.rows_ratio) == ({5: 4.0}, {})


def report_text(run: StepBench) -> str:
    report = step_report(
        step_figures(run.samples, StepBytes(40_000_000, 1000)),
        run.samples,
        ResidentMemory(None, 3 * 2**20, 2**20, None),
        load_s=1.25,
        read_probe=run.read_probe,
        notes=["a note"],
    )
    console = Console(width=100)
    with console.capture() as capture:
        console.print(report)
    return capture.get()


def test_the_tables_show_medians_with_their_number(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, _ = priced(target, monkeypatch)
    run = bench(target, clock=clock)
    assert "Rows (ms)" in report_text(run)  # before anything was measured
    run.run(lambda: None)
    run.samples.turn_ms["greedy"] = [0.25]
    lines = [line.split() for line in report_text(run).splitlines()]
    assert ["5", "3", "9.000", "9.000", "to", "9.000", "1.80"] in lines
    assert ["read", "bandwidth", "(native)", "10.0", "GB/s"] in lines
    assert ["engine", "beside", "the", "forward,", "greedy", "0.250", "ms"] in lines
    assert ["of", "it", "weights", "3.0", "MiB"] in lines
    assert ["of", "it", "other", "-"] in lines
