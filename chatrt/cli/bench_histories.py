"""`chatrt bench histories`: what a follow-up's first token costs, by the length of its history.

Knows: options, when the server is killed and started again, where the results go.
Does not know: how anything is measured. Invariant: what had been measured is shown, whatever
ends the run; a server that is not the bench's own is never killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatrt.cli import common
from chatrt.cli.bench_output import (
    EXIT_INTERRUPTED,
    CompareOption,
    JsonOption,
    PlotOption,
    SaveOption,
    changed_settings,
    counting_bar,
    device_of,
    draw,
    require_plots,
    show,
    show_comparison,
)
from chatrt.cli.bench_peer_options import PeerPythonOption, local_model
from chatrt.cli.bench_server import (
    ApiKeyFileOption,
    ModelOption,
    UrlOption,
    choose_server,
    measured_server,
    model_of,
    where_text,
)
from chatrt.errors import ChatrtError, InvalidValue, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rich.console import RenderableType

    from chatrt.bench.histories import HistoriesBench, HistoriesOptions, HistorySample
    from chatrt.bench.histories_peer import LlamaPeer
    from chatrt.cli.bench_server import Measured, ServerChoice

_SHORTEST_HISTORY = 32


def histories(
    histories: Annotated[
        str, typer.Option(help="Lengths of history in tokens, with commas.")
    ] = "260,920,3600,7000",
    repetitions: Annotated[
        int, typer.Option(min=1, help="Conversations of each length, lengths in turns.")
    ] = 5,
    message_words: Annotated[int, typer.Option(min=1, help="Words of a follow-up.")] = 15,
    max_output_tokens: Annotated[
        int, typer.Option("--max-output-tokens", "-n", min=2, help="Length of every answer.")
    ] = 16,
    think_ms: Annotated[int, typer.Option(min=0, help="Pause before each turn.")] = 300,
    type_ms: Annotated[
        int, typer.Option(min=0, help="Pause behind each word that is typed ahead.")
    ] = 100,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart/--no-restart",
            help="Kill the fresh server at the end, start it again, continue every conversation.",
        ),
    ] = True,
    settle_s: Annotated[
        float, typer.Option(min=0, help="Pause before the kill, for what is written behind.")
    ] = 2.0,
    peer: Annotated[
        bool,
        typer.Option("--peer", help="llama.cpp on the same GGUF, in turns (llama-cpp-python)."),
    ] = False,
    peer_python: PeerPythonOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the texts and of sampling.")] = 0,
    url: UrlOption = None,
    api_key_file: ApiKeyFileOption = None,
    model: ModelOption = None,
    compare: CompareOption = None,
    plot: PlotOption = None,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Time to first token by history: cold, follow-up, typed ahead, regenerate, fork, restored.

    A fresh server takes its settings from CHATRT_* variables and config.toml, as `chatrt serve`.
    """
    if compare is not None:
        show_comparison("histories", *compare, as_json=json, save=save)
        return
    from chatrt.bench.histories import HistoriesOptions

    choice = choose_server(url, api_key_file, model)
    require_plots(plot)
    if peer and not choice.is_own:
        raise InvalidValue("--url and --peer exclude each other: the server's file is not known")
    options = HistoriesOptions(
        histories=lengths_of(histories),
        repetitions=repetitions,
        message_words=message_words,
        max_output_tokens=max_output_tokens,
        think_ms=think_ms,
        type_ms=type_ms,
        seed=seed,
    )
    run = _HistoriesRun(options, choice, restart=restart and choice.is_own, settle_s=settle_s)
    with run.peer(peer_python) if peer else contextlib.nullcontext():
        document = run.play()
    show(run.report(document), document, as_json=json, save=save)
    draw(plot, document)
    if run.failure is not None:
        raise run.failure
    if run.peer_failure is not None:
        raise PeerFailed(run.peer_failure)
    if run.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


class _HistoriesRun:
    """One run, whose samples outlive an interruption and a failure."""

    def __init__(
        self, options: HistoriesOptions, choice: ServerChoice, *, restart: bool, settle_s: float
    ) -> None:
        from chatrt.bench.histories import num_planned

        self.samples: list[HistorySample] = []
        self.interrupted = False
        self.failure: ChatrtError | None = None
        self._options = options
        self._choice = choice
        self._restart = restart
        self._settle_s = settle_s
        self._num_planned = num_planned(options, restored=restart)
        self._peer: LlamaPeer | None = None
        self._model: str | None = None

    @property
    def peer_failure(self) -> str | None:
        """How the peer was lost on the way, None if it was not."""
        return None if self._peer is None else self._peer.failure

    @contextlib.contextmanager
    def peer(self, python: Path | None) -> Iterator[None]:
        """llama.cpp, which is ended afterwards.

        Raises:
            InvalidValue: It is not installed, or cannot read the model.
            PeerFailed: It cannot load the model.
        """
        from chatrt.bench.histories_peer import LlamaPeer
        from chatrt.bench.peers_process import default_peer_python

        path = local_model(self._choice, needed_by="--peer")
        num_threads = device_of(self._choice.resolved).num_threads
        self._peer = LlamaPeer(
            path, self._options, python=python or default_peer_python(), num_threads=num_threads
        )
        try:
            yield
        finally:
            self._peer.close()

    def play(self) -> dict[str, Any]:
        """Measure, and return the document.

        Raises:
            ChatrtError: Nothing had been measured before it.
        """
        from chatrt.bench.document import new_document

        with measured_server(self._choice) as server:
            document = new_document("histories", seed=self._options.seed, device=server.device)
            started = time.perf_counter()
            try:
                self._measure(server)
            except KeyboardInterrupt:
                self.interrupted = True
            except ChatrtError as error:
                if not self.samples:
                    raise
                self.failure = error
            document["duration_s"] = time.perf_counter() - started
        return document | self._results()

    def report(self, document: dict[str, Any]) -> RenderableType:
        """The tables."""
        from chatrt.bench.histories_report import histories_report

        options = self._options
        notes = [
            f"{where_text(document)}; {options.repetitions} conversations of each length, "
            f"seed {options.seed}, one at a time, follow-ups of {options.message_words} words.",
            f"A person's pauses: {options.think_ms} ms before each turn, {options.type_ms} ms "
            "behind each word typed ahead, Enter behind the last pause. Two short prefills come "
            "first and are left out.",
        ]
        if self._restart:
            notes.append(f"The server was killed {self._settle_s:g} s after the last answer.")
        if self.peer_failure is not None:
            notes.append(f"{self.peer_failure}; it took no further part.")
        if self.interrupted:
            notes.insert(0, "Interrupted: these are the turns that had ended.")
        return histories_report(self._figures(), notes)

    def _measure(self, server: Measured) -> None:
        from chatrt.bench.histories import HistoriesBench

        self._model = asyncio.run(model_of(server.endpoint)).get("id")
        with counting_bar("turns", self._num_planned) as advance:
            bench = HistoriesBench(
                self._options,
                self._hearing(advance),
                beside=None if self._peer is None else self._peer.measure,
            )
            try:
                asyncio.run(bench.run(server.endpoint))
                if self._restart:
                    self._continue_after_a_crash(server, bench)
            finally:
                if server.own is None:
                    asyncio.run(bench.delete(server.endpoint))

    def _continue_after_a_crash(self, server: Measured, bench: HistoriesBench) -> None:
        assert server.own is not None
        time.sleep(self._settle_s)
        with common.waiting():
            endpoint = server.own.restart()
        asyncio.run(bench.run_restored(endpoint))

    def _hearing(self, advance: Callable[[], None]) -> Callable[[HistorySample], None]:
        def on_sample(sample: HistorySample) -> None:
            self.samples.append(sample)
            advance()

        return on_sample

    def _figures(self) -> Any:
        from chatrt.bench.histories_figures import histories_figures

        return histories_figures(
            self.samples,
            num_planned=self._num_planned,
            peer=None if self._peer is None else self._peer.samples,
        )

    def _results(self) -> dict[str, Any]:
        from chatrt.bench.text_scale import NUM_PREFILLS

        figures = dataclasses.asdict(self._figures())
        by_history = {str(one.pop("history")): one for one in figures.pop("by_history")}
        settings = dataclasses.asdict(self._options) | {
            "restart": self._restart,
            "settle_s": self._settle_s,
            "ignore_eos": True,
        }
        if self._choice.is_own:
            settings["server"] = changed_settings(self._choice.resolved)
        return {
            "model": self._model,
            "settings": settings,
            "warm_up": {"excluded": True, "prefills": NUM_PREFILLS},
            "interrupted": self.interrupted,
            "failure": self.failure.message if self.failure else None,
            **figures,
            "ttft_by_history_tokens": {
                length: {**one.pop("cases"), **one} for length, one in by_history.items()
            },
            "samples": [dataclasses.asdict(sample) for sample in self.samples],
            "peer_failure": self.peer_failure,
            "peer_samples": None
            if self._peer is None
            else [dataclasses.asdict(sample) for sample in self._peer.samples],
        }


def lengths_of(text: str) -> tuple[int, ...]:
    """The lengths of `260,920`, each once.

    Raises:
        InvalidValue: It is anything else.
    """
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= _SHORTEST_HISTORY for part in parts):
        raise InvalidValue(
            f"--histories is {text!r}, it must be whole numbers from {_SHORTEST_HISTORY} on, such "
            "as 260,920",
            param="--histories",
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command()(histories)
