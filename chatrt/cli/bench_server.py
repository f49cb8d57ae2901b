"""The server that a command of `chatrt bench` measures: a fresh one of its own, or one by its URL.

Knows: settings, where a server's model runs. Does not know: what is measured.
Invariant: neither a person's server nor their conversations are touched unless a URL names it.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatrt.cli import common
from chatrt.cli.bench_output import device_of
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from chatrt.bench.document import Device
    from chatrt.bench.own_server import OwnServer
    from chatrt.launch import Endpoint
    from chatrt.paths import Paths
    from chatrt.settings import Resolved

UrlOption = Annotated[
    str | None, typer.Option(help="A running server; default: a fresh one, ended afterwards.")
]
ApiKeyFileOption = Annotated[
    Path | None, typer.Option(help="File with the key for --url; default: the generated one.")
]
_POLL_S = 0.2

ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="Model of the fresh server.")
]


@dataclass(frozen=True, slots=True)
class Measured:
    """A ready server. `device` and `own` are None for one that somebody else started."""

    endpoint: Endpoint
    device: Device | None
    own: OwnServer | None


@dataclass(frozen=True, slots=True)
class ServerChoice:
    """Which server a person asked for; `resolved` are the settings of a fresh one."""

    url: str | None
    resolved: Resolved
    paths: Paths

    @property
    def is_own(self) -> bool:
        """Whether it is started for the measurement."""
        return self.url is None


def choose_server(url: str | None, api_key_file: Path | None, model: str | None) -> ServerChoice:
    """The server that these options mean; nothing is started yet.

    Raises:
        InvalidValue: They exclude each other.
        SettingsError: A setting cannot be used.
    """
    if url is not None and model is not None:
        raise InvalidValue("--url and --model exclude each other: a server has its model already")
    paths = common.find_paths()
    flags = {"api_key_file": api_key_file, "model": model}
    return ServerChoice(url, common.load_settings(paths, flags), paths)


@contextlib.contextmanager
def measured_server(choice: ServerChoice, arguments: Sequence[str] = ()) -> Iterator[Measured]:
    """The server while it is measured; `arguments` end the command line of a fresh one.

    One with a URL that is still loading its model is waited for.

    Raises:
        ServerUnavailable: A fresh one could not start.
    """
    settings, paths = choice.resolved.settings, choice.paths
    if choice.url is not None:
        endpoint = common.remote_endpoint(choice.url, settings, paths)
        with common.waiting() as report:
            asyncio.run(_until_ready(endpoint, report))
        yield Measured(endpoint, None, None)
        return
    from chatrt.bench.own_server import own_server

    with contextlib.ExitStack() as stack:
        with common.waiting() as report:
            own = stack.enter_context(
                own_server(
                    settings.model,
                    settings,
                    paths,
                    report=report,
                    served_name=common.served_name(settings.model, paths),
                    arguments=arguments,
                )
            )
        yield Measured(own.endpoint, device_of(choice.resolved), own)


async def _until_ready(endpoint: Endpoint, report: Callable[[str], None]) -> None:
    """Wait while a server is alive and not ready; one that is not there is not waited for."""
    from chatrt.client import HttpRoutes

    http = HttpRoutes(endpoint.url, api_key=endpoint.api_key)
    told = False
    while not await http.ready() and await http.health():
        if not told:
            report("waiting for the server to be ready")
            told = True
        await asyncio.sleep(_POLL_S)


async def model_of(endpoint: Endpoint) -> Mapping[str, Any]:
    """What a server says of its model, nothing if it says nothing.

    Raises:
        ChatrtError: The server cannot be reached.
    """
    from chatrt.client import HttpRoutes

    models = await HttpRoutes(endpoint.url, api_key=endpoint.api_key).models()
    return models[0] if models else {}


def where_text(document: Mapping[str, Any]) -> str:
    """The model and what it runs on, as the document has them."""
    device = document["device"]
    where = (
        f"{device}, {document['num_threads']} threads" if device else "a device that is not known"
    )
    return f"{document.get('model') or 'unknown model'} on {where}"
