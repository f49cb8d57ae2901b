"""Tables of `bench step` for people.

Knows: rich, which figures stand where. Does not know: how they were measured.
Invariant: a median stands beside the middle half of its samples and their number.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from chatrt.kvcache import format_bytes
from chatrt.percentiles import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from chatrt.bench.resident import ResidentMemory
    from chatrt.bench.step import StepSamples
    from chatrt.bench.step_figures import StepFigures

NO_VALUE = "-"
_SAMPLED = ("n", "median", "middle half")
_DEFINITIONS = (
    "Roofline: bytes that the step must read (weights + KV) ÷ its time ÷ the read bandwidth "
    "measured in the same run.",
    "Added ÷ KV: time that the context adds ÷ time that reading its KV takes at that bandwidth.",
    "Rows are those of one sequence, all with logits; each round times every case once. "
    "Times are medians.",
)


def step_report(
    figures: StepFigures,
    samples: StepSamples,
    memory: ResidentMemory,
    *,
    load_s: float,
    read_probe: str,
    notes: Sequence[str],
) -> RenderableType:
    """The tables of `bench step`; `notes` are said below them."""
    parts: list[RenderableType] = [
        _summary_table(figures, memory, load_s=load_s, read_probe=read_probe),
        _rows_table(figures, samples),
        _context_table(figures, samples),
        _prefill_table(figures, samples),
    ]
    if figures.stage_ms_by_case is not None:
        parts.append(_stages_table(figures.stage_ms_by_case))
    else:
        notes = (*notes, "Times by op family: not known, this executor does not time its parts.")
    parts.extend(Text(line, style="dim") for line in (*notes, *_DEFINITIONS))
    return Group(*parts)


def _summary_table(
    figures: StepFigures, memory: ResidentMemory, *, load_s: float, read_probe: str
) -> Table:
    table = _table("One step")
    table.show_header = False
    table.add_column("")
    table.add_column("", justify="right")
    bandwidth = figures.read_bandwidth_gbs
    bandwidth_text = NO_VALUE if bandwidth is None else f"{bandwidth:.1f} GB/s"
    table.add_row(f"read bandwidth ({read_probe})", bandwidth_text)
    table.add_row("weights that a step reads", format_bytes(figures.step_bytes))
    table.add_row("decode, 1 row", _ms_text(figures.decode_ms))
    table.add_row("roofline fraction", _number(figures.roofline_fraction))
    for sampling, overhead_ms in figures.overhead_ms.items():
        table.add_row(f"engine beside the forward, {sampling}", f"{overhead_ms:.3f} ms")
    if figures.contended_ratio is not None:
        table.add_row("speed beside a busy process", f"{figures.contended_ratio:.0%}")
    table.add_row("load to ready", f"{load_s:.1f} s")
    table.add_row("memory behind loading (RssAnon)", _bytes(memory.rss_anon_bytes))
    table.add_row("of it weights", _bytes(memory.weight_bytes))
    table.add_row("of it KV pages touched so far", _bytes(memory.kv_touched_bytes))
    table.add_row("of it other", _bytes(memory.other_bytes))
    return table


def _rows_table(figures: StepFigures, samples: StepSamples) -> Table:
    table = _table("Rows (ms)")
    table.add_column("rows", justify="right")
    _add_sampled_columns(table)
    table.add_column("÷ 1 row", justify="right")
    for count, ratio in figures.rows_ratio.items():
        table.add_row(str(count), *_sampled(samples.forward_ms["rows"][count]), _number(ratio))
    for count, ratio in figures.sequences_ratio.items():
        times_ms = samples.forward_ms["sequences"][count]
        table.add_row(f"1 × {count} sequences", *_sampled(times_ms), _number(ratio))
    return table


def _context_table(figures: StepFigures, samples: StepSamples) -> Table:
    table = _table("Decode of 1 row by context (ms)")
    table.add_column("context", justify="right")
    _add_sampled_columns(table)
    for heading in ("KV", "roofline", "added ÷ KV"):
        table.add_column(heading, justify="right")
    for context, kv_bytes in figures.kv_bytes_by_context.items():
        kind, size = ("context", context) if context else ("rows", 1)
        table.add_row(
            str(context),
            *_sampled(samples.forward_ms[kind][size]),
            format_bytes(kv_bytes),
            _number(figures.roofline_fraction_by_context.get(context)),
            _number(figures.kv_added_ratio_by_context.get(context)),
        )
    return table


def _prefill_table(figures: StepFigures, samples: StepSamples) -> Table:
    table = _table("Prefill (ms)")
    table.add_column("tokens", justify="right")
    _add_sampled_columns(table)
    table.add_column("tokens/s", justify="right")
    for length, tps in figures.prefill_tps.items():
        table.add_row(str(length), *_sampled(samples.forward_ms["prefill"][length]), f"{tps:,.0f}")
    return table


def _stages_table(by_case: dict[str, dict[str, float]]) -> Table:
    table = _table("By op family (ms, medians)")
    table.add_column("forward")
    families = dict.fromkeys(family for parts in by_case.values() for family in parts)
    for family in families:
        table.add_column(family, justify="right")
    for name, parts in by_case.items():
        table.add_row(name, *(_ms(parts.get(family)) for family in families))
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
    )


def _add_sampled_columns(table: Table) -> None:
    for heading in _SAMPLED:
        table.add_column(heading, justify="right")


def _sampled(values: Sequence[float]) -> list[str]:
    ordered = sorted(values)
    quarter, three_quarters = percentile(ordered, 0.25), percentile(ordered, 0.75)
    return [
        str(len(ordered)),
        _ms(statistics.median(ordered)),
        f"{_ms(quarter)} to {_ms(three_quarters)}",
    ]


def _ms(value: float | None) -> str:
    if value is None:
        return NO_VALUE
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _ms_text(value: float | None) -> str:
    return NO_VALUE if value is None else f"{_ms(value)} ms"


def _number(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.2f}"


def _bytes(value: int | None) -> str:
    return NO_VALUE if value is None else format_bytes(value)
