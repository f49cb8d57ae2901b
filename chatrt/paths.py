"""Where chatrt keeps its files: four folders, found once at start and passed on.

Knows: the platform's folders (platformdirs), `CHATRT_HOME`, the name of every file in them but
those in the cache, which are the own of the modules that put them there.
Does not know: what is in the files. Invariant: a folder that chatrt creates is its user's only
(0700), and nothing is created before it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

if TYPE_CHECKING:
    from collections.abc import Mapping

APP_NAME = "chatrt"
HOME_VARIABLE = "CHATRT_HOME"
FOLDER_MODE = 0o700


@dataclass(frozen=True, slots=True)
class Paths:
    """The four folders, and the files that chatrt keeps in them.

    `cache` may be deleted at any time (models are fetched and kernels compiled again), `data`
    holds conversations, `state` what belongs to this machine and its running server, `config` what
    a person writes.
    """

    cache: Path
    data: Path
    state: Path
    config: Path

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Paths:
        """The folders below `CHATRT_HOME` where it is set, else the platform's own.

        platformdirs reads the platform's variables (`XDG_CACHE_HOME`, …) from the process itself,
        not from `environ`.
        """
        if home := environ.get(HOME_VARIABLE):
            root = Path(home).expanduser().absolute()
            return cls(root / "cache", root / "data", root / "state", root / "config")
        folders = platformdirs.PlatformDirs(APP_NAME, appauthor=False)
        return cls(
            folders.user_cache_path,
            folders.user_data_path,
            folders.user_state_path,
            folders.user_config_path,
        )

    @property
    def kernels(self) -> Path:
        """Folder of the CPU kernels, compiled for this machine."""
        return self.cache / "kernels"

    @property
    def kv_pages(self) -> Path:
        """KV pages of stored conversations."""
        return self.cache / "kv"

    @property
    def database(self) -> Path:
        """The conversation store."""
        return self.data / "conversations.sqlite3"

    @property
    def logs(self) -> Path:
        """Folder of log files."""
        return self.state / "logs"

    @property
    def server_log(self) -> Path:
        """Everything that the background server prints."""
        return self.logs / "server.log"

    @property
    def server_record(self) -> Path:
        """Says which server runs, and where."""
        return self.state / "server.json"

    @property
    def server_status(self) -> Path:
        """One line: what a starting server is doing."""
        return self.state / "server-status"

    @property
    def start_lock(self) -> Path:
        """Held while a server is being started, so that two terminals start one."""
        return self.state / "start.lock"

    @property
    def api_key(self) -> Path:
        """The key that was generated at the first start (0600)."""
        return self.state / "api-key"

    @property
    def terminal_state(self) -> Path:
        """What the terminal client remembers: its theme."""
        return self.state / "terminal.json"

    @property
    def config_file(self) -> Path:
        """Settings that a person wrote."""
        return self.config / "config.toml"


def ensure_folder(folder: Path) -> Path:
    """Creates `folder` and its missing parents, each 0700, and returns it.

    Raises:
        OSError: It cannot be created.
    """
    if not folder.is_dir():
        ensure_folder(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    return folder
