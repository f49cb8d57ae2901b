"""Tables of `bench histories` for people.

Knows: rich, which figures stand where. Does not know: how they were measured.
Invariant: n stands beside every percentile; what was measured elsewhere or by another program says
so in its heading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from chatrt.bench.report import NO_VALUE, failure_lines, milliseconds, new_table, stage_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from chatrt.bench.histories_figures import CaseFigures, HistoriesFigures, HistoryFigures

_SHOWN = {
    "cold": "cold",
    "follow_up": "follow-up",
    "typed_ahead": "typed ahead",
    "regenerate": "regenerate",
    "fork": "fork",
    "branch_switch": "branch switch",
    "restored": "restored",
}
_DEFINITIONS = (
    "TTFT (client): request frame handed to the socket → first text delta read off the socket, "
    "before parsing. Server: request read off the socket → first delta handed to the transport.",
    "cold: first turn, its prompt as long as the history. follow-up: on the resident tip, sent as "
    "one text. typed ahead: the same, its words sent while they were typed. regenerate: the same "
    "words behind the same parent. fork: other words there. branch switch: back on the other "
    "branch's tip. restored: first turn behind kill -9 and a new start on the same folders.",
    "step: one token without drafts at that length (decode step). steps: server TTFT p50 ÷ step. "
    "computed: prompt tokens that the turn itself had to compute. "
    "restore ÷ cold: its restore stage ÷ the prefill stage of a cold turn of that length.",
    "published: measured elsewhere, another run on another day, prefix cache on. this run: its own "
    "chat completion in its own process, in turns with ours, from the call to the first text.",
)


def histories_report(figures: HistoriesFigures, notes: Sequence[str]) -> RenderableType:
    """The tables; `notes` are said below them."""
    parts: list[RenderableType] = [
        _overview(figures.by_history),
        _peer_table(figures.by_history),
        _cases_table(figures.by_history),
        _stages_table(figures.by_history),
    ]
    failures = failure_lines(figures.failures, figures.failed, figures.not_run, figures.turns)
    parts.extend(Text(line, style="red") for line in failures)
    parts.extend(Text(line, style="dim") for line in (*notes, *_DEFINITIONS))
    return Group(*parts)


def _overview(rows: Sequence[HistoryFigures]) -> Table:
    table = new_table("Time to first token by history (ms, client, p50)")
    for heading in ("history", *_SHOWN.values(), "step"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row.history),
            *(milliseconds(row.cases[case].ttft_ms.p50) for case in _SHOWN),
            milliseconds(row.decode_step_ms),
        )
    return table


def _peer_table(rows: Sequence[HistoryFigures]) -> Table:
    """llama.cpp's follow-up, published and of this run, and how many times ours it takes."""
    table = new_table("llama.cpp's follow-up (ms, p50) and its time ÷ ours")
    for heading in ("history", "published", "÷ follow-up", "÷ typed ahead"):
        table.add_column(heading, justify="right")
    for heading in ("this run", "n", "÷ follow-up", "÷ typed ahead", "cold", "÷ cold"):
        table.add_column(heading, justify="right")
    for row in rows:
        cold, follow_up, typed = (
            row.cases[case].ttft_ms.p50 for case in ("cold", "follow_up", "typed_ahead")
        )
        published = row.llama_cpp_published_ms
        measured, their_cold = row.llama_cpp_ms, row.llama_cpp_cold_ms
        theirs = measured.p50 if measured else None
        begun = their_cold.p50 if their_cold else None
        table.add_row(
            str(row.history),
            *(milliseconds(published), _times(published, follow_up), _times(published, typed)),
            *(milliseconds(theirs), str(measured.n) if measured else NO_VALUE),
            *(_times(theirs, follow_up), _times(theirs, typed)),
            *(milliseconds(begun), _times(begun, cold)),
        )
    return table


def _cases_table(rows: Sequence[HistoryFigures]) -> Table:
    table = new_table("Every case (TTFT in ms; tokens are medians)")
    table.add_column("history", justify="right")
    table.add_column("case")
    for heading in ("n", "p50", "p95", "max", "server p50", "p95", "steps"):
        table.add_column(heading, justify="right")
    for heading in ("behind", "input", "cached", "computed", "ahead", "restore ÷ cold"):
        table.add_column(heading, justify="right")
    for row in rows:
        for case, name in _SHOWN.items():
            if row.cases[case].ttft_ms.n:
                table.add_row(str(row.history), name, *_case_cells(row.cases[case]))
    return table


def _case_cells(case: CaseFigures) -> list[str]:
    ttft, server = case.ttft_ms, case.server_ttft_ms
    counts = (case.history_tokens, case.input_tokens, case.cached_tokens, case.computed_tokens)
    return [
        str(ttft.n),
        *(milliseconds(value) for value in (ttft.p50, ttft.p95, ttft.max)),
        *(milliseconds(value) for value in (server.p50, server.p95)),
        NO_VALUE if case.decode_steps is None else f"{case.decode_steps:.1f}",
        *(_count(value) for value in (*counts, case.typed_ahead_tokens)),
        NO_VALUE if case.restore_of_cold is None else f"{case.restore_of_cold:.1%}",
    ]


def _stages_table(rows: Sequence[HistoryFigures]) -> Table:
    table = new_table("Stages of the server's TTFT (ms, medians)")
    names = dict.fromkeys(
        name for row in rows for case in row.cases.values() for name in case.stages_ms
    )
    table.add_column("history", justify="right")
    table.add_column("case")
    for name in names:
        table.add_column(stage_name(name), justify="right")
    for row in rows:
        for case, shown in _SHOWN.items():
            stages = row.cases[case].stages_ms
            if stages:
                cells = (milliseconds(stages.get(name)) for name in names)
                table.add_row(str(row.history), shown, *cells)
    return table


def _times(theirs: float | None, ours: float | None) -> str:
    return NO_VALUE if theirs is None or not ours else f"{theirs / ours:.1f} ×"


def _count(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:g}"
