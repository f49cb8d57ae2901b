"""`chatrt stop`: ends the server that runs on this machine.

Knows: what is printed. Does not know: how a server is found. Never imports torch.
"""

from __future__ import annotations

import typer

from chatrt.cli import common
from chatrt.launch import stop_server


def stop() -> None:
    """End the running server, after its running answers."""
    record = stop_server(common.find_paths())
    if record is None:
        typer.echo("no server is running")
    else:
        typer.echo(f"the server of {record.model} at {record.url} has ended")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(stop)
