"""`chatrt bench kv`: what KV pages in fewer bits save, and what they cost.

Knows: which measurements tell that, how they are run for each type of pages.
Does not know: how they measure. Invariant: one process at a time; all types score the same text and
answer the same prompts.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatrt.cli import common
from chatrt.cli.bench_child import ended_like_ctrl_c, measure_apart
from chatrt.cli.bench_output import (
    EXIT_INTERRUPTED,
    CompareOption,
    JsonOption,
    SaveOption,
    device_of,
    show,
    show_comparison,
)
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from chatrt.bench.kv_report import KVFigures
    from chatrt.settings import Settings

_DEFAULT = "fp16,int8,int4"
_VARIABLE = "CHATRT_KV_DTYPE"


def kv(
    dtypes: Annotated[
        str, typer.Option(help="Types of pages, with commas; the first is compared with.")
    ] = _DEFAULT,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Score so many tokens only. [the whole text]")
    ] = None,
    per_kind: Annotated[
        int, typer.Option(min=1, help="Prompts of each kind that acceptance is measured over.")
    ] = 2,
    acceptance: Annotated[
        bool, typer.Option("--acceptance/--no-acceptance", help="Measure it, too.")
    ] = True,
    compare: CompareOption = None,
    json: JsonOption = False,
    save: SaveOption = None,
) -> None:
    """Bytes, perplexity and accepted drafts for each type of KV pages.

    `bench quality` and `bench speculation --depth 4` for each type, one after the other, with the
    settings of CHATRT_* variables and config.toml.
    """
    if compare is not None:
        show_comparison("kv", *compare, as_json=json, save=save)
        return
    from chatrt.bench.document import new_document
    from chatrt.bench.kv_report import kv_report

    settings = common.load_settings(common.find_paths(), {}).settings
    names = _names(dtypes)
    quality = ["quality", *(("--tokens", str(tokens)) if tokens is not None else ())]
    speculation = ["speculation", "--depth", "4", "--per-kind", str(per_kind)]
    run = _KVRun([quality, *([speculation] if acceptance else [])])
    with ended_like_ctrl_c():
        figures = run.play(names, settings)
    resolved = common.load_settings(common.find_paths(), {})
    document = new_document("kv", seed=0, device=device_of(resolved)) | {
        "settings": {"dtypes": names, "tokens": tokens, "per_kind": per_kind},
        "interrupted": run.interrupted,
        "by_dtype": {name: dataclasses.asdict(one) for name, one in figures.items()},
    }
    show(kv_report(figures), document, as_json=json, save=save)
    if run.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if run.failed:
        raise typer.Exit(1)


class _KVRun:
    """The measurements for one type after the other."""

    def __init__(self, commands: list[list[str]]) -> None:
        self.interrupted = False
        self.failed = False
        self._commands = commands

    def play(self, names: list[str], settings: Settings) -> dict[str, KVFigures]:
        """The figures of each type, as far as Ctrl+C lets them come."""
        from chatrt.bench.kv_report import KVFigures

        figures: dict[str, KVFigures] = {}
        for name in names:
            documents = {} if self.interrupted else self._documents(name)
            if "quality" in documents:
                num_bytes = _bytes_per_token(settings, name)
                figures[name] = KVFigures.of(
                    num_bytes, documents["quality"], documents.get("speculation")
                )
        return figures

    def _documents(self, name: str) -> dict[str, dict[str, Any]]:
        from chatrt.bench.comparison import read_document

        found: dict[str, dict[str, Any]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for command in self._commands:
                typer.echo(f"{name}: chatrt bench {' '.join(command)}", err=True)
                file = Path(folder) / f"{command[0]}.json"
                ended = measure_apart(command, file, {_VARIABLE: name})
                self.failed = self.failed or ended.code != 0
                if ended.interrupted:
                    self.interrupted = True
                    break
                if ended.code == 0:
                    found[command[0]] = read_document(file)
        return found


def _names(text: str) -> list[str]:
    """`fp16,int8` as a list.

    Raises:
        InvalidValue: One of them is no type of pages.
    """
    from chatrt.cli.machine import KV_DTYPES

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in KV_DTYPES:
            raise InvalidValue(
                f"--dtypes names {name!r}, it must be one of {', '.join(KV_DTYPES)}",
                param="--dtypes",
            )
    return names


def _bytes_per_token(settings: Settings, name: str) -> int:
    """Of the target's pages, over all layers."""
    from chatrt.cli.machine import KV_DTYPES
    from chatrt.kvcache import KVCache
    from chatrt.models.loader import read_config
    from chatrt.models.sources import fetch, resolve

    cache_dir = common.find_paths().cache
    with common.ProgressBar() as progress:
        source = resolve(settings.model, cache_dir=cache_dir)
        config = read_config(fetch(source, cache_dir=cache_dir, progress=progress))
    return KVCache.bytes_per_page(
        num_layers=config.num_layers,
        page_size=1,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=KV_DTYPES[name],
    )


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command()(kv)
