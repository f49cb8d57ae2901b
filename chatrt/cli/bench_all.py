"""`chatrt bench all`: every measurement in turn, and README's figures out of their documents.

Knows: how a measurement runs as a process of its own, where its document goes.
Does not know: what is measured, what a page looks like.
Invariant: one measurement runs at a time; only one that came to its end leaves its document; a page
is rewritten at the end, from all documents that there are.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatrt.cli.bench_child import ended_like_ctrl_c, measure_apart
from chatrt.cli.bench_output import EXIT_INTERRUPTED, JsonOption, SaveOption
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from chatrt.bench.readme import Page
    from chatrt.bench.suite import Run


def all_(
    folder: Annotated[
        Path, typer.Argument(help="Where the documents go, one for each.", file_okay=False)
    ],
    readme: Annotated[
        Path | None,
        typer.Option(help="A page whose figures are rewritten, between its two markers."),
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Where that page's plots go.", file_okay=False)
    ] = None,
    only: Annotated[str | None, typer.Option(help="Measure only these, with commas. [all]")] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Measure nothing that the folder has already.")
    ] = False,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """All measurements, one after the other, and a table of their figures: most of an hour.

    One that was interrupted goes on with --keep. Peers are measured where they are installed.
    """
    page = _check_page(readme, plots)
    if page is not None:
        _tell_changes()
    _check_folder(save)
    run = _AllRuns(folder, _chosen(only), as_json=json)
    run.documents()  # those that cannot be used are told now
    with ended_like_ctrl_c():
        run.play(keep=keep)
    documents = run.documents()
    run.show(documents, save)
    if page is not None:
        _update(page, plots, documents, complete=not run.interrupted and not run.failed)
    if run.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if run.failed:
        raise typer.Exit(1)


class _AllRuns:
    """The processes, one at a time, and what became of them."""

    def __init__(self, folder: Path, chosen: Sequence[Run], *, as_json: bool) -> None:
        self.interrupted = False
        self.failed: dict[str, int] = {}
        self._folder = folder
        self._as_json = as_json
        self._llama = _has_llama()
        self._chosen = chosen
        self._seconds: dict[str, float] = {}

    def play(self, *, keep: bool) -> None:
        """Measure, until the end or Ctrl+C."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for number, run in enumerate(self._chosen, start=1):
            if keep and self._file(run).exists():
                continue
            typer.echo(f"{number} of {len(self._chosen)}: {run.command}", err=True)
            started = time.perf_counter()
            code = self._measure(run)
            if self.interrupted:
                return
            self._seconds[run.name] = time.perf_counter() - started
            if code:
                self.failed[run.name] = code
                typer.echo(f"chatrt: {run.command} ended with {code}", err=True)

    def documents(self) -> dict[str, dict[str, Any]]:
        """Those that lie in the folder, of this run or an earlier one, by the name of their run.

        Raises:
            InvalidValue: One of them cannot be used.
        """
        from chatrt.bench.comparison import read_document
        from chatrt.bench.readme import check_documents
        from chatrt.bench.suite import RUNS

        files = {run.name: self._file(run) for run in RUNS}
        documents = {name: read_document(file) for name, file in files.items() if file.exists()}
        check_documents(documents, self._folder)
        return documents

    def show(self, documents: Mapping[str, Mapping[str, Any]], save: Path | None) -> None:
        """Print the table, and one line of JSON last."""
        from chatrt.bench.document import encode_line, new_document
        from chatrt.bench.readme import figures_markdown
        from chatrt.bench.suite import ROWS

        if not self._as_json:
            typer.echo(figures_markdown(documents, {}))
        if not self._llama:
            typer.echo("llama.cpp is not installed here, make bench-peers does it", err=True)
        document = new_document("all", seed=0, device=None) | {
            "interrupted": self.interrupted,
            "failed": self.failed,
            "duration_s": self._seconds,
            "figures": [
                {
                    "run": row.run,
                    "what": row.what,
                    "told": [dataclasses.asdict(one) for one in row.told(documents[row.run])],
                }
                for row in ROWS
                if row.run in documents
            ],
        }
        line = encode_line(document)
        typer.echo(line)
        if save is not None:
            save.write_text(line + "\n", encoding="utf-8")

    def _file(self, run: Run) -> Path:
        return self._folder / f"{run.name}.json"

    def _measure(self, run: Run) -> int:
        """Run one; its exit code. Its tables are ours, its document stays only if it ended well."""
        new = self._file(run).with_suffix(".new")
        ended = measure_apart(run.command_line(llama=self._llama), new)
        self.interrupted = self.interrupted or ended.interrupted
        if not self._as_json:
            typer.echo(ended.tables)
        if ended.code == 0 and not ended.interrupted:
            os.replace(new, self._file(run))
        else:
            new.unlink(missing_ok=True)
        return ended.code


def _has_llama() -> bool:
    """Whether the interpreter that peers run in has llama.cpp."""
    from chatrt.bench.peers_process import default_peer_python

    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('llama_cpp') is None)"
    return subprocess.run([default_peer_python(), "-c", code], check=False).returncode == 0


def _check_page(readme: Path | None, plots: Path | None) -> Page | None:
    """The page, if it and its plots can be written: known before an hour's work.

    Raises:
        InvalidValue: They cannot.
    """
    from chatrt.bench.plots import require_matplotlib
    from chatrt.bench.readme import Page

    if plots is not None:
        if readme is None:
            raise InvalidValue("--plots is where the plots of a page go, it needs --readme")
        require_matplotlib()
    page = None if readme is None else Page.read(readme)
    if plots is not None:
        try:
            plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidValue(f"--plots {plots} cannot be made: {error.strerror}") from error
    return page


def _check_folder(save: Path | None) -> None:
    """Raise InvalidValue where a document could not be saved."""
    if save is not None and not os.access(save.parent, os.W_OK):
        raise InvalidValue(f"--save {save} cannot be written: {save.parent} is no such folder")


def _tell_changes() -> None:
    """Say before an hour's work that no revision will stand for what is measured."""
    import chatrt
    from chatrt.bench.document import git_revision

    git = git_revision(Path(chatrt.__file__))
    if git is not None and git["changed"]:
        typer.echo(
            f"files differ from revision {git['revision'][:7]}: the page will say so, "
            "commit first for one that others can check",
            err=True,
        )


def _update(
    page: Page,
    plots: Path | None,
    documents: Mapping[str, Mapping[str, Any]],
    *,
    complete: bool,
) -> None:
    """Rewrite the page, unless that would take figures off it, or mix old ones with new ones."""
    lost = [name for name in page.shown if name not in documents]
    if not complete or lost:
        reason = f"not measured here: {', '.join(lost)}" if lost else "not all was measured"
        typer.echo(f"{page.path.name} is left as it was, {reason}; --keep goes on", err=True)
        return
    _rewrite(page, plots, documents)


def _rewrite(page: Page, plots: Path | None, documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the page's plots and put its figures in."""
    from chatrt.bench.plots import draw_document
    from chatrt.bench.readme import figures_markdown
    from chatrt.bench.suite import RUNS

    places: dict[str, str] = {}
    for run in RUNS:
        if plots is None or not run.plots or run.name not in documents:
            continue
        document = documents[run.name]
        for path in draw_document(document, plots, only=run.plots, suffixes=("png",)):
            name = path.name.removesuffix("-light.png").removesuffix("-dark.png")
            place = os.path.relpath(path.resolve().parent / name, page.path.parent)
            places[name.replace("-", " ")] = Path(place).as_posix()
    page.rewrite(figures_markdown(documents, places))
    typer.echo(f"rewritten: the figures of {page.path.name}", err=True)


def _chosen(only: str | None) -> list[Run]:
    """The runs of `step,quality`, all for None.

    Raises:
        InvalidValue: One of them does not exist.
    """
    from chatrt.bench.suite import RUNS

    if only is None:
        return list(RUNS)
    names = [name.strip() for name in only.split(",")]
    known = [run.name for run in RUNS]
    for name in names:
        if name not in known:
            raise InvalidValue(
                f"--only names {name!r}, it must be one of {', '.join(known)}", param="--only"
            )
    return [run for run in RUNS if run.name in names]


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command("all")(all_)
