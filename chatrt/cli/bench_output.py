"""What the commands of `chatrt bench` share: how a result is shown, what it says of its settings.

Knows: stdout, stderr, whether they are terminals. Does not know: any one measurement.
Invariant: the last line of stdout is one JSON document.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType

    from chatrt.bench.document import Device
    from chatrt.settings import Resolved

EXIT_INTERRUPTED = 130
_FILE_WIDTH = 140  # columns of a table that no terminal shows
_SHOWN_CHARS = 400  # of one value of a document on a terminal, so that the tables stay in sight

JsonOption = Annotated[bool, typer.Option("--json", help="Print the JSON document only.")]
SaveOption = Annotated[
    Path | None, typer.Option(help="Write the JSON document to this file.", dir_okay=False)
]
PlotOption = Annotated[
    Path | None,
    typer.Option(help="Draw plots into this folder, as PNG and SVG.", file_okay=False),
]
CompareOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="A B", help="Measure nothing: hold two documents of --save side by side."),
]


def show(
    report: RenderableType, document: dict[str, Any], *, as_json: bool, save: Path | None
) -> None:
    """Print the table and the line; on a terminal without what is long, which is named."""
    from rich.console import Console

    from chatrt.bench.document import encode_line

    line = encode_line(document)
    on_terminal = sys.stdout.isatty()
    if not as_json:
        Console(width=None if on_terminal else _FILE_WIDTH).print(report)
        if on_terminal:
            typer.echo(encode_line(_in_short(document)))
    if as_json or not on_terminal:
        typer.echo(line)
    # Last, so that a file that cannot be written costs nothing that was measured.
    if save is not None:
        save.write_text(line + "\n", encoding="utf-8")


def _in_short(document: dict[str, Any]) -> dict[str, Any]:
    """What of a document fits a terminal; `left_out` names the rest, which --save writes."""
    from chatrt.bench.document import encode_line

    long = [n for n, one in document.items() if len(encode_line({n: one})) > _SHOWN_CHARS]
    return {n: one for n, one in document.items() if n not in long} | {"left_out": long}


def require_plots(folder: Path | None) -> None:
    """Raise InvalidValue if plots are asked for that cannot be drawn: before anything is run."""
    if folder is not None:
        from chatrt.bench.plots import require_matplotlib

        require_matplotlib()


def draw(folder: Path | None, document: dict[str, Any]) -> None:
    """Draw a document's plots and say on stderr where they are; nothing without a folder."""
    if folder is None:
        return
    from chatrt.bench.plots import draw_document

    for path in draw_document(document, folder):
        typer.echo(f"drawn: {path}", err=True)


def show_comparison(benchmark: str, a: Path, b: Path, *, as_json: bool, save: Path | None) -> None:
    """Show two saved documents of one measurement side by side.

    Raises:
        InvalidValue: A file is not such a document.
    """
    from chatrt.bench.comparison import compare_documents, comparison_report, read_document

    documents = [read_document(path, benchmark) for path in (a, b)]
    entries = compare_documents(*documents)
    document = {
        "benchmark": f"{benchmark} comparison",
        "a": str(a),
        "b": str(b),
        "entries": entries,
    }
    notes = (f"a is {a}, b is {b}. Figures of different runs differ by the machine's noise too.",)
    show(comparison_report(entries, notes), document, as_json=as_json, save=save)


@contextlib.contextmanager
def counting_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, where that is a terminal; gives what counts one of `total`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def device_of(resolved: Resolved) -> Device:
    """Where these settings run a model on this machine."""
    import torch

    from chatrt.bench.document import Device
    from chatrt.cli.machine import find_machine

    machine = find_machine(resolved.settings)
    cuda = machine.device.type == "cuda"
    return Device(
        torch.cuda.get_device_name(machine.device) if cuda else machine.device.type,
        str(machine.dtype).removeprefix("torch."),
        machine.num_threads,
    )


def changed_settings(resolved: Resolved) -> dict[str, str]:
    """The settings that are not the defaults; those that say where things are, are left out."""
    from chatrt.settings import DEFAULT

    private = ("host", "port", "api_key_file", "allow_origin", "allow_host")
    return {
        name: str(getattr(resolved.settings, name))
        for name, origin in resolved.origins.items()
        if origin != DEFAULT and name not in private
    }
