"""`chatrt chat`: the terminal client, on a running server or on one that is started for it.

Knows: whether a target is an address or a model. Does not know: models, how a server starts.
Never imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatrt.cli import common
from chatrt.errors import InvalidValue
from chatrt.launch import attach_or_start, find_server
from chatrt.settings import describe

if TYPE_CHECKING:
    import ssl as ssl_module

_TYPING_AHEAD = describe()["typing_ahead"].doc
_SCHEMES = ("ws://", "wss://", "http://", "https://")


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
    typing_ahead: Annotated[
        bool | None,
        typer.Option(
            "--typing-ahead/--no-typing-ahead",
            help=f"{_TYPING_AHEAD[0].upper()}{_TYPING_AHEAD[1:]}. [on]",
        ),
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(
            help="Certificates (PEM) to trust at a wss:// address; default: the system's."
        ),
    ] = None,
    inline: Annotated[bool, typer.Option("--inline", help="Keep the shell visible.")] = False,
) -> None:
    """Chat in the terminal.

    A server is started in the background if none runs; its log is in the state folder.
    """
    paths = common.find_paths()
    flags = {
        "api_key_file": api_key_file,
        "idle_exit_s": idle_exit,
        "typing_ahead": typing_ahead,
    }
    settings = common.load_settings(paths, flags).settings
    common.require_terminal()
    if target is not None and target.startswith(_SCHEMES):
        endpoint = common.remote_endpoint(target, settings, paths)
    else:
        name = None if target is None else common.served_name(target, paths)
        with common.waiting() as report:
            endpoint = attach_or_start(target, settings, paths, report=report, served_name=name)
    # The terminal client is a package of its own, and only this command needs it.
    from chatrt_tui.main import run

    run(
        endpoint.url,
        endpoint.api_key,
        inline=inline,
        typing_ahead=settings.typing_ahead,
        ssl=None if ca_file is None else trusting(ca_file),
        state_file=paths.terminal_state,
    )
    if find_server(paths) is not None:
        typer.echo("The server keeps running for a while; `chatrt stop` ends it.", err=True)


def trusting(ca_file: Path) -> ssl_module.SSLContext:
    """What verifies a server by these certificates alone.

    Raises:
        InvalidValue: The file cannot be read, or holds no certificate.
    """
    import ssl

    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        reason = (
            "it holds no PEM certificate" if isinstance(error, ssl.SSLError) else error.strerror
        )
        raise InvalidValue(f"--ca-file {ca_file} cannot be used: {reason}") from None


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(chat)
