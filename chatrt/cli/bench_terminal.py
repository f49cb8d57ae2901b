"""`chatrt bench terminal`: how soon the terminal client shows its prompt and an answer.

Knows: options, which server answers, where the results go. Does not know: how anything is measured.
Invariant: what had been measured is shown, whatever ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatrt.cli.bench_output import (
    EXIT_INTERRUPTED,
    CompareOption,
    JsonOption,
    SaveOption,
    changed_settings,
    counting_bar,
    show,
    show_comparison,
)
from chatrt.cli.bench_server import (
    ApiKeyFileOption,
    ModelOption,
    UrlOption,
    choose_server,
    measured_server,
    model_of,
    where_text,
)
from chatrt.errors import ChatrtError, InvalidValue, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from chatrt.bench.terminal import TerminalBench
    from chatrt.bench.terminal_report import TerminalFigures
    from chatrt.cli.bench_server import Measured, ServerChoice
    from chatrt.launch import Endpoint


def terminal(
    repetitions: Annotated[
        int, typer.Option(min=1, help="Starts, and conversations of three turns.")
    ] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of what tells the questions apart.")] = 0,
    url: UrlOption = None,
    api_key_file: ApiKeyFileOption = None,
    model: ModelOption = None,
    compare: CompareOption = None,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """From the command to the prompt, and from Enter to the first painted character.

    `chatrt chat` runs in a pseudo-terminal, keys are pressed and the screen is read. A fresh
    server takes its settings from CHATRT_* variables and config.toml, as `chatrt serve`.
    """
    if compare is not None:
        show_comparison("terminal", *compare, as_json=json, save=save)
        return
    if sys.platform == "win32":
        raise InvalidValue("bench terminal needs a pseudo-terminal, which Windows does not have")
    choice = choose_server(url, api_key_file, model)
    run = _TerminalRun(choice, repetitions, seed)
    document = run.play()
    show(run.report(document), document, as_json=json, save=save)
    if run.failure is not None:
        raise run.failure
    if run.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


class _TerminalRun:
    """One run, whose samples outlive an interruption and a failure."""

    def __init__(self, choice: ServerChoice, repetitions: int, seed: int) -> None:
        self.interrupted = False
        self.failure: ServerUnavailable | None = None
        self._choice = choice
        self._repetitions = repetitions
        self._seed = seed
        self._bench: TerminalBench | None = None
        self._model: str | None = None

    def play(self) -> dict[str, Any]:
        """Measure, and return the document.

        Raises:
            ServerUnavailable: Nothing had been measured before it.
        """
        from chatrt.bench.document import new_document

        with measured_server(self._choice) as server, tempfile.TemporaryDirectory() as folder:
            document = new_document("terminal", seed=self._seed, device=server.device)
            started = time.perf_counter()
            try:
                self._measure(server, Path(folder))
            except KeyboardInterrupt:
                self.interrupted = True
            except ServerUnavailable as error:
                if self._bench is None or not self._bench.starts:
                    raise
                self.failure = error
            document["duration_s"] = time.perf_counter() - started
        return document | self._results()

    def report(self, document: dict[str, Any]) -> RenderableType:
        """The table."""
        from chatrt.bench.terminal_report import terminal_report

        notes = [
            f"{where_text(document)}; {self._repetitions} starts, then as many conversations in "
            "one terminal. One of each comes first and is left out."
        ]
        if self.interrupted:
            notes.insert(0, "Interrupted: these are the samples that had been taken.")
        return terminal_report(self._figures(), notes)

    def _measure(self, server: Measured, folder: Path) -> None:
        from chatrt.bench.terminal import TerminalBench, num_samples

        endpoint = server.endpoint
        self._model = asyncio.run(model_of(endpoint)).get("id")
        key_file = folder / "api-key"
        key_file.touch(mode=0o600)
        key_file.write_text(endpoint.api_key or "none", encoding="ascii")
        with counting_bar("samples", num_samples(self._repetitions)) as advance:
            self._bench = TerminalBench(
                endpoint.url,
                key_file,
                repetitions=self._repetitions,
                seed=self._seed,
                on_sample=advance,
            )
            try:
                self._bench.run()
            finally:
                if server.own is None:  # its conversations are in somebody's list
                    asyncio.run(_delete(endpoint, self._bench.nonces))

    def _figures(self) -> TerminalFigures:
        from chatrt.bench.terminal_report import terminal_figures

        bench = self._bench
        return terminal_figures(bench.starts, bench.paints) if bench else terminal_figures([], [])

    def _results(self) -> dict[str, Any]:
        bench, choice = self._bench, self._choice
        settings: dict[str, Any] = {"repetitions": self._repetitions}
        if choice.is_own:
            settings["server"] = changed_settings(choice.resolved)
        return {
            "model": self._model,
            "settings": settings,
            "warm_up": {"excluded": True, "starts": 1, "conversations": 1},
            "interrupted": self.interrupted,
            "failure": None if self.failure is None else self.failure.message,
            **dataclasses.asdict(self._figures()),
            "samples": {
                "starts": [dataclasses.asdict(one) for one in bench.starts] if bench else [],
                "paints": [dataclasses.asdict(one) for one in bench.paints] if bench else [],
            },
        }


async def _delete(endpoint: Endpoint, nonces: Sequence[str]) -> None:
    """Delete the conversations whose titles begin with these numbers; a server may be gone."""
    from chatrt.client import HttpRoutes

    http = HttpRoutes(endpoint.url, api_key=endpoint.api_key)
    with contextlib.suppress(ChatrtError):
        for nonce in nonces:
            for found in await http.conversations(nonce):
                if str(found.get("title")).startswith(f"{nonce}:"):
                    await http.delete_conversation(str(found["id"]))


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command()(terminal)
