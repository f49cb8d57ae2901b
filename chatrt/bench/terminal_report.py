"""From samples of terminals to the figures and tables of `bench terminal`.

Knows: percentiles, how a table looks. Does not know: terminals, servers.
Invariant: a turn whose own figure was not shown takes no part in what painting adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from chatrt.bench.figures import P99_NEEDS, Distribution
from chatrt.bench.report import distribution_cells, new_table
from chatrt.bench.terminal import CASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from chatrt.bench.terminal import PaintSample, StartSample

_DEFINITIONS = (
    "TTFT (painted): Enter written to the terminal → first character of the answer read back "
    "from it. Client: as the status line shows it, whole milliseconds.",
    "cold: first turn of a conversation. follow up, typed ahead: later turns, pasted and sent at "
    "once, or typed and left to rest for a moment before Enter.",
    f"Percentiles are nearest-rank; p99 is greyed below n = {P99_NEEDS}.",
)


@dataclass(frozen=True, slots=True)
class TerminalFigures:
    """Milliseconds; dicts go by case. `painting_ms` is painted minus the client's, turn by turn."""

    prompt_ms: Distribution
    painted_ttft_ms: dict[str, Distribution]
    client_ttft_ms: dict[str, Distribution]
    painting_ms: dict[str, Distribution]


def terminal_figures(
    starts: Sequence[StartSample], paints: Sequence[PaintSample]
) -> TerminalFigures:
    """The figures of a run, whole or interrupted."""
    by_case = {case: [one for one in paints if one.case == case] for case in CASES}
    return TerminalFigures(
        prompt_ms=Distribution.of(one.prompt_ms for one in starts),
        painted_ttft_ms={
            case: Distribution.of(one.painted_ms for one in turns)
            for case, turns in by_case.items()
        },
        client_ttft_ms={
            case: Distribution.of(one.client_ttft_ms for one in turns)
            for case, turns in by_case.items()
        },
        painting_ms={
            case: Distribution.of(
                one.painted_ms - one.client_ttft_ms
                for one in turns
                if one.client_ttft_ms is not None
            )
            for case, turns in by_case.items()
        },
    )


def terminal_report(figures: TerminalFigures, notes: Sequence[str]) -> RenderableType:
    """The table, and `notes` below it."""
    table = new_table("At the terminal (ms)")
    table.add_column("")
    for name in ("n", "p50", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    table.add_row("command to prompt", *distribution_cells(figures.prompt_ms))
    for title, by_case in (
        ("TTFT, painted", figures.painted_ttft_ms),
        ("TTFT, client", figures.client_ttft_ms),
        ("painted − client", figures.painting_ms),
    ):
        for case, one in by_case.items():
            table.add_row(f"{title}, {case.replace('_', ' ')}", *distribution_cells(one))
    return Group(table, *(Text(line, style="dim") for line in (*notes, *_DEFINITIONS)))
