"""`chatrt bench`: measurements, each with a table and one line of JSON.

Knows: options, which server is measured, where the results go. Does not know: how anything is
measured. Invariant: the last line of stdout is one JSON document, also after Ctrl+C.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatrt.cli import bench_histories, bench_quality, bench_speculation, bench_stall, bench_step
from chatrt.cli.bench_output import (
    EXIT_INTERRUPTED,
    CompareOption,
    JsonOption,
    PlotOption,
    SaveOption,
    changed_settings,
    counting_bar,
    draw,
    require_plots,
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

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from chatrt.bench.document import Device
    from chatrt.bench.sessions import TurnOptions, TurnSample
    from chatrt.bench.workload import Workload
    from chatrt.launch import Endpoint

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
    url: UrlOption = None,
    api_key_file: ApiKeyFileOption = None,
    model: ModelOption = None,
    per_session: Annotated[bool, typer.Option("--per-session", help="List every turn.")] = False,
    compare: CompareOption = None,
    plot: PlotOption = None,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Time to first token and the stream's evenness, in conversations over the socket.

    A fresh server takes its settings from CHATRT_* variables and config.toml, as `chatrt serve`.
    How a follow-up depends on the length of its history: `chatrt bench histories`.
    """
    if compare is not None:
        show_comparison("sessions", *compare, as_json=json, save=save)
        return
    from chatrt.bench.sessions import TurnOptions
    from chatrt.bench.workload import Length, Workload

    choice = choose_server(url, api_key_file, model)
    require_plots(plot)
    workload = Workload(
        num_sessions=sessions,
        num_turns=turns,
        system_tokens=Length.parse(system_tokens, param="--system-tokens"),
        input_tokens=Length.parse(input_tokens, param="--input-tokens"),
        think_ms=Length.parse(think_ms, param="--think-ms", at_least=0),
        forks=fork,
    )
    run = _SessionsRun(workload, TurnOptions(max_output_tokens, seed), warm_up=warm_up)
    with measured_server(choice) as server:
        document = run.play(server.endpoint, server.device)
    if choice.is_own:
        document["settings"]["server"] = changed_settings(choice.resolved)
    show(run.report(document, per_session=per_session), document, as_json=json, save=save)
    draw(plot, document)
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
        notes = [
            f"{where_text(document)}; {workload.num_sessions} sessions × "
            f"{workload.num_turns} turns at once, seed {self._options.seed}",
            f"{document['warm_up']['turns']} turns of warm-up are left out.",
        ]
        if self.interrupted:
            notes.insert(0, "Interrupted: these are the turns that had ended.")
        return sessions_report(self._figures(), self.samples, per_session=per_session, notes=notes)

    async def _play(self, endpoint: Endpoint, on_sample: Callable[[TurnSample], None]) -> None:
        from chatrt.bench.sessions import run_sessions

        self._model = (await model_of(endpoint)).get("id")
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


def register(app: typer.Typer) -> None:
    """Adds the group of commands."""
    bench_step.register(bench)
    bench_speculation.register(bench)
    bench_quality.register(bench)
    bench_histories.register(bench)
    bench_stall.register(bench)
    app.add_typer(bench)
