"""`chatrt kernels`: compiles the CPU kernels for this machine, if they are not there.

Knows: what is printed. Does not know: how they are compiled. Never imports torch.
Invariant: kernels that cannot be compiled are no failure, since PyTorch's operations serve then.
"""

from __future__ import annotations

from typing import Annotated

import typer

from chatrt.cli import common
from chatrt.launch import ERROR_PREFIX


def kernels(
    quiet_if_present: Annotated[
        bool, typer.Option("--quiet-if-present", help="Print nothing if there is nothing to do.")
    ] = False,
) -> None:
    """Compile the CPU kernels.

    The first start does it too. Without a C++ compiler it says so; chatrt works without them, more
    slowly.
    """
    from chatrt_kernels.cpu import build

    folder = common.find_paths().kernels
    present = build.built_library(folder) is not None
    try:
        with common.waiting() as report:
            library = build.ensure_library(folder, report=report)
    except build.BuildError as error:
        typer.echo(f"{ERROR_PREFIX}{error}; PyTorch's own operations serve, more slowly", err=True)
        return
    if not (present and quiet_if_present):
        typer.echo(f"CPU kernels: {library}")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(kernels)
