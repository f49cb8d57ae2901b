"""README's figures: a table, tables by history and plots, written between two markers.

Knows: Markdown, which documents there are. Does not know: how anything was measured.
Invariant: what is outside the markers stays as it is; what was not measured is not in the table; a
bar that was missed is told by its figure.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from chatrt.bench.suite import ROWS, RUNS, Document, number_at
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from chatrt.bench.suite import Row, Run

BEGIN = "<!-- figures: begin (make bench writes what follows) -->"
END = "<!-- figures: end -->"
_CASES = {
    "cold": "cold",
    "follow_up": "follow-up",
    "typed_ahead": "typed ahead",
    "regenerate": "regenerate",
    "fork": "fork",
    "restored": "after `kill -9`",
}
_LLAMA_BARS = {"follow_up": 5.0, "typed_ahead": 15.0}
_GIB = 2**30


def figures_markdown(documents: Mapping[str, Document], plots: Mapping[str, str]) -> str:
    """The block between the markers.

    Args:
        documents: What was measured, by the name of its run.
        plots: Where each plot lies, relative to the page, without `-light.png`; by its name.
    """
    parts = [_where(documents), _table(documents), _histories(documents), _plots(plots)]
    parts[3:3] = [_drawn_by(documents)] if plots else []
    return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Page:
    """A page in three parts: what stands before its figures, they themselves, what is behind."""

    path: Path
    before: str
    figures: str
    after: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a page that can be written, too; its line ends stay what they are.

        Raises:
            InvalidValue: It cannot be read or written, or the markers are not there, in order and
                once.
        """
        path = path.resolve()  # a link stays one
        try:
            text = path.read_bytes().decode()
        except OSError as error:
            raise InvalidValue(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InvalidValue(f"{path} is not text in UTF-8: {error}") from error
        if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
            raise InvalidValue(f"{path} cannot be written")
        before, begin, rest = text.partition(BEGIN)
        figures, end, after = rest.partition(END)
        if not begin or not end or BEGIN in rest or END in after:
            raise InvalidValue(f"{path} needs the lines {BEGIN} and {END}, in this order and once")
        return cls(path, before, figures, after)

    @property
    def shown(self) -> list[str]:
        """The runs whose figures it has."""
        return [run.name for run in RUNS if f"`{run.command}`" in self.figures]

    def rewrite(self, block: str) -> None:
        """Put `block` between the markers, in one step: the page is never half written.

        Raises:
            OSError: The page cannot be written.
        """
        new = self.path.with_name(self.path.name + ".new")
        text = f"{BEGIN}\n{block}\n{END}"
        if "\r\n" in self.before:
            text = text.replace("\n", "\r\n")
        new.write_bytes(f"{self.before}{text}{self.after}".encode())
        shutil.copymode(self.path, new)
        os.replace(new, self.path)


def check_documents(documents: Mapping[str, Document], folder: Path) -> None:
    """Refuse documents of which no page can be made.

    Raises:
        InvalidValue: One is not a measurement's, or two are of different machines.
    """
    machines: dict[str, str] = {}
    for name, one in documents.items():
        whole = all(isinstance(one.get(key), dict) for key in ("machine", "versions"))
        if not whole or not isinstance(one.get("started_at"), str):
            raise InvalidValue(f"{folder / name}.json is not the document of a measurement")
        machine = one["machine"]
        machines.setdefault(f"{machine.get('processor')}, {machine.get('num_cores')} cores", name)
    if len(machines) > 1:
        told = "; ".join(f"{name} on {machine}" for machine, name in machines.items())
        raise InvalidValue(f"{folder} has documents of {len(machines)} machines: {told}")


def _where(documents: Mapping[str, Document]) -> str:
    """On what all of it was measured, and when."""
    documents = {name: one for name, one in documents.items() if one.get("machine")}
    if not documents:
        return ""
    known = documents.get("step") or next(iter(documents.values()))
    machine, versions = known["machine"], known["versions"]
    days = sorted({one["started_at"][:10] for one in documents.values()})
    revisions = {_revision(one["git"]): None for one in documents.values() if one.get("git")}
    memory = machine.get("memory_bytes")
    facts = [
        machine.get("processor") or "unknown processor",
        f"{machine.get('num_cores')} cores",
        *([f"{memory / _GIB:.0f} GiB"] if memory else []),
        str(machine.get("system")).split()[0],
        f"torch {versions.get('torch')}",
        f"{known.get('model') or 'default model'}",
    ]
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    what = ", ".join(revisions) or "no revision"
    changed = " A plus: files differed from that revision." if "+" in what else ""
    return (
        f"{', '.join(facts)}; {when}, {what}.{changed} What is bold misses its bar in this run; "
        "– is no bar. Each figure is of one run of its command, one at a time."
    )


def _revision(git: Mapping[str, Any]) -> str:
    """Its first letters, and a plus where tracked files differed from it."""
    return f"{git['revision'][:7]}{'+' if git['changed'] else ''}"


def _table(documents: Mapping[str, Document]) -> str:
    runs = {run.name: run for run in RUNS}
    lines = [
        _table_row(row, documents[row.run], runs[row.run]) for row in ROWS if row.run in documents
    ]
    known = [line for line in lines if line]
    if not known:
        return ""
    head = ("| what | measured | bar | command |", "|---|---|---|---|")
    return "\n".join((*head, *known))


def _table_row(row: Row, document: Document, run: Run) -> str:
    told = row.told(document)
    if not told:
        due = "; ".join(figure.bar or "–" for figure in row.figures)
        return f"| {row.what} | **not measured** | {due} | `{run.command}` |"
    texts = [one.text if one.within else f"**{one.text}**" for one in told]
    bars = [one.bar for one in told]
    bar = "; ".join(one or "–" for one in bars) if any(bars) else ""
    return f"| {row.what} | {'; '.join(texts)} | {bar} | `{run.command}` |"


def _histories(documents: Mapping[str, Document]) -> str:
    document = documents.get("histories")
    if document is None or not document["ttft_by_history_tokens"]:
        return ""
    by_length = document["ttft_by_history_tokens"]
    with_peer = any(one.get("llama_cpp_ms") for one in by_length.values())
    heads = ["history, tokens", *_CASES.values(), "decode step"]
    if with_peer:
        heads += ["llama.cpp's follow-up"]
        heads += [f"÷ {_CASES[case]} (≥ {bar:g})" for case, bar in _LLAMA_BARS.items()]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for length, one in by_length.items():
        cells = [f"{int(length):,}"]
        cells += [_number(number_at(one, (case, "ttft_ms", "p50"))) for case in _CASES]
        cells.append(_number(number_at(one, ("decode_step_ms",))))
        lines.append(_line(cells + (_against(one) if with_peer else [])))
    settings = document["settings"]
    peer = " --peer" if with_peer else ""
    said = (
        f"Time to first token by history, milliseconds at the client, medians of "
        f"{settings['repetitions']} conversations of each length, follow-ups of "
        f"{settings['message_words']} words: `chatrt bench histories --repetitions "
        f"{settings['repetitions']}{peer}`"
        + (
            " (llama.cpp on the same file, its prefix cache on, in turns with ours)."
            if peer
            else "."
        )
    )
    return said + "\n\n" + "\n".join(lines)


def _against(one: Mapping[str, Any]) -> list[str]:
    theirs = number_at(one, ("llama_cpp_ms", "p50"))
    cells = [_number(theirs)]
    for case, bar in _LLAMA_BARS.items():
        ours = number_at(one, (case, "ttft_ms", "p50"))
        ratio = theirs / ours if theirs and ours else None
        text = "–" if ratio is None else f"{ratio:.1f}"
        cells.append(f"**{text}**" if ratio is not None and ratio < bar else text)
    return cells


def _drawn_by(documents: Mapping[str, Document]) -> str:
    """Which command drew what."""
    shown = [run for run in RUNS if run.plots and run.name in documents]
    told = (f"{', '.join(run.plots).replace('-', ' ')}: `{run.command}`" for run in shown)
    return f"Plots, in this order: {'; '.join(told)}."


def _plots(plots: Mapping[str, str]) -> str:
    """Pictures side by side, each for light and for dark pages."""
    return "\n".join(
        "<picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{place}-dark.png">'
        f'<img src="{place}-light.png" width="49%" alt="{name}">'
        "</picture>"
        for name, place in plots.items()
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if value < 20 else f"{value:,.0f}"
