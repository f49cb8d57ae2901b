"""What the commands that measure a peer share: which interpreter has it, which file it reads.

Knows: options, settings. Does not know: peers, what is measured.
Invariant: nothing is fetched.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatrt.cli import common
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from chatrt.cli.bench_server import ServerChoice

PeerPythonOption = Annotated[
    Path | None,
    typer.Option(
        help="Python that has the peers; default: .venv-peers beside this one's, else it."
    ),
]
PeerTimeoutOption = Annotated[
    float, typer.Option(min=1, help="Seconds that one answer of a peer may take.")
]


def local_model(choice: ServerChoice, *, needed_by: str) -> Path:
    """Where the model of a fresh server lies on this machine.

    Raises:
        ModelNotFound: There is no such model.
        InvalidValue: It has to be fetched first.
    """
    model = choice.resolved.settings.model
    path = common.present_path(model, choice.paths.cache)
    if path is None:
        raise InvalidValue(
            f"{needed_by} needs the model's file on this machine: chatrt pull {model}"
        )
    return path
