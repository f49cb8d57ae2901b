"""`chatrt bench stall`: how evenly streams run while long prompts arrive.

Knows: options, a server for each gap budget, where the results go. Does not know: how anything is
measured. Invariant: what had been measured is shown, whatever ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from chatrt.errors import ChatrtError, InvalidValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from chatrt.bench.stall import StallBench, StallOptions
    from chatrt.bench.stall_figures import StallFigures
    from chatrt.cli.bench_server import ServerChoice


def stall(
    max_gap_ms: Annotated[
        str, typer.Option(help="Gap budget of the fresh server in ms, or none; the bar with --url.")
    ] = "20",
    budgets: Annotated[
        str | None,
        typer.Option(help="Several budgets instead, each on a fresh server: 10,20,30,50,none."),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Answers that run at once.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of a long prompt.")] = 4096,
    prompts: Annotated[
        int, typer.Option(min=1, help="Long prompts beside the streams, at least.")
    ] = 4,
    min_gaps: Annotated[
        int, typer.Option(min=1, help="More prompts until there are so many gaps beside them.")
    ] = 300,
    quiet_chunks: Annotated[
        int, typer.Option(min=1, help="Chunks of each stream before a long prompt is sent.")
    ] = 100,
    stream_tokens: Annotated[
        int, typer.Option(min=16, help="Length of a stream's answer; then it starts the next one.")
    ] = 1024,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the texts and of sampling.")] = 0,
    url: UrlOption = None,
    api_key_file: ApiKeyFileOption = None,
    model: ModelOption = None,
    compare: CompareOption = None,
    plot: PlotOption = None,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Chunk gaps of running streams while long prompts arrive, and what the prompts wait for it.

    A fresh server takes its other settings from CHATRT_* variables and config.toml.
    """
    if compare is not None:
        show_comparison("stall", *compare, as_json=json, save=save)
        return
    from chatrt.bench.stall import StallOptions

    choice = choose_server(url, api_key_file, model)
    require_plots(plot)
    if budgets is not None and not choice.is_own:
        raise InvalidValue(
            "--url and --budgets exclude each other: a server has its budget already"
        )
    options = StallOptions(
        num_streams=streams,
        prompt_tokens=prompt_tokens,
        num_prompts=prompts,
        min_gaps=min_gaps,
        quiet_chunks=quiet_chunks,
        stream_tokens=stream_tokens,
        seed=seed,
    )
    name = "--max-gap-ms" if budgets is None else "--budgets"
    run = _StallRun(options, choice, budgets_of(budgets or max_gap_ms, param=name))
    document = run.play()
    show(run.report(document), document, as_json=json, save=save)
    draw(plot, document)
    if run.failure is not None:
        raise run.failure
    if run.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def budgets_of(text: str, *, param: str) -> tuple[float | None, ...]:
    """The budgets of `10,20,none`, in milliseconds, each once.

    Raises:
        InvalidValue: It is anything else.
    """
    found: list[float | None] = []
    for part in text.split(","):
        value = None
        if part.strip().lower() != "none":
            with contextlib.suppress(ValueError):
                value = float(part)
            if value is None or not 0 < value < float("inf"):
                raise InvalidValue(
                    f"{param} is {text!r}, it must be milliseconds above 0 or none, such as 20",
                    param=param,
                )
        found.append(value)
    return tuple(dict.fromkeys(found))


class _StallRun:
    """One run over all budgets, whose samples outlive an interruption and a failure."""

    def __init__(
        self, options: StallOptions, choice: ServerChoice, budgets: Sequence[float | None]
    ) -> None:
        self.interrupted = False
        self.failure: ChatrtError | None = None
        self._options = options
        self._choice = choice
        self._budgets = budgets
        self._runs: list[tuple[float | None, StallBench]] = []
        self._model: str | None = None

    def play(self) -> dict[str, Any]:
        """Measure, and return the document.

        Raises:
            ChatrtError: Nothing had been measured before it.
        """
        from chatrt.bench.document import new_document

        started = time.perf_counter()
        document: dict[str, Any] = {}
        with counting_bar("rounds", len(self._budgets) * self._options.num_prompts) as advance:
            try:
                for budget in self._budgets:
                    arguments = ("--max-gap-ms", "none" if budget is None else f"{budget:g}")
                    with measured_server(self._choice, arguments) as server:
                        document = document or new_document(
                            "stall", seed=self._options.seed, device=server.device
                        )
                        self._measure(budget, server.endpoint, advance)
            except KeyboardInterrupt:
                if not self._runs:
                    raise
                self.interrupted = True
            except ChatrtError as error:
                if not any(bench.prompts for _, bench in self._runs):
                    raise
                self.failure = error
        document["duration_s"] = time.perf_counter() - started
        return document | self._results()

    def report(self, document: dict[str, Any]) -> RenderableType:
        """The tables."""
        from chatrt.bench.stall_report import stall_report

        options = self._options
        notes = [
            f"{where_text(document)}; {options.num_streams} streams, prompts of about "
            f"{options.prompt_tokens} tokens that share no text, seed {options.seed}.",
            "In each round one prompt is sent alone, then one beside the streams, "
            f"{options.quiet_chunks} chunks after these began. Two short prefills come first "
            "and are left out.",
        ]
        if not self._choice.is_own:
            notes.append("The budget is what --max-gap-ms says; the server may have another.")
        if self.interrupted:
            notes.insert(0, "Interrupted: these are the rounds that had begun.")
        return stall_report(self._figures(), notes)

    def _measure(self, budget: float | None, endpoint: Any, advance: Any) -> None:
        from chatrt.bench.stall import StallBench

        self._model = asyncio.run(model_of(endpoint)).get("id")
        bench = StallBench(self._options, advance)
        self._runs.append((budget, bench))
        asyncio.run(bench.run(endpoint))

    def _figures(self) -> list[StallFigures]:
        from chatrt.bench.stall_figures import stall_figures

        return [
            stall_figures(bench.streams, bench.prompts, max_gap_ms=budget)
            for budget, bench in self._runs
        ]

    def _results(self) -> dict[str, Any]:
        from chatrt.bench.text_scale import NUM_PREFILLS

        runs = [dataclasses.asdict(one) for one in self._figures()]
        settings = dataclasses.asdict(self._options)
        if self._choice.is_own:
            settings["server"] = changed_settings(self._choice.resolved)
        return {
            "model": self._model,
            "settings": settings,
            "warm_up": {"excluded": True, "prefills": NUM_PREFILLS},
            "interrupted": self.interrupted,
            "failure": self.failure.message if self.failure else None,
            **runs[0],
            "failed": sum(one["failed"] for one in runs),
            "budgets": runs,
            "samples": [
                {
                    "max_gap_ms": budget,
                    "streams": [dataclasses.asdict(one) for one in bench.streams],
                    "prompts": [dataclasses.asdict(one) for one in bench.prompts],
                }
                for budget, bench in self._runs
            ],
        }


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command()(stall)
