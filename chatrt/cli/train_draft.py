"""`chatrt train-draft`: makes a draft head for a model out of the model itself.

Knows: options, how the target is loaded, how progress is shown. Does not know: how a head is
trained. Invariant: the head sees the features of the executor that serves on this machine: native
kernels on a CPU, PyTorch elsewhere.
Cost: the minutes that are given, and memory or disk for the data: 4.8 kB for each token of the
default model.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from chatrt.cli import common
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import TaskID

    from chatrt.models.files import ModelFiles
    from chatrt.paths import Paths
    from chatrt.settings import Settings
    from chatrt_drafts.training.train import TrainingTarget

_LINE_S = 15.0  # without a terminal, a line this often
_DEFAULT_MINUTES = 90.0


def train_draft(
    model: Annotated[
        str | None, typer.Argument(help="Name, file, folder or org/name; default: the settings'.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the head.", file_okay=False)
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Answer tokens to synthesise at most.")
    ] = 2_000_000,
    minutes: Annotated[
        float | None,
        typer.Option(help=f"Total time: 40 % synthesis, 60 % training. [{_DEFAULT_MINUTES:.0f}]"),
    ] = None,
    synthesis_minutes: Annotated[
        float | None, typer.Option(help="Time of the synthesis, instead of its share.")
    ] = None,
    training_minutes: Annotated[
        float | None, typer.Option(help="Time of the training, instead of its share.")
    ] = None,
    vocab: Annotated[int, typer.Option(min=16, help="Tokens that the head can draft.")] = 8192,
    seed: Annotated[
        int, typer.Option(min=0, max=(1 << 63) - 1, help="Seed of data and weights.")
    ] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run ended.")] = False,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None,
        typer.Option(help="Where to do all of it; default: the settings'."),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(min=1, help="Conversations at once. [32 on a CPU, 1024 on a GPU]"),
    ] = None,
    unroll: Annotated[int, typer.Option(min=1, max=8, help="Steps of a chain to train.")] = 4,
    alive_weighting: Annotated[
        bool, typer.Option(help="Weigh later steps by the chance that they are reached.")
    ] = False,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    start_from: Annotated[
        Path | None, typer.Option(help="Folder of a head of this model, to be trained further.")
    ] = None,
    keep_data: Annotated[
        bool, typer.Option(help="Keep the rows in the folder, so that they can be used again.")
    ] = True,
) -> None:
    """Train a draft head for a model.

    The model chats with itself, and one small layer learns to foresee it. Settings come from
    CHATRT_* variables and config.toml, as for `chatrt serve`.
    """
    from chatrt_drafts.head_file import FILE_NAME, HeadFile
    from chatrt_drafts.training.seeds import SeedTurns
    from chatrt_drafts.training.train import TrainingPlan, split_minutes, train_draft

    if out is None:
        raise InvalidValue("--out is missing: the folder that the head is written to")
    synthesis_s, training_s = split_minutes(_DEFAULT_MINUTES if minutes is None else minutes)
    plan = TrainingPlan(
        out=out,
        num_tokens=tokens,
        synthesis_s=synthesis_s if synthesis_minutes is None else synthesis_minutes * 60,
        training_s=training_s if training_minutes is None else training_minutes * 60,
        vocab=vocab,
        seed=seed,
        resume=resume,
        keep_data=keep_data,
        num_slots=slots,
        unroll=unroll,
        alive_weighting=alive_weighting,
        learning_rate=learning_rate,
        start_from=None if start_from is None else HeadFile.load(start_from / FILE_NAME),
    )
    if not all(0 < time_s < math.inf for time_s in (plan.synthesis_s, plan.training_s)):
        raise InvalidValue("both the synthesis and the training need some time, and an end")
    paths = common.find_paths()
    settings = common.load_settings(paths, {"model": model, "device": device}).settings
    files = _fetch(settings, paths)
    with common.waiting() as say:
        say(f"loading {files.name}")
        target = load_target(files, settings, paths.kernels)
    with _Bars() as bars:
        card = train_draft(target, plan, SeedTurns(), report=bars, clock=time.monotonic)
    lengths = card["acceptance"]["greedy"]["mean_length"]
    typer.echo(f"{out / 'head.safetensors'}: {lengths[-1]:.2f} tokens a pass, greedy")


def load_target(files: ModelFiles, settings: Settings, kernels: Path) -> TrainingTarget:
    """The model on the executor of this machine, in float32; `kernels` as in `find_executor`.

    Raises:
        ModelError: The model's files cannot be used.
        SettingsError: The device is not there.
    """
    import torch

    from chatrt.cli.executor import find_executor
    from chatrt.cli.machine import find_machine
    from chatrt.models.files import fingerprint
    from chatrt.models.loader import load_model
    from chatrt.models.quantize import load_quantization
    from chatrt.text.tokenizer import Tokenizer
    from chatrt_drafts.training.slot_ops import SlotOps
    from chatrt_drafts.training.train import TrainingTarget
    from chatrt_kernels.ops import Ops

    if find_machine(settings).device.type == "cuda":
        # wide enough for features, and fast
        settings = dataclasses.replace(settings, dtype="float32", kv_dtype="float16")
        torch.set_float32_matmul_precision("high")
    executor = find_executor(settings, kernels, lambda _: None)
    machine = executor.machine
    ops: Ops = executor.ops if machine.native else SlotOps(machine.dtype, machine.device)
    quantize = load_quantization(settings.quantize, native_kernels=machine.native)
    model = load_model(files, ops, device=machine.device, dtype=machine.dtype, quantize=quantize)
    return TrainingTarget(
        name=files.name,
        fingerprint=fingerprint(files.weight_files()),
        model=model,
        ops=ops,
        tokenizer=Tokenizer.load(files.tokenizer_dir, eos_token_ids=model.config.eos_token_ids),
        kv_dtype=machine.kv_dtype,
        train_threads=machine.num_threads,
        bf16=machine.device.type == "cuda" or _cpu_has_bf16(),
    )


def _cpu_has_bf16() -> bool:
    """Whether this processor multiplies bfloat16 itself."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _fetch(settings: Settings, paths: Paths) -> ModelFiles:
    from chatrt.models.sources import fetch, resolve

    with common.ProgressBar() as progress:
        source = resolve(settings.model, cache_dir=paths.cache)
        return fetch(source, cache_dir=paths.cache, progress=progress)


class _Bars:
    """A bar on stderr for each phase; without a terminal, a line now and then."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        console = Console(stderr=True)
        self._progress = Progress(
            *(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Remaining()),
            TextColumn("{task.fields[words]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._last_line_s = 0.0

    def __call__(self, phase: str, share: float, words: str) -> None:
        """Shows how far a phase is."""
        if self._progress.disable:
            now = time.monotonic()
            if share >= 1 or phase not in self._tasks or now - self._last_line_s >= _LINE_S:
                self._last_line_s = now
                print(f"{phase} {share:4.0%}: {words}", file=sys.stderr, flush=True)  # noqa: T201
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=1.0, words=words)
        self._progress.update(self._tasks[phase], completed=share, words=words)

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("train-draft")(train_draft)
