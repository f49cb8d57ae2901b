"""A server for one measurement: started fresh, with folders of its own, ended afterwards.

Knows: `chatrt serve` as a command, the folders, how a server is killed and started again on them.
Does not know: models, what is measured.
Invariant: neither a person's server nor their conversations and KV pages are touched; the cache of
models and config.toml are theirs. Should this process be killed, the server ends by itself.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from chatrt.errors import ServerUnavailable
from chatrt.launch import attach_or_start, read_record, server_arguments, stop_server
from chatrt.paths import HOME_VARIABLE, Paths, ensure_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from chatrt.launch import Endpoint
    from chatrt.settings import Settings

_IDLE_EXIT_S = 600.0
# The command line with another home; a variable set here would be this process's, too.
_WITH_HOME = (
    f"import os, sys; os.environ[{HOME_VARIABLE!r}] = sys.argv.pop(1); "
    "from chatrt.cli.main import main; sys.exit(main())"
)


class OwnServer:
    """A server that runs on folders which nobody else uses; `own_server` makes it.

    `endpoint` is where it listens; a server that was started again listens on another port.
    """

    def __init__(self, start: Callable[[], Endpoint], own: Paths) -> None:
        self.endpoint = start()
        self._start = start
        self._own = own

    def restart(self) -> Endpoint:
        """Kill the server, as a crash or `kill -9` would, and start it again on its folders.

        Raises:
            ServerUnavailable: There is no server to kill, or it does not start again.
        """
        record = read_record(self._own)
        if record is None:
            raise ServerUnavailable("the server that is to be started again does not run")
        _kill(record.pid)
        self.endpoint = self._start()
        return self.endpoint


@contextmanager
def own_server(
    model: str,
    settings: Settings,
    paths: Paths,
    *,
    report: Callable[[str], None],
    served_name: str,
    arguments: Sequence[str] = (),
) -> Iterator[OwnServer]:
    """A ready server for `model` on a free port, which can be killed and started again.

    `settings` and `paths` are the person's; `arguments` stand at the end of its command line.

    Raises:
        ServerUnavailable: It could not start; the sentence is the server's own.
    """
    # Its last breath (closing its files) may come while the folder goes.
    with tempfile.TemporaryDirectory(prefix="chatrt-bench-", ignore_cleanup_errors=True) as name:
        home = Path(name)
        own = _folders(home, paths)
        own_settings = _settings(settings, own)

        def command(wanted: str, its_settings: Settings, port: int) -> list[str]:
            usual = server_arguments(wanted, its_settings, port)
            # KV pages would lie in the cache, which is the person's.
            pages = ("--kv-dir", str(own.data / "kv"))
            return [sys.executable, "-c", _WITH_HOME, str(home), *usual, *pages, *arguments]

        def start() -> Endpoint:
            return attach_or_start(
                model, own_settings, own, report=report, served_name=served_name, command=command
            )

        try:
            yield OwnServer(start, own)
        finally:
            stopped = stop_server(own)
            if stopped is not None:  # it closes files for a moment after it has stopped answering
                _wait_gone(stopped.pid)


def _settings(settings: Settings, own: Paths) -> Settings:
    """The person's, with an address and a key that are its own."""
    return dataclasses.replace(
        settings,
        host="127.0.0.1",
        port=0,
        api_key_file=own.api_key,
        idle_exit_s=_IDLE_EXIT_S,
    )


def _kill(pid: int) -> None:
    """End a process at once and wait until it is gone; it is a child of this one."""
    # Windows has no SIGKILL; every signal ends a process there at once.
    os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
    _wait_gone(pid)


def _wait_gone(pid: int) -> None:
    """Wait until a child of this process is gone; Windows cannot."""
    if hasattr(os, "waitpid"):
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _folders(home: Path, paths: Paths) -> Paths:
    """Folders below `home`, with the person's cache and config behind links."""
    own = Paths.find({HOME_VARIABLE: str(home)})
    ensure_folder(paths.cache)
    own.cache.symlink_to(paths.cache, target_is_directory=True)
    if paths.config.is_dir():
        own.config.symlink_to(paths.config, target_is_directory=True)
    return own
