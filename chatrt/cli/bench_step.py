"""`chatrt bench step`: what one forward costs, against what the machine can read.

Knows: options, how the runtime is built, where the results go. Does not know: how anything is
measured. Invariant: no server runs for it, and no process that it started is left behind.
"""

from __future__ import annotations

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
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from rich.console import RenderableType

    from chatrt.bench.resident import ResidentMemory
    from chatrt.bench.step import StepOptions
    from chatrt.bench.step_figures import StepFigures
    from chatrt.cli.build import Runtime
    from chatrt.paths import Paths
    from chatrt.settings import Resolved


def step(
    rows: Annotated[str, typer.Option(help="Rows of a step; 1 is always among them.")] = (
        "1,2,4,5,8,16"
    ),
    prefill: Annotated[
        str, typer.Option(help="Prompts in tokens, computed in chunks; 0 measures none.")
    ] = "128,512,2048",
    contexts: Annotated[
        str, typer.Option(help="Contexts of a decode step in tokens; 0 is always among them.")
    ] = "0,1024,4096",
    repeats: Annotated[
        int, typer.Option(min=1, help="Samples of each; at most 5 of a prefill.")
    ] = 30,
    contention: Annotated[
        bool, typer.Option("--contention", help="Decode beside a busy process too.")
    ] = False,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model; default: the settings'.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads that compute; default: the settings'.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the token ids.")] = 0,
    compare: CompareOption = None,
    plot: PlotOption = None,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """One forward at several numbers of rows, contexts and prompt lengths, against the bandwidth.

    The model runs in this process, with the settings of CHATRT_* variables and config.toml.
    Contexts and prompts are clipped to what a conversation can hold.
    """
    if compare is not None:
        show_comparison("step", *compare, as_json=json, save=save)
        return
    from chatrt.bench.step import StepOptions

    require_plots(plot)
    options = StepOptions(
        rows=_numbers(rows, "--rows", at_least=1),
        prefill=_numbers(prefill, "--prefill", at_least=0),
        contexts=_numbers(contexts, "--contexts", at_least=0),
        repeats=repeats,
        seed=seed,
    )
    paths = common.find_paths()
    resolved = common.load_settings(paths, {"model": model, "threads": threads})
    run = _StepRun(_load(resolved, paths), resolved, options)
    run.play(contention=contention)
    figures = run.figures()
    document = run.document(figures)
    show(run.report(figures), document, as_json=json, save=save)
    draw(plot, document)
    if run.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


class _StepRun:
    """One run in this process, whose samples outlive an interruption."""

    def __init__(self, loaded: _Loaded, resolved: Resolved, options: StepOptions) -> None:
        from chatrt.bench.step import Room, StepBench

        settings, runtime = resolved.settings, loaded.runtime
        self.interrupted = False
        self._loaded = loaded
        self._resolved = resolved
        room = Room(settings.max_num_batched_tokens, settings.max_num_seqs, runtime.max_context)
        self._bench = StepBench(runtime.target, runtime.ops, options, room)
        self._started_document = self._new_document(options)

    def play(self, *, contention: bool) -> None:
        """Take all samples, or those until Ctrl+C."""
        from chatrt.bench.step import NUM_CONTENDED_ROUNDS
        from chatrt.bench.step_turn import SAMPLINGS, turn_overhead_ms

        runtime, bench = self._loaded.runtime, self._bench
        num_contended = NUM_CONTENDED_ROUNDS if contention else 0
        total = bench.num_rounds + num_contended + len(SAMPLINGS)
        try:
            with counting_bar("rounds", total) as advance:
                bench.run(advance)
                if contention:
                    bench.run_contended(advance)
                for name, sampling in SAMPLINGS.items():
                    bench.samples.turn_ms[name] = turn_overhead_ms(
                        runtime.engine,
                        runtime.target,
                        sampling,
                        num_steps=bench.options.repeats,
                        max_context=runtime.max_context,
                    )
                    advance()
        except KeyboardInterrupt:
            self.interrupted = True

    def figures(self) -> StepFigures:
        """The figures of the samples so far."""
        from chatrt.bench.step_figures import StepBytes, step_figures

        target = self._loaded.runtime.target
        return step_figures(self._bench.samples, StepBytes.of(target.decoder.weights, target.kv))

    def document(self, figures: StepFigures) -> dict[str, Any]:
        """What is printed as the last line."""
        memory = self._loaded.memory
        return self._started_document | {
            "read_probe": self._bench.read_probe,
            "interrupted": self.interrupted,
            **dataclasses.asdict(figures),
            "load_s": self._loaded.load_s,
            "memory": dataclasses.asdict(memory) | {"other_bytes": memory.other_bytes},
            "samples": dataclasses.asdict(self._bench.samples),
        }

    def report(self, figures: StepFigures) -> RenderableType:
        """The tables."""
        from chatrt.bench.step_report import step_report

        document = self._started_document
        notes = [
            f"{document['model']} on {document['device']}, {document['num_threads']} threads, "
            f"executor {document['executor']}, KV in {document['kv_dtype']}, "
            f"seed {document['seed']}",
            f"{document['warm_up']['rounds']} rounds of warm-up are left out.",
        ]
        if self.interrupted:
            notes.insert(0, "Interrupted: these are the samples that had been taken.")
        return step_report(
            figures,
            self._bench.samples,
            self._loaded.memory,
            load_s=self._loaded.load_s,
            read_probe=self._bench.read_probe,
            notes=notes,
        )

    def _new_document(self, options: StepOptions) -> dict[str, Any]:
        from chatrt.bench.document import new_document
        from chatrt.bench.step import NUM_WARM_UP_ROUNDS

        runtime = self._loaded.runtime
        device = device_of(self._resolved)
        return new_document("step", seed=options.seed, device=device) | {
            "model": runtime.model_name,
            "executor": runtime.ops.name,
            "kv_dtype": str(runtime.target.kv.dtype).removeprefix("torch."),
            "settings": dataclasses.asdict(options)
            | {
                "max_num_batched_tokens": self._resolved.settings.max_num_batched_tokens,
                "max_context": runtime.max_context,
                "changed": changed_settings(self._resolved),
            },
            "warm_up": {"excluded": True, "rounds": NUM_WARM_UP_ROUNDS},
        }


@dataclasses.dataclass(frozen=True, slots=True)
class _Loaded:
    """The runtime, how long making it took, and what this process held then."""

    runtime: Runtime
    load_s: float
    memory: ResidentMemory


def _load(resolved: Resolved, paths: Paths) -> _Loaded:
    """Fetch the model where it is missing, and make the runtime ready; imports are not timed."""
    from chatrt.bench.resident import resident_memory
    from chatrt.cli.build import build_runtime
    from chatrt.models.sources import fetch, resolve

    with common.ProgressBar() as progress:
        source = resolve(resolved.settings.model, cache_dir=paths.cache)
        files = fetch(source, cache_dir=paths.cache, progress=progress)
    started = time.perf_counter()
    with common.waiting() as report:
        runtime = build_runtime(files, resolved, paths, report)
    load_s = time.perf_counter() - started
    target = runtime.target
    memory = resident_memory(target.kv, weight_bytes=target.decoder.weights.num_bytes)
    return _Loaded(runtime, load_s, memory)


def _numbers(text: str, param: str, *, at_least: int) -> tuple[int, ...]:
    """The whole numbers of `1,2,4`.

    Raises:
        InvalidValue: It is anything else, or one of them is below `at_least`.
    """
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < at_least:
        raise InvalidValue(
            f"{param} is {text!r}, it must be whole numbers from {at_least} on, such as 1,2,4",
            param=param,
        )
    return numbers


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command()(step)
