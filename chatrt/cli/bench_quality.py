"""`chatrt bench quality`: what the serving executor loses against the float32 reference.

Knows: options, how the two targets are put together. Does not know: how they are compared.
Invariant: both targets are made from the same model file.
Cost: the weights are in memory once for each target; the reference holds them as float32.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatrt.cli import common
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
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatrt.bench.quality import WindowSums
    from chatrt.cli.executor import Executor
    from chatrt.engine import Target
    from chatrt.models.files import ModelFiles
    from chatrt.models.quantize import LoadQuantization
    from chatrt.paths import Paths
    from chatrt.settings import Resolved, Settings


@dataclasses.dataclass(frozen=True, slots=True)
class TargetPair:
    """The executor that serves, and the one that it is held to."""

    served: Target
    reference: Target


@dataclasses.dataclass(frozen=True, slots=True)
class _Scored:
    """What was scored of the text, the whole of it unless Ctrl+C came first."""

    windows: list[WindowSums]
    interrupted: bool


def quality(
    context: Annotated[int, typer.Option(min=2, help="Tokens of each window of the text.")] = 512,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Score so many tokens only. [the whole text]")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Another text. [the bundled one]", dir_okay=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model; default: the settings'.")
    ] = None,
    compare: CompareOption = None,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Perplexity and KL of the serving executor against the float32 reference, on a text.

    Settings come from CHATRT_* variables and config.toml, as for `chatrt serve`.
    """
    if compare is not None:
        show_comparison("quality", *compare, as_json=json, save=save)
        return
    from chatrt.bench.document import new_document
    from chatrt.bench.quality import MAX_MEAN_KL, MAX_PERPLEXITY_CHANGE, bundled_text, combine
    from chatrt.bench.quality_report import quality_report

    paths = common.find_paths()
    resolved = common.load_settings(paths, {"model": model})
    words = bundled_text() if text is None else _read(text)
    files = _fetch(resolved.settings, paths)
    scored = _measure(files, resolved, paths.kernels, words, context, tokens)
    windows = scored.windows
    figures = combine(windows)
    device = device_of(resolved)
    document = new_document("quality", seed=0, device=device) | {
        "model": files.name,
        "settings": {
            "context": context,
            "text": "bundled" if text is None else text.name,
            "server": changed_settings(resolved),
        },
        "interrupted": scored.interrupted,
        **dataclasses.asdict(figures),
        "at_most": {"perplexity_change": MAX_PERPLEXITY_CHANGE, "mean_kl": MAX_MEAN_KL},
        "within": figures.within,
        "samples": [dataclasses.asdict(one) for one in windows],
    }
    notes = [
        f"{files.name} in {device.dtype} on {device.name}, {device.num_threads} threads; "
        f"windows of {context} tokens.",
    ]
    if scored.interrupted:
        notes.insert(0, "Interrupted: these are the windows that had been scored.")
    show(quality_report(figures, notes), document, as_json=json, save=save)
    if scored.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def load_pair(
    files: ModelFiles,
    settings: Settings,
    kernels: Path,
    num_tokens: int,
    report: Callable[[str], None],
) -> TargetPair:
    """The model as the settings have it served, and in float32; caches hold `num_tokens` tokens.

    Both have the values of the same weights, quantised ones too. `kernels` is the folder of
    compiled kernels, `report` hears of a compilation.

    Raises:
        InvalidValue: The model's own context is shorter.
        ModelError: The model's files cannot be used.
    """
    import torch

    from chatrt.cli.executor import Executor, find_executor
    from chatrt.models.loader import read_config
    from chatrt.models.quantize import load_quantization
    from chatrt_kernels.reference import ReferenceOps

    longest = read_config(files).max_context
    if num_tokens > longest:
        raise InvalidValue(f"--context is {num_tokens}, the model's own is {longest} tokens")
    serving = find_executor(settings, kernels, report)
    machine = serving.machine
    quantize = load_quantization(settings.quantize, native_kernels=machine.native)
    exact = dataclasses.replace(
        machine, dtype=torch.float32, kv_dtype=torch.float32, kernels="reference"
    )
    reference = Executor(ReferenceOps(torch.float32, machine.device), exact)
    torch.set_num_threads(machine.num_threads)
    served, held_to = (
        _target(files, one, settings, num_tokens, quantize=quantize) for one in (serving, reference)
    )
    return TargetPair(served, held_to)


def _target(
    files: ModelFiles,
    executor: Executor,
    settings: Settings,
    num_tokens: int,
    *,
    quantize: LoadQuantization,
) -> Target:
    """One sequence of `num_tokens` tokens on an executor."""
    from chatrt.batch import BatchBuilder
    from chatrt.cli.build import kv_cache
    from chatrt.engine import Target
    from chatrt.models.decoder import Decoder
    from chatrt.models.loader import load_model
    from chatrt.text.tokenizer import Tokenizer

    ops, machine = executor.ops, executor.machine
    device, dtype = machine.device, machine.dtype
    model = load_model(files, ops, device=device, dtype=dtype, quantize=quantize)
    config, page_size = model.config, settings.page_size
    max_rows = min(num_tokens, settings.max_num_batched_tokens)
    num_pages = -(-num_tokens // page_size)
    decoder = Decoder(
        config,
        model.weights,
        ops,
        max_rows=max_rows,
        max_positions=num_tokens,
        device=device,
        dtype=dtype,
    )
    kv = kv_cache(config, num_pages, page_size, executor)
    batches = BatchBuilder(max_rows, 1, num_pages, page_size, device)
    tokenizer = Tokenizer.load(files.tokenizer_dir, eos_token_ids=config.eos_token_ids)
    return Target(decoder, kv, batches, tokenizer, executor.sampler_for(config))


def _measure(
    files: ModelFiles,
    resolved: Resolved,
    kernels: Path,
    text: str,
    context: int,
    limit: int | None,
) -> _Scored:
    """Score the text, or what of it is scored by Ctrl+C.

    Raises:
        InvalidValue: The text is too short.
        KeyboardInterrupt: Nothing had been scored yet.
    """
    from chatrt.bench.quality import measure_windows, num_windows

    with common.waiting() as report:
        report(f"loading {files.name} twice")
        pair = load_pair(files, resolved.settings, kernels, context, report)
    token_ids: Sequence[int] = pair.reference.tokenizer.encode(text)
    if limit is not None:
        token_ids = token_ids[: limit + 1]
    if len(token_ids) < 2:
        raise InvalidValue(f"the text has {len(token_ids)} tokens, at least 2 are needed")
    windows: list[WindowSums] = []
    try:
        with counting_bar("windows", num_windows(len(token_ids), context)) as advance:
            for one in measure_windows(pair.served, pair.reference, token_ids, context):
                windows.append(one)
                advance()
    except KeyboardInterrupt:
        if not windows:
            raise
        return _Scored(windows, interrupted=True)
    return _Scored(windows, interrupted=False)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{path} is not UTF-8 text: {error}") from error


def _fetch(settings: Settings, paths: Paths) -> ModelFiles:
    from chatrt.models.sources import fetch, resolve

    with common.ProgressBar() as progress:
        source = resolve(settings.model, cache_dir=paths.cache)
        return fetch(source, cache_dir=paths.cache, progress=progress)


def register(group: typer.Typer) -> None:
    """Adds the command."""
    group.command()(quality)
