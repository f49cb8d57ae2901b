"""`chatrt top`: what the running server does right now, on a screen, as a table or as JSON.

Knows: which server is meant, what is printed. Does not know: how a figure is shown.
Invariant: a server is never started here. Never imports torch.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatrt.api_keys import read_api_keys
from chatrt.cli import common
from chatrt.errors import InvalidValue, ServerUnavailable
from chatrt.launch import Endpoint, find_server

if TYPE_CHECKING:
    from chatrt.client import HttpRoutes
    from chatrt.paths import Paths
    from chatrt.settings import Settings
    from chatrt.wire.live import LiveFigures

_TIMEOUT_S = 3.0  # an answer waits for one step of the engine; quitting may wait for an answer
_LEAST_INTERVAL_S = 0.1
_MOST_INTERVAL_S = 3600.0
_PIPE_CELLS = 140


def top(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="The address of a server (ws://…).")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key; default: the generated one.")
    ] = None,
    interval: Annotated[
        float,
        typer.Option(
            min=_LEAST_INTERVAL_S, max=_MOST_INTERVAL_S, help="Seconds between two looks."
        ),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look as a table.")] = False,
    as_json: common.JsonOption = False,
) -> None:
    """Show what the running server does right now.

    Your turns, their latencies, pages, drafts; turns of other API keys are counted, not shown.
    Times are the server's, in ms. TTFT and gaps at the top are of your last 50 turns, steps of the
    newest ones. q quits, p pauses, s orders.
    """
    paths = common.find_paths()
    settings = common.load_settings(paths, {"api_key_file": api_key_file}).settings
    endpoint = _find_endpoint(url, settings, paths)
    from chatrt.client import HttpRoutes

    routes = HttpRoutes(endpoint.url, api_key=endpoint.api_key, timeout_s=_TIMEOUT_S)
    if as_json:
        common.show_json(asyncio.run(routes.live()))
    elif once:
        _print(asyncio.run(routes.live()))
    else:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise InvalidValue("chatrt top needs a terminal; in a pipe use: chatrt top --once")
        asyncio.run(_check(routes))
        # The terminal's package is only needed here.
        from chatrt_tui.terminal import end_with_terminal
        from chatrt_tui.top import TopApp

        end_with_terminal()
        TopApp(routes, interval_s=interval).run()


def _find_endpoint(url: str | None, settings: Settings, paths: Paths) -> Endpoint:
    """The server at `url`, else the one that runs on this machine.

    Raises:
        ServerUnavailable: None runs.
        SettingsError: The key's file cannot be read.
    """
    if url is not None:
        return common.remote_endpoint(url, settings, paths)
    record = find_server(paths)
    if record is None:
        raise ServerUnavailable(
            "no server runs on this machine: `chatrt serve` or `chatrt chat` starts one, "
            "`chatrt top ws://HOST:PORT` looks at another machine's"
        )
    key_file = settings.api_key_file or paths.api_key
    known = settings.api_key_file is not None or key_file.exists()
    return Endpoint(record.url, read_api_keys(key_file)[0] if known else None)


async def _check(routes: HttpRoutes) -> None:
    """Raise what a first look raises, unless the server is only not ready yet."""
    try:
        await routes.live()
    except ServerUnavailable:
        if not await routes.health():
            raise


def _print(figures: LiveFigures) -> None:
    from rich.console import Console

    from chatrt_tui.top_print import frame

    console = Console(width=None if sys.stdout.isatty() else _PIPE_CELLS)
    console.print(frame(figures, console.width))


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(top)
