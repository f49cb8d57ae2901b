"""A server for one measurement: started fresh, with folders of its own, ended afterwards.

Knows: `chatrt serve` as a command, the folders. Does not know: models, what is measured.
Invariant: neither a person's server nor their conversations are touched; the cache of models and
config.toml are theirs. Should this process be killed, the server ends by itself.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from chatrt.launch import attach_or_start, server_arguments, stop_server
from chatrt.paths import HOME_VARIABLE, Paths, ensure_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from chatrt.launch import Endpoint
    from chatrt.settings import Settings

_IDLE_EXIT_S = 600.0
# The command line with another home; a variable set here would be this process's, too.
_WITH_HOME = (
    f"import os, sys; os.environ[{HOME_VARIABLE!r}] = sys.argv.pop(1); "
    "from chatrt.cli.main import main; sys.exit(main())"
)


@contextmanager
def own_server(
    model: str,
    settings: Settings,
    paths: Paths,
    *,
    report: Callable[[str], None],
    served_name: str,
) -> Iterator[Endpoint]:
    """A ready server for `model` on a free port; `settings` and `paths` are the person's.

    Raises:
        ServerUnavailable: It could not start; the sentence is the server's own.
    """
    # Its last breath (closing its files) may come while the folder goes.
    with tempfile.TemporaryDirectory(prefix="chatrt-bench-", ignore_cleanup_errors=True) as name:
        home = Path(name)
        own = _folders(home, paths)
        own_settings = dataclasses.replace(
            settings,
            host="127.0.0.1",
            port=0,
            api_key_file=own.api_key,
            idle_exit_s=_IDLE_EXIT_S,
        )

        def command(wanted: str, its_settings: Settings, port: int) -> list[str]:
            arguments = server_arguments(wanted, its_settings, port)
            return [sys.executable, "-c", _WITH_HOME, str(home), *arguments]

        try:
            yield attach_or_start(
                model, own_settings, own, report=report, served_name=served_name, command=command
            )
        finally:
            stop_server(own)


def _folders(home: Path, paths: Paths) -> Paths:
    """Folders below `home`, with the person's cache and config behind links."""
    own = Paths.find({HOME_VARIABLE: str(home)})
    ensure_folder(paths.cache)
    own.cache.symlink_to(paths.cache, target_is_directory=True)
    if paths.config.is_dir():
        own.config.symlink_to(paths.config, target_is_directory=True)
    return own
