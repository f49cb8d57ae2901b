"""`chatrt config`: every setting, its value and where it comes from.

Knows: what is printed. Does not know: what a setting does. Never imports torch.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import typer

from chatrt.cli import common
from chatrt.errors import ModelNotFound
from chatrt.settings import Sourced, describe

if TYPE_CHECKING:
    from chatrt.paths import Paths
    from chatrt.settings import Resolved


def config(as_json: common.JsonOption = False) -> None:
    """Show each setting with its value and where it comes from."""
    paths = common.find_paths()
    resolved = common.load_settings(paths)
    values = {
        name: Sourced(getattr(resolved.settings, name), resolved.origin(name))
        for name in describe()
    }
    model = resolved.settings.model
    sampling = resolved.sampling_defaults(model, _recommended(resolved, paths))
    if as_json:
        common.show_json({"file": paths.config_file, "settings": values, "sampling": sampling})
        return
    state = "" if paths.config_file.exists() else " (not there)"
    typer.echo(f"# {paths.config_file}{state}")
    _show(values)
    typer.echo(f'\n[models."{model}".sampling]  # where a request says nothing')
    _show(sampling)


def _show(values: dict[str, Sourced]) -> None:
    rows = [(name, common.value_text(one.value), one.origin) for name, one in values.items()]
    name_width, value_width = (max(len(row[index]) for row in rows) for index in (0, 1))
    for name, value, origin in rows:
        # TOML has no word for what is not set: a comment, so that the output is a config.toml.
        shown = f"{name:{name_width}} = {value:{value_width}}  # {origin}"
        typer.echo(f"# {shown}" if value == "none" else shown)


def _recommended(resolved: Resolved, paths: Paths) -> dict[str, object]:
    """What the model's makers recommend; nothing for a model that is not known or not there."""
    from chatrt.models.files import ModelFiles, generation_defaults
    from chatrt.models.sources import LocalModel, resolve

    model = resolved.settings.model
    try:
        source = resolve(model, cache_dir=paths.cache)
        path = common.present_path(model, paths.cache)
    except ModelNotFound:
        return {}
    own = None if isinstance(source, LocalModel) else source.generation
    if own is None and path is not None:
        own = generation_defaults(ModelFiles(source.name, path, path))
    if own is None:
        return {}
    return {one.name: getattr(own, one.name) for one in fields(own)}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(config)
