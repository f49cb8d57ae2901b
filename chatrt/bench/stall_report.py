"""Tables of `bench stall` for people.

Knows: rich, which figures stand where. Does not know: how they were measured.
Invariant: n stands beside every percentile, and a p99 of fewer than 100 values is greyed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from chatrt.bench.report import NO_VALUE, distribution_cells, milliseconds, new_table
from chatrt.bench.stall_figures import PROMPT_DELAY_BAR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from chatrt.bench.stall_figures import StallFigures

_DEFINITIONS = (
    "chunk gap: between two deltas of one answer as they arrive, stamped at the socket before "
    "parsing; a chunk may hold several tokens. busy: a long prompt was at work during part of it, "
    "from its frame handed to the socket to its first delta. starting: a stream's own short prompt "
    "was. quiet: neither. Between two answers of a stream no gap is counted.",
    "TTFT (client): request frame handed to the socket → first text delta read off the socket. "
    "delay: a prompt's TTFT beside the streams ÷ that of the one sent alone before it, median; the "
    f"bar is {PROMPT_DELAY_BAR:g}.",
)


def stall_report(runs: Sequence[StallFigures], notes: Sequence[str]) -> RenderableType:
    """The tables, a row for each gap budget; `notes` are said below them."""
    parts: list[RenderableType] = [
        _gaps_table(runs),
        _prompts_table(runs),
        _starts_table(runs),
    ]
    failed = sum(run.failed for run in runs)
    if failed:
        parts.append(Text(f"{failed} long prompts failed", style="red"))
    parts.extend(Text(line, style="dim") for line in (*notes, *_DEFINITIONS))
    return Group(*parts)


def budget_text(max_gap_ms: float | None) -> str:
    """A gap budget in a few characters."""
    return "none" if max_gap_ms is None else f"{max_gap_ms:g}"


def _gaps_table(runs: Sequence[StallFigures]) -> Table:
    table = new_table("Chunk gaps of the running streams (ms)")
    table.add_column("budget", justify="right")
    table.add_column("")
    for heading in ("n", "p50", "p95", "p99", "max", "per token"):
        table.add_column(heading, justify="right")
    table.add_column("p99 within")
    for run in runs:
        budget = budget_text(run.max_gap_ms)
        quiet, busy = run.gap_ms_quiet, run.gap_ms_busy
        table.add_row(
            budget, "quiet", *distribution_cells(quiet), milliseconds(run.tpot_ms.quiet), ""
        )
        table.add_row(
            budget,
            "busy",
            *distribution_cells(busy),
            milliseconds(run.tpot_ms.busy),
            _verdict(run.within_gap),
        )
        if run.gap_ms_starting.n:
            table.add_row(budget, "starting", *distribution_cells(run.gap_ms_starting), "", "")
    return table


def _prompts_table(runs: Sequence[StallFigures]) -> Table:
    table = new_table("Time to first token of the long prompts (ms)")
    for heading in (
        "budget",
        "tokens",
        "cached",
        "n",
        "alone p50",
        "busy p50",
        "busy max",
        "delay",
    ):
        table.add_column(heading, justify="right")
    table.add_column("within")
    for run in runs:
        times = run.prefill_ms
        ratio = run.prompt_delay_ratio
        table.add_row(
            budget_text(run.max_gap_ms),
            NO_VALUE if run.prompt_tokens is None else f"{run.prompt_tokens:g}",
            NO_VALUE if run.cached_tokens is None else f"{run.cached_tokens:g}",
            str(times.busy.n),
            milliseconds(times.alone.p50),
            milliseconds(times.busy.p50),
            milliseconds(times.busy.max),
            NO_VALUE if ratio is None else f"{ratio:.2f} ×",
            _verdict(run.within_delay),
        )
    return table


def _starts_table(runs: Sequence[StallFigures]) -> Table:
    table = new_table("Time to first token of the streams' own questions (ms)")
    table.add_column("budget", justify="right")
    table.add_column("")
    for heading in ("n", "p50", "p95", "p99", "max"):
        table.add_column(heading, justify="right")
    for run in runs:
        times = run.short_prompt_ms
        for name, one in (("quiet", times.quiet), ("beside a long prompt", times.busy)):
            if one.n:
                table.add_row(budget_text(run.max_gap_ms), name, *distribution_cells(one))
    return table


def _verdict(within: bool | None) -> Text:
    if within is None:
        return Text(NO_VALUE)
    return Text("yes") if within else Text("no", style="red")
