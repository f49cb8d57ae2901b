"""What several commands need: folders, settings, sizes in words, progress on stderr.

Knows: the process's environment and whether stderr is a terminal. Does not know: any command.
Invariant: nothing here writes to stdout but `show_json`; the key of this machine is sent to this
machine only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatrt.api_keys import read_api_keys
from chatrt.errors import InvalidValue
from chatrt.launch import Endpoint
from chatrt.paths import Paths
from chatrt.settings import Resolved, Settings, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from rich.progress import Progress, TaskID

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def find_paths() -> Paths:
    """The folders of this process's environment."""
    return Paths.find(os.environ)


def load_settings(paths: Paths, flags: Mapping[str, object] | None = None) -> Resolved:
    """The settings of this process; flags that are None were not given."""
    return load(flags or {}, os.environ, paths.config_file)


def require_terminal() -> None:
    """Raise InvalidValue unless a person sits at both ends."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidValue("chatrt chat needs a terminal; in a pipe use: chatrt run PROMPT")


def require_serving() -> None:
    """Raise ModuleNotFoundError unless the serving part is installed; imports nothing."""
    for name in ("torch", "tokenizers", "psutil"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def size_text(num_bytes: int) -> str:
    """`98200000` as `98.2 MB`."""
    from rich.filesize import decimal

    return decimal(num_bytes)


def value_text(value: object) -> str:
    """A setting's value as config.toml would have it, or the word that unsets it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{one}"' for one in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def show_json(value: object) -> None:
    """Prints one JSON document, paths as texts."""
    import msgspec

    data = msgspec.json.encode(value, enc_hook=str)
    typer.echo(msgspec.json.format(data, indent=2).decode())


def present_path(model: str, cache_dir: Path) -> Path | None:
    """Where the model lies on this machine, None while it has to be fetched.

    Raises:
        ModelNotFound: It is neither a known name, nor a file or folder, nor a Hugging Face id.
    """
    from chatrt.models.sources import LocalModel, list_models, resolve

    source = resolve(model, cache_dir=cache_dir)
    if isinstance(source, LocalModel):
        return source.path
    return next((one.path for one in list_models(cache_dir) if one.name == source.name), None)


def served_name(model: str, paths: Paths) -> str:
    """The name that a server of this model goes by.

    Raises:
        ModelNotFound: There is no such model.
    """
    from chatrt.models.sources import resolve

    return resolve(model, cache_dir=paths.cache).name


def remote_endpoint(url: str, settings: Settings, paths: Paths) -> Endpoint:
    """The server at `url`, with the key of the settings, or this machine's own on loopback.

    Raises:
        SettingsError: The key's file cannot be read.
    """
    if settings.api_key_file is not None:
        return Endpoint(url, read_api_keys(settings.api_key_file)[0])
    from chatrt.client.http import is_loopback

    if is_loopback(url) and paths.api_key.exists():
        return Endpoint(url, read_api_keys(paths.api_key)[0])
    return Endpoint(url, None)


class ProgressBar:
    """A bar on stderr for a fetch, drawn from its first call on; without a terminal, a line.

    `used` tells whether there was anything to fetch.
    """

    def __init__(self) -> None:
        self.used = False
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, done_bytes: int, total_bytes: int | None, what: str) -> None:
        """Shows how far `what` is; `total_bytes` None while that is not known."""
        if self._progress is None:
            self._progress = _new_progress()
            self._progress.start()
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total_bytes)
            if self._progress.disable:
                typer.echo(f"fetching {what}", err=True)
        self.used = True
        self._progress.update(self._tasks[what], completed=done_bytes, total=total_bytes)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            for task in self._progress.tasks:
                if task.total is None:  # done as well, but a bar without an end never shows that
                    self._progress.remove_task(task.id)
            self._progress.stop()


def _new_progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


@contextlib.contextmanager
def waiting() -> Iterator[Callable[[str], None]]:
    """Gives a function that says what is being waited for: one line that changes, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: typer.echo(text, err=True)
        return
    from rich.console import Console

    # The status starts with the first text: attaching to a running server shows nothing at all.
    with contextlib.ExitStack() as stack:
        status = Console(stderr=True).status("")
        started = False

        def report(text: str) -> None:
            nonlocal started
            status.update(text)
            if not started:
                stack.enter_context(status)
                started = True

        yield report
