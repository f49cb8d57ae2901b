"""Tables of `bench peers` for people.

Knows: rich, which figures stand where. Does not know: how they were measured.
Invariant: n and both ends stand beside every median ratio; what a peer cannot do is a dash and a
sentence, never a figure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from chatrt.bench.peers import OURS
from chatrt.bench.peers_figures import ONE_STREAM, time_ms
from chatrt.bench.peers_process import PEERS
from chatrt.bench.report import NO_VALUE, distribution_cells, milliseconds, new_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from chatrt.bench.peers import PeersSample
    from chatrt.bench.peers_figures import Row, Spread
    from chatrt.bench.stall_figures import StallFigures

_NAMES = {
    "decode": "decode, per token",
    "decode_speculation": "decode, ours with drafts",
    "prefill": "first token of a prompt",
    "ttft_cold": "TTFT cold",
    "ttft_warm": "TTFT follow-up",
}
_HOW = {
    "llama_cpp": "llama.cpp: llama-cpp-python's own streaming chat completion in a process of its "
    "own, its prefix match on, the same GGUF file; no socket lies between.",
    "transformers": "transformers: generate with a streamer in its own process, its cache kept "
    "over turns; weights of a GGUF file are unpacked to float32; no socket lies between.",
}
_DEFINITIONS = (
    "chatrt: over its socket, from the request frame handed to the socket to the first text delta "
    "read off it. A peer: from the call to the first piece of text. Same words, same template, "
    "greedy, the same number of threads, one at a time, in an order that changes.",
    "decode: (last piece − first piece) / (tokens − 1), drafts forbidden in the first row. cold: a "
    "first turn as long as the history. follow-up: the next turn, its history held. An answer that "
    "ended without any text is timed until its end.",
    "Ratio: a peer's time ÷ ours of the same conversation in the same round; the median [least to "
    "most]. Rows without a length take all of them together.",
)


def peers_report(
    rows: Sequence[Row], peers: Sequence[str], gaps: StallFigures | None, notes: Sequence[str]
) -> RenderableType:
    """The tables; `gaps` None: not measured. `notes` are said below them."""
    parts: list[RenderableType] = [_times_table(rows, peers), _tokens_table(rows, peers)]
    if gaps is not None:
        parts.append(_gaps_table(gaps, peers))
        notes = (*notes, *(f"gaps: {PEERS[peer]} {ONE_STREAM}." for peer in peers))
    how = (_HOW[peer] for peer in peers)
    parts.extend(Text(line, style="dim") for line in (*notes, *how, *_DEFINITIONS))
    return Group(*parts)


def _times_table(rows: Sequence[Row], peers: Sequence[str]) -> Table:
    table = new_table("chatrt and its peers (ms, medians)")
    table.add_column("")
    for heading in ("history", OURS, *(PEERS[peer] for peer in peers)):
        table.add_column(heading, justify="right")
    for peer in peers:
        table.add_column(f"{PEERS[peer]} ÷ {OURS}", justify="right")
        table.add_column("n", justify="right")
    for row in rows:
        ratios = (cell for peer in peers for cell in _ratio_cells(row.ratio[peer]))
        table.add_row(
            _NAMES[row.name],
            "" if row.history is None else str(row.history),
            *(milliseconds(row.time_ms[engine].median) for engine in (OURS, *peers)),
            *ratios,
        )
    return table


def _ratio_cells(ratio: Spread) -> tuple[str, str]:
    if ratio.median is None:
        return NO_VALUE, "0"
    return f"{ratio.median:.2f} × [{ratio.min:.2f} to {ratio.max:.2f}]", str(ratio.n)


def _tokens_table(rows: Sequence[Row], peers: Sequence[str]) -> Table:
    engines = (OURS, *peers)
    table = new_table("Tokens of the prompts, and of these computed (medians)")
    table.add_column("")
    table.add_column("history", justify="right")
    for engine in engines:
        table.add_column(PEERS.get(engine, engine), justify="right")
        table.add_column("computed", justify="right")
    for row in rows:
        if row.history is None and row.name.startswith("ttft"):
            continue  # lengths mixed say nothing
        counts = ((row.prompt_tokens[one], row.computed_tokens[one]) for one in engines)
        table.add_row(
            _NAMES[row.name],
            "" if row.history is None else str(row.history),
            *(_count(value) for pair in counts for value in pair),
        )
    return table


def _gaps_table(figures: StallFigures, peers: Sequence[str]) -> Table:
    """Ours only: `ONE_STREAM` says why."""
    table = new_table("Chunk gaps of a stream while another conversation begins (ms)")
    table.add_column("")
    table.add_column("")
    for heading in ("n", "p50", "p95", "p99", "max"):
        table.add_column(heading, justify="right")
    table.add_row(OURS, "alone", *distribution_cells(figures.gap_ms_quiet))
    table.add_row(OURS, "beside a prompt", *distribution_cells(figures.gap_ms_busy))
    for peer in peers:
        table.add_row(PEERS[peer], "", *[NO_VALUE] * 5)
    return table


def _count(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:g}"


def rounds_table(samples: Sequence[PeersSample], peers: Sequence[str]) -> Table:
    """Every turn: a row for each of a round, its time in each engine."""
    engines = (OURS, *peers)
    table = new_table("Every turn, by round (ms)")
    table.add_column("round", justify="right")
    table.add_column("")
    for heading in ("history", *(PEERS.get(engine, engine) for engine in engines)):
        table.add_column(heading, justify="right")
    found = {(s.round_index, s.measure, s.history, s.engine): s for s in samples}
    for turn in dict.fromkeys((s.round_index, s.measure, s.history) for s in samples):
        index, measure, history = turn
        its = (found.get((*turn, engine)) for engine in engines)
        table.add_row(
            str(index + 1),
            _NAMES[measure],
            "" if history is None else str(history),
            *(milliseconds(None if one is None else time_ms(one)) for one in its),
        )
    return table


def install_lines(missing: Mapping[str, Sequence[str]]) -> list[str]:
    """What to do about peers that lack packages, a line each."""
    return [
        f"{PEERS[engine]} is left out: the peers' Python lacks {' and '.join(packages)} "
        "(make bench-peers installs the peers)"
        for engine, packages in missing.items()
    ]
