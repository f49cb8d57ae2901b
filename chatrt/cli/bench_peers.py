"""`chatrt bench peers`: the same conversations in chatrt, llama.cpp and transformers, in turns.

Knows: options, which peers are there, where the results go. Does not know: how anything is
measured. Invariant: what had been measured is shown, whatever ends the run; a peer that is missing
or fails costs its own figures and no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatrt.cli import common
from chatrt.cli.bench_histories import lengths_of
from chatrt.cli.bench_output import (
    EXIT_INTERRUPTED,
    CompareOption,
    JsonOption,
    SaveOption,
    changed_settings,
    counting_bar,
    device_of,
    show,
    show_comparison,
)
from chatrt.cli.bench_peer_options import (
    PeerPythonOption,
    PeerTimeoutOption,
    local_model,
)
from chatrt.cli.bench_server import ModelOption, choose_server, measured_server, where_text
from chatrt.errors import ChatrtError, InvalidValue, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from chatrt.bench.document import Device
    from chatrt.bench.peers import PeersBench, PeersOptions
    from chatrt.bench.peers_figures import Row
    from chatrt.bench.peers_process import PeerProcess
    from chatrt.bench.stall import StallBench
    from chatrt.bench.stall_figures import StallFigures
    from chatrt.cli.bench_server import Measured, ServerChoice

_SHORTEST_HISTORY = 32
_GAP_PROMPT_TOKENS = 1000
_GAP_STREAM_TOKENS = 512
_GAP_QUIET_CHUNKS = 50


def peers(
    histories: Annotated[
        str, typer.Option(help="Lengths of history in tokens, with commas.")
    ] = "260,920,3600",
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds.")] = 5,
    prefill_tokens: Annotated[
        int, typer.Option(min=_SHORTEST_HISTORY, help="Length of the prompt that is prefilled.")
    ] = 512,
    decode_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of the answers that decode is measured over.")
    ] = 128,
    message_words: Annotated[int, typer.Option(min=1, help="Words of a follow-up.")] = 15,
    think_ms: Annotated[int, typer.Option(min=0, help="Pause before each turn.")] = 300,
    gaps: Annotated[
        bool, typer.Option("--gaps/--no-gaps", help="Also a stream beside a prompt, at the end.")
    ] = True,
    per_round: Annotated[bool, typer.Option("--per-round", help="List every turn.")] = False,
    peer_python: PeerPythonOption = None,
    peer_timeout_s: PeerTimeoutOption = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the texts.")] = 0,
    model: ModelOption = None,
    compare: CompareOption = None,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """The same file and prompts in llama.cpp and transformers: decode, prefill, TTFT, ratios.

    On the CPU, with as many threads as a fresh server has, which takes its settings from CHATRT_*
    variables and config.toml. `make bench-peers` installs the peers beside this environment.
    """
    if compare is not None:
        show_comparison("peers", *compare, as_json=json, save=save)
        return
    from chatrt.bench.peers import PeersOptions

    options = PeersOptions(
        histories=lengths_of(histories),
        repetitions=repetitions,
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        message_words=message_words,
        think_ms=think_ms,
        seed=seed,
    )
    choice = choose_server(None, None, model)
    run = _PeersRun(options, choice, with_gaps=gaps)
    with run.peers(peer_python, timeout_s=peer_timeout_s):
        document = run.play()
    show(run.report(document, per_round=per_round), document, as_json=json, save=save)
    if run.failure is not None:
        raise run.failure
    if run.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if run.lost:
        raise PeerFailed(f"not all peers that are installed came to the end: {', '.join(run.lost)}")


class _PeersRun:
    """One run, whose samples outlive an interruption and a failure."""

    def __init__(self, options: PeersOptions, choice: ServerChoice, *, with_gaps: bool) -> None:
        self.interrupted = False
        self.failure: ChatrtError | None = None
        self._options = options
        self._choice = choice
        self._with_gaps = with_gaps
        self._processes: dict[str, PeerProcess] = {}
        self._missing: dict[str, list[str]] = {}
        self._versions: dict[str, dict[str, str | None]] = {}
        self._unusable: dict[str, str] = {}  # sentences, by engine
        self._not_loaded: list[str] = []
        self._bench: PeersBench | None = None
        self._stall: StallBench | None = None
        self._path = local_model(choice, needed_by="bench peers")
        self._device = _cpu(device_of(choice.resolved))

    @contextlib.contextmanager
    def peers(self, python: Path | None, *, timeout_s: float) -> Iterator[None]:
        """The peers' processes, which are ended afterwards.

        Raises:
            InvalidValue: There is no peer, or the interpreter cannot be run.
        """
        from chatrt.bench.peers_process import PEERS, PeerProcess, default_peer_python

        chosen = python or default_peer_python()
        with contextlib.ExitStack() as stack:
            for engine in PEERS:
                process = PeerProcess(
                    engine, chosen, num_threads=self._device.num_threads, timeout_s=timeout_s
                )
                stack.callback(process.close)
                self._find(process)
            if not self._processes:
                raise InvalidValue(
                    "there is no peer to measure: " + "; ".join(self._absences()),
                    param="--peer-python",
                )
            yield

    @property
    def lost(self) -> list[str]:
        """Peers that are installed and could not load the model, or were lost on the way."""
        failures = {} if self._bench is None else self._bench.failures
        return self._not_loaded + [self._processes[engine].name for engine in failures]

    def play(self) -> dict[str, Any]:
        """Measure, and return the document.

        Raises:
            ChatrtError: Nothing had been measured before it.
        """
        from chatrt.bench.document import new_document

        document = new_document("peers", seed=self._options.seed, device=self._device)
        started = time.perf_counter()
        with measured_server(self._choice) as server:
            try:
                self._measure(server)
            except KeyboardInterrupt:
                self.interrupted = True
            except ChatrtError as error:
                if self._bench is None or not self._bench.samples:
                    raise
                self.failure = error
        document["duration_s"] = time.perf_counter() - started
        document["versions"]["peers"] = self._versions
        return document | self._results()

    def report(self, document: dict[str, Any], *, per_round: bool) -> RenderableType:
        """The tables."""
        from rich.console import Group

        from chatrt.bench.peers_report import peers_report, rounds_table

        options = self._options
        notes = [
            f"{where_text(document)}; {options.repetitions} rounds, seed {options.seed}, "
            f"{options.think_ms} ms before each turn, follow-ups of {options.message_words} words; "
            f"the prompt has {options.prefill_tokens} tokens. A conversation in each before the "
            "first round is left out.",
            *self._absences(),
        ]
        if self.interrupted:
            notes.insert(0, "Interrupted: these are the turns that had ended.")
        tables = peers_report(self._rows(), self._measured(), self._gap_figures(), notes)
        if per_round and self._bench is not None:
            return Group(rounds_table(self._bench.samples, self._measured()), tables)
        return tables

    def _find(self, process: PeerProcess) -> None:
        try:
            found = process.find(self._path)
        except PeerFailed as error:
            self._unusable[process.engine] = error.message
            return
        self._versions[process.engine] = found.versions
        if found.missing:
            self._missing[process.engine] = found.missing
        elif process.engine == "llama_cpp" and self._path.suffix != ".gguf":
            self._unusable[process.engine] = f"llama.cpp needs a GGUF file, not {self._path.name}"
        else:
            self._processes[process.engine] = process

    def _measure(self, server: Measured) -> None:
        from chatrt.bench.peers import PeersBench

        loaded = self._load()
        if not loaded:
            raise PeerFailed("no peer could load the model: " + "; ".join(self._absences()))
        self._bench = PeersBench(self._options, server.endpoint, loaded)
        with counting_bar("conversations", self._bench.num_planned) as advance:
            self._bench.run(advance)
        if self._with_gaps:
            self._measure_gaps(server)

    def _load(self) -> list[PeerProcess]:
        loaded = []
        with common.waiting() as report:
            for engine, process in self._processes.items():
                report(f"loading the model into {process.name}")
                try:
                    process.load(
                        self._path, max_context=self._options.room, seed=self._options.seed
                    )
                    loaded.append(process)
                except PeerFailed as error:
                    self._unusable[engine] = error.message
                    self._not_loaded.append(process.name)
        return loaded

    def _measure_gaps(self, server: Measured) -> None:
        """A stream of ours beside prompts: what a peer that serves one conversation cannot have."""
        from chatrt.bench.stall import StallBench, StallOptions

        options = StallOptions(
            num_streams=1,
            prompt_tokens=_GAP_PROMPT_TOKENS,
            num_prompts=self._options.repetitions,
            min_gaps=1,
            quiet_chunks=_GAP_QUIET_CHUNKS,
            stream_tokens=_GAP_STREAM_TOKENS,
            seed=self._options.seed,
        )
        with counting_bar("gaps", options.num_prompts) as advance:
            self._stall = StallBench(options, advance)
            asyncio.run(self._stall.run(server.endpoint))

    def _measured(self) -> list[str]:
        """Peers that have taken part."""
        samples = [] if self._bench is None else self._bench.samples
        return [peer for peer in self._processes if any(one.engine == peer for one in samples)]

    def _rows(self) -> list[Row]:
        from chatrt.bench.peers_figures import comparisons

        samples = [] if self._bench is None else self._bench.samples
        return comparisons(samples, self._measured())

    def _gap_figures(self) -> StallFigures | None:
        from chatrt.bench.stall_figures import stall_figures

        if self._stall is None:
            return None
        max_gap_ms = self._choice.resolved.settings.max_gap_ms
        return stall_figures(self._stall.streams, self._stall.prompts, max_gap_ms=max_gap_ms)

    def _absences(self) -> list[str]:
        """Why peers are left out, or were from some point on."""
        from chatrt.bench.peers_report import install_lines

        failures = {} if self._bench is None else self._bench.failures
        return [
            *install_lines(self._missing),
            *self._unusable.values(),
            *(f"{sentence}; it took no further part" for sentence in failures.values()),
        ]

    def _results(self) -> dict[str, Any]:
        from chatrt.bench.peers_figures import gaps_document, ratios_document

        settings = dataclasses.asdict(self._options) | {
            "server": changed_settings(self._choice.resolved)
        }
        return {
            "model": common.served_name(self._choice.resolved.settings.model, self._choice.paths),
            "settings": settings,
            "warm_up": {"excluded": True, "conversations": 1},
            "interrupted": self.interrupted,
            "failure": self.failure.message if self.failure else None,
            "left_out": self._absences(),
            **ratios_document(self._rows(), prefill_tokens=self._options.prefill_tokens),
            **gaps_document(self._gap_figures()),
            "samples": {
                "turns": _plain([] if self._bench is None else self._bench.samples),
                "streams": _plain([] if self._stall is None else self._stall.streams),
                "prompts": _plain([] if self._stall is None else self._stall.prompts),
            },
        }


def _plain(samples: Sequence[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(one) for one in samples]


def _cpu(device: Device) -> Device:
    """The device, which the peers share.

    Raises:
        InvalidValue: It is a GPU.
    """
    if device.name != "cpu":
        raise InvalidValue(
            f"bench peers compares on the CPU, and the model would run on {device.name}: set "
            "CHATRT_DEVICE=cpu"
        )
    return device


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command()(peers)
