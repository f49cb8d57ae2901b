"""The command line: its commands, and what an error becomes on the way out.

Knows: which commands there are, exit codes, where sentences go.
Does not know: what a command does. Invariant: results go to stdout, everything else to stderr; no
traceback reaches a person unless CHATRT_DEBUG is set.
Cost: importing this imports neither torch, Textual nor websockets; each command imports what it
needs when it runs.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import chatrt
from chatrt.cli import (
    bench,
    chat,
    config,
    doctor,
    kernels,
    models,
    pull,
    run,
    serve,
    stop,
    top,
    train_draft,
)
from chatrt.errors import CallerError, ChatrtError, SettingsError
from chatrt.launch import ERROR_PREFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_RUNTIME = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_SPIN_COUNT = "1000"

# Each module has one `register(app)`; the order is that of `chatrt --help`.
COMMANDS = (chat, run, serve, pull, models, kernels, train_draft, bench, top, doctor, config, stop)

# What only the extra `serve` installs: a missing one means the extra, not a broken installation.
_SERVE_PACKAGES = {
    *("torch", "transformers", "tokenizers", "jinja2", "huggingface_hub", "gguf", "safetensors"),
    *("prometheus_client", "numpy", "psutil"),
}


class _Commands(TyperGroup):
    """Turns what a command raises into a sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt as error:
            typer.echo("", err=True)  # what follows does not stand behind ^C
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except BrokenPipeError as error:
            _drop_stdout()
            raise typer.Exit(EXIT_RUNTIME) from error
        except Exception as error:
            # Usage errors and exits are the framework's own; it shows them as they are meant.
            if os.environ.get("CHATRT_DEBUG") or type(error).__module__.startswith(_FRAMEWORK):
                raise
            typer.echo(ERROR_PREFIX + _sentence(error), err=True)
            caller = isinstance(error, CallerError | SettingsError)
            raise typer.Exit(EXIT_USAGE if caller else EXIT_RUNTIME) from error
        return result


_FRAMEWORK = ("typer", "click")


def _sentence(error: Exception) -> str:
    if isinstance(error, ChatrtError):
        return error.message
    if isinstance(error, ModuleNotFoundError) and error.name in _SERVE_PACKAGES:
        return (
            f"the serving part of chatrt is not installed ({error.name} is missing): "
            "install it with its extra [serve], as `make chat` does"
        )
    if isinstance(error, OSError):
        return str(error)
    return f"internal error: {type(error).__name__}: {error} (CHATRT_DEBUG=1 shows where)"


def _drop_stdout() -> None:
    """Whoever read our output is gone: nothing is left to say, also not while exiting."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    name="chatrt",
    cls=_Commands,
    help="An interactive chat runtime built for low latency.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"chatrt {chatrt.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Version.")
    ] = False,
) -> None:
    """What stands before a command."""
    del version  # its callback has answered


for command in COMMANDS:
    command.register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (that of the process by default) and returns its exit code."""
    # Read when torch is loaded. Threads that spin long at a barrier wait for one that does not run
    # as soon as another process takes a core; those that sleep at once lose time on a quiet
    # machine. The figures are in docs/adr/0006.
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="chatrt")
    except SystemExit as end:
        return EXIT_RUNTIME if isinstance(end.code, str) else int(end.code or 0)
    return 0
