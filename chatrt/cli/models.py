"""`chatrt models`: the names that can be used, and what of them is on this machine.

Knows: what is printed. Does not know: how models are found. Never imports torch.
"""

from __future__ import annotations

import typer

from chatrt.cli import common


def models(as_json: common.JsonOption = False) -> None:
    """List the known and the present models.

    `*` marks the default.
    """
    from chatrt.models.sources import list_models

    paths = common.find_paths()
    default = common.load_settings(paths).settings.model
    listed = list_models(paths.cache)
    if as_json:
        common.show_json(
            [
                {
                    "name": one.name,
                    "default": one.name == default,
                    "present": one.path is not None,
                    "bytes": one.num_bytes,
                    "path": one.path,
                }
                for one in listed
            ]
        )
        return
    width = max(len(one.name) for one in listed)
    for one in listed:
        mark = "*" if one.name == default else " "
        size = "-" if one.num_bytes is None else common.size_text(one.num_bytes)
        typer.echo(f"{mark} {one.name:{width}}  {size:>10}  {one.path or 'not fetched'}")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(models)
