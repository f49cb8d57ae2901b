"""`chatrt pull`: puts a model's files on this machine.

Knows: what is printed. Does not know: where files come from. Never imports torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from chatrt.cli import common


def pull(
    model: Annotated[
        str | None, typer.Argument(help="Name, file, folder or org/name; default: the settings'.")
    ] = None,
    quiet_if_present: Annotated[
        bool, typer.Option("--quiet-if-present", help="Print nothing if there is nothing to do.")
    ] = False,
) -> None:
    """Fetch a model.

    One that is already there is only checked.
    """
    from chatrt.models.sources import fetch, resolve

    paths = common.find_paths()
    name = model or common.load_settings(paths).settings.model
    with common.ProgressBar() as progress:
        files = fetch(
            resolve(name, cache_dir=paths.cache),
            cache_dir=paths.cache,
            progress=progress,
            repair=True,
        )
    if progress.used or not quiet_if_present:
        num_bytes = sum(one.stat().st_size for one in files.weight_files())
        typer.echo(f"{files.name}: {files.path} ({common.size_text(num_bytes)})")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(pull)
