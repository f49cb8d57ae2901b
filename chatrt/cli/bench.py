"""`chatrt bench`: measurements, each with a table and one line of JSON.

Knows: options, which server is measured, where the results go. Does not know: how anything is
measured. Invariant: the last line of stdout is one JSON document, also after Ctrl+C.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatrt.cli import bench_quality, bench_speculation, bench_step, common
from chatrt.cli.bench_output import (
    EXIT_INTERRUPTED,
    JsonOption,
    SaveOption,
    changed_settings,
    counting_bar,
    device_of,
    show,
)
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType

    from chatrt.bench.document import Device
    from chatrt.bench.sessions import TurnOptions, TurnSample
    from chatrt.bench.workload import Workload
    from chatrt.launch import Endpoint
    from chatrt.paths import Paths
    from chatrt.settings import Resolved

bench = typer.Typer(
    name="bench",
    help="Measure: a table for people, then one line of JSON.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.command()
def sessions(
    sessions: Annotated[int, typer.Option(min=1, help="Conversations at once.")] = 8,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each, forks not counted.")] = 4,
    input_tokens: Annotated[
        str, typer.Option(help="Length of a message in words, about a token each: 48 or 32-128.")
    ] = "48",
    system_tokens: Annotated[
        str, typer.Option(help="Length of each session's own system message, likewise.")
    ] = "24",
    max_output_tokens: Annotated[
        int, typer.Option("--max-output-tokens", "-n", min=1, help="Length of every answer.")
    ] = 32,
    think_ms: Annotated[
        str, typer.Option(help="Pause before each follow-up: 0, 500 or 200-800.")
    ] = "0",
    fork: Annotated[
        bool, typer.Option("--fork/--no-fork", help="One more turn behind each first answer.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the texts and of sampling.")] = 0,
    warm_up: Annotated[
        bool, typer.Option("--warm-up/--no-warm-up", help="One unmeasured conversation first.")
    ] = True,
    url: Annotated[
        str | None, typer.Option(help="A running server; default: a fresh one, ended afterwards.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key for --url; default: the generated one.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model of the fresh server.")
    ] = None,
    per_session: Annotated[bool, typer.Option("--per-session", help="List every turn.")] = False,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Time to first token and the stream's evenness, in conversations over the socket.

    A fresh server takes its settings from CHATRT_* variables and config.toml, as `chatrt serve`.
    """
    from chatrt.bench.sessions import TurnOptions
    from chatrt.bench.workload import Length, Workload

    if url is not None and model is not None:
        raise InvalidValue("--url and --model exclude each other: a server has its model already")
    workload = Workload(
        num_sessions=sessions,
        num_turns=turns,
        system_tokens=Length.parse(system_tokens, param="--system-tokens"),
        input_tokens=Length.parse(input_tokens, param="--input-tokens"),
        think_ms=Length.parse(think_ms, param="--think-ms", at_least=0),
        forks=fork,
    )
    run = _SessionsRun(workload, TurnOptions(max_output_tokens, seed), warm_up=warm_up)
    paths = common.find_paths()
    flags = {"api_key_file": api_key_file, "model": model}
    resolved = common.load_settings(paths, flags)
    with _server(url, resolved, paths) as (endpoint, device):
        document = run.play(endpoint, device)
    if url is None:
        document["settings"]["server"] = changed_settings(resolved)
    show(run.report(document, per_session=per_session), document, as_json=json, save=save)
    if run.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


@bench.command()
def bookkeeping(
    steps: Annotated[int, typer.Option(min=1, help="Steps to take the medians of.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampled tokens.")] = 0,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Plan, batch and commit of one step with the model stubbed, for 1 and for 64 sessions."""
    from chatrt.bench.bookkeeping import BARS_US, measure
    from chatrt.bench.document import new_document
    from chatrt.bench.report import bookkeeping_report

    figures = {number: measure(number, steps, seed=seed) for number in BARS_US}
    document = new_document("bookkeeping", seed=seed, device=None) | {
        "settings": {"steps": steps},
        "sessions": {
            str(number): dataclasses.asdict(one)
            | {"at_most_us": BARS_US[number], "within": one.total_us <= BARS_US[number]}
            for number, one in figures.items()
        },
    }
    show(bookkeeping_report(figures, BARS_US), document, as_json=json, save=save)


class _SessionsRun:
    """One run of `bench sessions`, whose samples outlive an interruption."""

    def __init__(self, workload: Workload, options: TurnOptions, *, warm_up: bool) -> None:
        from chatrt.bench.workload import generate, generate_session

        self.samples: list[TurnSample] = []
        self.interrupted = False
        self._workload = workload
        self._options = options
        self._planned = generate(workload, options.seed)
        self._warm_up = (
            generate_session(workload, options.seed, workload.num_sessions) if warm_up else None
        )
        self._model: str | None = None

    @property
    def num_planned(self) -> int:
        """Turns that are to be measured."""
        return sum(one.num_turns for one in self._planned)

    def play(self, endpoint: Endpoint, device: Device | None) -> dict[str, Any]:
        """Run against a server, and return the document."""
        from chatrt.bench.document import new_document

        document = new_document("sessions", seed=self._options.seed, device=device)
        started = time.perf_counter()
        with counting_bar("turns", self.num_planned) as advance:

            def on_sample(sample: TurnSample) -> None:
                self.samples.append(sample)
                advance()

            try:
                asyncio.run(self._play(endpoint, on_sample))
            except KeyboardInterrupt:
                self.interrupted = True
        document["duration_s"] = time.perf_counter() - started
        return document | self._results()

    def report(self, document: dict[str, Any], *, per_session: bool) -> RenderableType:
        """The tables."""
        from chatrt.bench.report import sessions_report

        workload = self._workload
        device = document["device"]
        where = (
            f"{device}, {document['num_threads']} threads"
            if device
            else "a device that is not known"
        )
        notes = [
            f"{self._model or 'unknown model'} on {where}; {workload.num_sessions} sessions × "
            f"{workload.num_turns} turns at once, seed {self._options.seed}",
            f"{document['warm_up']['turns']} turns of warm-up are left out.",
        ]
        if self.interrupted:
            notes.insert(0, "Interrupted: these are the turns that had ended.")
        return sessions_report(self._figures(), self.samples, per_session=per_session, notes=notes)

    async def _play(self, endpoint: Endpoint, on_sample: Callable[[TurnSample], None]) -> None:
        from chatrt.bench.sessions import run_sessions
        from chatrt.client import HttpRoutes

        models = await HttpRoutes(endpoint.url, api_key=endpoint.api_key).models()
        self._model = str(models[0].get("id")) if models else None
        await run_sessions(
            endpoint.url,
            self._planned,
            self._options,
            on_sample,
            api_key=endpoint.api_key,
            warm_up=self._warm_up,
        )

    def _figures(self) -> Any:
        from chatrt.bench.figures import session_figures

        return session_figures(self.samples, num_planned=self.num_planned)

    def _results(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "settings": {
                **dataclasses.asdict(self._workload),
                "max_output_tokens": self._options.max_output_tokens,
                "ignore_eos": True,
            },
            "warm_up": {"excluded": True, "turns": self._warm_up.num_turns if self._warm_up else 0},
            "interrupted": self.interrupted,
            **dataclasses.asdict(self._figures()),
            "samples": [dataclasses.asdict(sample) for sample in self.samples],
        }


@contextlib.contextmanager
def _server(
    url: str | None, resolved: Resolved, paths: Paths
) -> Iterator[tuple[Endpoint, Device | None]]:
    """The server to measure, and where its model runs if that is known."""
    settings = resolved.settings
    if url is not None:
        yield common.remote_endpoint(url, settings, paths), None
        return
    from chatrt.bench.own_server import own_server

    model = settings.model
    with contextlib.ExitStack() as stack:
        with common.waiting() as report:
            endpoint = stack.enter_context(
                own_server(
                    model,
                    settings,
                    paths,
                    report=report,
                    served_name=common.served_name(model, paths),
                )
            )
        yield endpoint, device_of(resolved)


def register(app: typer.Typer) -> None:
    """Adds the group of commands."""
    bench_step.register(bench)
    bench_speculation.register(bench)
    bench_quality.register(bench)
    app.add_typer(bench)
