"""`chatrt chat`: the terminal client, on a running server or on one that is started for it.

Knows: how a target becomes an address and a key. Does not know: models, how a server starts.
Never imports torch. Invariant: the key of this machine is sent to this machine only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from chatrt.api_keys import read_api_keys
from chatrt.cli import common
from chatrt.launch import Endpoint, attach_or_start

if TYPE_CHECKING:
    from chatrt.paths import Paths
    from chatrt.settings import Settings

_SCHEMES = ("ws://", "wss://", "http://", "https://")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def chat(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL|URL]", help="A model, or the address of a server (ws://…)."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key; default: the generated one.")
    ] = None,
    idle_exit: Annotated[
        str | None,
        typer.Option(help="A server started here ends this long after its last client. [30m]"),
    ] = None,
    inline: Annotated[bool, typer.Option("--inline", help="Keep the shell visible.")] = False,
) -> None:
    """Chat in the terminal.

    A server is started in the background if none runs; its log is in the state folder.
    """
    paths = common.find_paths()
    flags = {"api_key_file": api_key_file, "idle_exit_s": idle_exit}
    settings = common.load_settings(paths, flags).settings
    common.require_terminal()
    if target is not None and target.startswith(_SCHEMES):
        endpoint = remote_endpoint(target, settings, paths)
    else:
        name = None if target is None else served_name(target, paths)
        with common.waiting() as report:
            endpoint = attach_or_start(target, settings, paths, report=report, served_name=name)
    # The terminal client is a package of its own, and only this command needs it.
    from chatrt_tui.main import run

    run(endpoint.url, endpoint.api_key, inline=inline)


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
    if urlsplit(url).hostname in _LOOPBACK and paths.api_key.exists():
        return Endpoint(url, read_api_keys(paths.api_key)[0])
    return Endpoint(url, None)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(chat)
