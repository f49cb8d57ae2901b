"""Tables of a measurement for people.

Knows: rich, which figures stand where. Does not know: how they were measured.
Invariant: n stands beside every percentile, and a p99 of fewer than 100 values is greyed.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from chatrt.bench.figures import P99_NEEDS
from chatrt.bench.turn_sample import ABANDONED, CANCELLED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from chatrt.bench.bookkeeping import BookkeepingFigures
    from chatrt.bench.figures import Distribution, SessionFigures
    from chatrt.bench.goodput import Goodput, SessionSummary
    from chatrt.bench.metrics_cost import MetricsCost
    from chatrt.bench.turn_sample import TurnSample

NO_VALUE = "-"
_TURN = ("turn", "kind")
_MARKS = {CANCELLED: "c", ABANDONED: "a"}
LATE_MS = 5.0  # a client that is later than that says so: its own figures are in doubt
_NARROW = (0, 0)  # the widest tables fit in 80 columns
_DEFINITIONS = (
    "TTFT (client): request frame handed to the socket → first text delta read off the socket, "
    "before parsing. Server: request read off the socket → first delta handed to the transport.",
    "cold: nothing cached but the template's own start and what all sessions share. warm: "
    "follow-up on a resident tip. forked: branch of a shared prefix. restored: pages brought back "
    "from host memory or disk.",
    "ahead: tokens computed while the message was typed. first sample: the stage that chooses the "
    "first token. Goodput: turns whose TTFT and TPOT both meet their targets.",
    "TPOT: (last token − first token) / (tokens − 1), server. "
    "Chunk gap: between two deltas as they arrive, client; a chunk may hold several tokens.",
    f"Percentiles are nearest-rank; p99 is greyed below n = {P99_NEEDS}.",
)


def sessions_report(
    figures: SessionFigures,
    samples: Sequence[TurnSample],
    *,
    per_session: bool,
    notes: Sequence[str],
) -> RenderableType:
    """The tables of `bench sessions`; `notes` are said below them."""
    parts: list[RenderableType] = [
        _ttft_table(figures),
        _tokens_table(figures),
        _history_table(figures),
        _stages_table(figures),
        _goodput_table(figures.goodput),
    ]
    if per_session:
        ordered = sorted(samples, key=lambda s: (s.session_index, s.turn_index))
        parts += [_turns_table(ordered), _turn_stages_table(ordered)]
        parts.append(_sessions_table(figures.by_session))
    failures = failure_lines(figures.failures, figures.failed, figures.not_run, figures.turns)
    parts.extend(Text(line, style="red") for line in failures)
    lines = (*_what_else_happened(figures), *notes, *_DEFINITIONS)
    parts.extend(Text(line, style="dim") for line in lines)
    return Group(*parts)


def bookkeeping_report(
    figures: Mapping[int, BookkeepingFigures],
    bars_us: Mapping[int, float],
    metrics: MetricsCost | None = None,
) -> RenderableType:
    """The tables of `bench bookkeeping`; `metrics` is what they add to a step."""
    table = new_table("Bookkeeping of one step (µs, medians; model stubbed)")
    for name in ("sessions", "plan", "batch", "commit", "together", "at most"):
        table.add_column(name, justify="right")
    for num_sessions, one in figures.items():
        bar_us = bars_us.get(num_sessions)
        over = bar_us is not None and one.total_us > bar_us
        table.add_row(
            str(num_sessions),
            *(f"{value:.1f}" for value in (one.plan_us, one.batch_us, one.commit_us)),
            Text(f"{one.total_us:.1f}", style="red" if over else ""),
            NO_VALUE if bar_us is None else f"{bar_us:.0f}",
        )
    return table if metrics is None else Group(table, _metrics_table(metrics))


def _metrics_table(cost: MetricsCost) -> Table:
    table = new_table(
        f"Metrics of one step of {cost.num_streams} streams (µs, medians; model stubbed; "
        f"each turn has {cost.tokens_per_turn} chunks)"
    )
    for name in ("chunks", "turns' ends", "engine's note", "together", "at most"):
        table.add_column(name, justify="right")
    table.add_row(
        *(f"{value:.1f}" for value in (cost.chunks_us, cost.turns_us, cost.notes_us)),
        Text(f"{cost.total_us:.1f}", style="" if cost.within else "red"),
        f"{cost.at_most_us:.0f}",
    )
    return table


def new_table(title: str, *, padding: tuple[int, int] = (0, 1)) -> Table:
    """An empty table as all measurements have them."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=padding,
        collapse_padding=True,
    )


def _ttft_table(figures: SessionFigures) -> Table:
    table = new_table("Time to first token (ms)")
    table.add_column("turns")
    for name in ("n", "p50", "p95", "p99", "max", "server p50", "cached"):
        table.add_column(name, justify="right")
    for kind, ttft in figures.ttft_ms.items():
        cached = figures.cached_fraction[kind]
        table.add_row(
            kind,
            *distribution_cells(ttft),
            _server_cell(figures.server_ttft_ms[kind], ttft.n),
            NO_VALUE if cached is None else f"{cached:.1%}",
        )
    return table


def _server_cell(server: Distribution, num_clients: int) -> str:
    """The median, and how many turns it is of where the client has times of more turns."""
    few = f" (n = {server.n})" if server.n != num_clients else ""
    return milliseconds(server.p50) + few


def _tokens_table(figures: SessionFigures) -> Table:
    table = new_table("Stream (ms)")
    table.add_column("")
    for name in ("n", "p50", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    table.add_row("TPOT", *distribution_cells(figures.tpot_ms))
    table.add_row("chunk gap", *distribution_cells(figures.gap_ms))
    table.add_row("client TTFT - server TTFT", *distribution_cells(figures.client_minus_server_ms))
    table.add_row("sent later than due", *distribution_cells(figures.late_ms))
    if figures.cancelled:
        table.add_row("cancel → end of the answer", *distribution_cells(figures.cancel_ms))
    return table


def _history_table(figures: SessionFigures) -> Table:
    table = new_table("TTFT of follow-ups by history (ms)")
    table.add_column("history tokens", justify="right")
    for name in ("n", "p50", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    for bucket in figures.ttft_by_history_tokens:
        table.add_row(
            f"{bucket.from_tokens} to {bucket.to_tokens - 1}", *distribution_cells(bucket.ttft_ms)
        )
    return table


def _stages_table(figures: SessionFigures) -> Table:
    table = new_table("Stages of the server's TTFT (ms, medians)")
    table.add_column("turns")
    names = dict.fromkeys(name for stages in figures.stages_ms.values() for name in stages)
    for name in names:
        table.add_column(stage_name(name), justify="right")
    for kind, stages in figures.stages_ms.items():
        table.add_row(kind, *(milliseconds(stages.get(name)) for name in names))
    return table


def _goodput_table(goodput: Goodput) -> Table:
    table = new_table(
        f"Goodput (TTFT ≤ {goodput.ttft_target_ms:g} ms and TPOT ≤ {goodput.tpot_target_ms:g} ms)"
    )
    table.add_column("")
    for name in ("n", "meet both", "share", "per second"):
        table.add_column(name, justify="right")
    per_second = NO_VALUE if goodput.turns_per_s is None else f"{goodput.turns_per_s:.2f}"
    for name, number, good, share, rate in (
        ("turns", goodput.turns, goodput.good_turns, goodput.turns_share, per_second),
        ("sessions", goodput.sessions, goodput.good_sessions, goodput.sessions_share, ""),
    ):
        cell = NO_VALUE if share is None else f"{share:.1%}"
        table.add_row(name, str(number), str(good), cell, rate)
    return table


def _what_else_happened(figures: SessionFigures) -> list[str]:
    """What a person may not expect of the tables above."""
    lines = []
    if figures.cancelled or figures.abandoned:
        lines.append(
            f"{figures.cancelled} turns were cancelled and {figures.abandoned} left in mid-answer, "
            "as planned: their TTFT counts."
        )
    if figures.goodput.not_judged:
        lines.append(
            f"{figures.goodput.not_judged} turns have no TPOT, and are neither good nor bad: left "
            "or cancelled early, or a single token long."
        )
    if figures.restored_nothing:
        lines.append(
            f"For {figures.restored_nothing} turns behind the restart no page was brought back."
        )
    late_ms = figures.late_ms.p99
    if late_ms is not None and late_ms > LATE_MS:
        lines.append(
            f"The client itself was late: it sent turns up to {late_ms:.1f} ms (p99) after they "
            "were due."
        )
    return lines


def _sessions_table(summaries: Sequence[SessionSummary]) -> Table:
    table = new_table("Sessions (ms)")
    headings = ("session", "turns", "TTFT p50", "TTFT worst", "TPOT p50", "meet both", "all do")
    for heading in headings:
        table.add_column(heading, justify="right")
    for one in summaries:
        table.add_row(
            str(one.session_index),
            str(one.turns),
            milliseconds(one.ttft_p50_ms),
            milliseconds(one.ttft_worst_ms),
            milliseconds(one.tpot_ms),
            str(one.good_turns),
            NO_VALUE if one.meets_targets is None else "yes" if one.meets_targets else "no",
        )
    return table


def _turns_table(samples: Sequence[TurnSample]) -> Table:
    table = new_table("Turns, as session.turn (ms; c: cancelled, a: abandoned)", padding=_NARROW)
    counts = ("history", "input", "cached", "ahead")
    for heading in (*_TURN, *counts, "TTFT", "server", "TPOT", "gap p50", "gap max"):
        table.add_column(heading, justify="left" if heading == "kind" else "right", no_wrap=True)
    for sample in samples:
        gaps = sample.gaps_ms
        table.add_row(
            *_turn_cells(sample),
            str(sample.history_tokens),
            str(sample.input_tokens),
            str(sample.cached_tokens),
            str(sample.typed_ahead_tokens),
            milliseconds(sample.ttft_ms),
            milliseconds(sample.server_ttft_ms),
            milliseconds(sample.tpot_ms),
            milliseconds(statistics.median(gaps) if gaps else None),
            milliseconds(max(gaps, default=None)),
            style="red" if sample.error else "",
        )
    return table


def _turn_stages_table(samples: Sequence[TurnSample]) -> Table:
    names = dict.fromkeys(name for sample in samples for name in sample.stages_ms)
    table = new_table("Stages of the server's TTFT, turn by turn (ms)", padding=_NARROW)
    for heading in (*_TURN, *map(stage_name, names)):
        table.add_column(heading, justify="left" if heading == "kind" else "right", no_wrap=True)
    for sample in samples:
        stages = (milliseconds(sample.stages_ms.get(name)) for name in names)
        table.add_row(*_turn_cells(sample), *stages, style="red" if sample.error else "")
    return table


def _turn_cells(sample: TurnSample) -> tuple[str, str]:
    mark = _MARKS.get(sample.status, "")
    return f"{sample.session_index}.{sample.turn_index}{mark}", sample.kind


def failure_lines(failures: Mapping[str, int], failed: int, not_run: int, turns: int) -> list[str]:
    """What failed, of how many: `turns` ended well. No line if nothing did."""
    lines = [f"{count} × {what}" for what, count in failures.items()]
    if failed or not_run:
        planned = turns + failed + not_run
        lines.insert(0, f"{failed} of {planned} turns failed, {not_run} were not run")
    return lines


def distribution_cells(values: Distribution) -> list[str | Text]:
    """n, p50, p95, p99, max."""
    greyed = "dim" if values.n < P99_NEEDS else ""
    return [
        str(values.n),
        milliseconds(values.p50),
        milliseconds(values.p95),
        Text(milliseconds(values.p99), style=greyed),
        milliseconds(values.max),
    ]


def stage_name(name: str) -> str:
    """`first_sample_ms` in words."""
    return name.removesuffix("_ms").replace("_", " ")


def milliseconds(value: float | None) -> str:
    """`4.21`, `42.1`, `4210`, or a dash for None."""
    if value is None:
        return NO_VALUE
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
