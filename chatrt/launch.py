"""Finds the server that runs on this machine, or starts one in the background.

Knows: the server's record, its status line, its log, the lock around a start.
Does not know: models, how a server works, terminals; never imports torch.
Invariant: two callers at once end up with one server; a record whose server does not answer counts
as no server. Cost: finding a running server is two HTTP requests on loopback (a few ms).
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

import chatrt
from chatrt.api_keys import ensure_api_keys
from chatrt.errors import ServerUnavailable
from chatrt.paths import ensure_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from chatrt.paths import Paths
    from chatrt.settings import Settings

BACKGROUND_IDLE_EXIT_S = 1800.0
ERROR_PREFIX = "chatrt: "
MAX_LOG_BYTES = 1 << 20
PROBE_TIMEOUT_S = 2.0
STALL_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a client connects, and with which key."""

    url: str
    api_key: str | None


class ServerRecord(msgspec.Struct, frozen=True):
    """What a running server says about itself; `started_at` is in seconds since the epoch."""

    pid: int
    url: str
    model: str
    started_at: float
    version: str

    @property
    def page(self) -> str:
        """The address of the web page that it serves."""
        return self.url.replace("ws://", "http://", 1).removesuffix("v1/responses")


# What a server writes


def register_server(
    paths: Paths, *, host: str, port: int, model: str, started_at: float
) -> ServerRecord:
    """Leaves the record of this process's server, which listens on `host` and `port`.

    Where another server runs already, its record stays: clients go on finding that one. One that
    drains has given its address up: what answers there is this server.
    """
    host = _ANY_ADDRESS.get(host, host)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    url = f"ws://{address}/v1/responses"
    record = ServerRecord(os.getpid(), url, model, started_at, chatrt.__version__)
    other = find_server(paths)
    if other is not None and other.pid != record.pid and other.url != record.url:
        return other
    _replace(paths.server_record, msgspec.json.encode(record))
    return record


def unregister_server(paths: Paths) -> None:
    """Takes the record and the status line away, unless they are another process's by now."""
    record = read_record(paths)
    if record is not None and record.pid == os.getpid():
        paths.server_record.unlink(missing_ok=True)
        paths.server_status.unlink(missing_ok=True)


def write_status(paths: Paths, text: str) -> None:
    """Says in a few words what a starting server is doing (`downloading 12 of 93 MB`)."""
    _replace(paths.server_status, text.encode())


def _replace(path: Path, data: bytes) -> None:
    ensure_folder(path.parent)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)


# What a client reads


def read_record(paths: Paths) -> ServerRecord | None:
    """The record as it lies there, whether its server runs or not."""
    try:
        return msgspec.json.decode(paths.server_record.read_bytes(), type=ServerRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def find_server(paths: Paths) -> ServerRecord | None:
    """The server that runs and answers; a record that a dead one left counts as none."""
    record = read_record(paths)
    if record is not None and _runs(record.pid) and _answers(record.url, "/health"):
        return record
    return None


def server_command(model: str, settings: Settings, port: int) -> list[str]:
    """The command line of a background server; what it does not name is found as usual."""
    return [sys.executable, "-m", "chatrt", *server_arguments(model, settings, port)]


def server_arguments(model: str, settings: Settings, port: int) -> list[str]:
    """What stands behind `chatrt` in that command line."""
    idle_exit_s = settings.idle_exit_s
    if idle_exit_s is None:
        idle_exit_s = BACKGROUND_IDLE_EXIT_S
    arguments = ["serve", model, "--host", settings.host, "--port", str(port)]
    arguments += ["--idle-exit", f"{idle_exit_s}s"]
    if settings.api_key_file is not None:
        arguments += ["--api-key-file", str(settings.api_key_file.absolute())]
    return arguments


def attach_or_start(
    model: str | None,
    settings: Settings,
    paths: Paths,
    *,
    report: Callable[[str], None],
    served_name: str | None = None,
    command: Callable[[str, Settings, int], Sequence[str]] = server_command,
) -> Endpoint:
    """The running server once it is ready, or else a new one in the background.

    `model` None takes whatever runs, and `settings.model` for a new server. A running server must
    serve `served_name`, the name that `model` goes by (default: `model` itself). `report` is told
    in a few words, again and again, what is being waited for.

    Raises:
        ServerUnavailable: Another model is being served, or the server could not start; then the
            sentence is the server's own.
    """
    name = model if served_name is None else served_name
    record = find_server(paths)
    if record is None or not _answers(record.url, "/ready"):
        with _start_lock(paths, report):
            record = find_server(paths)
            child = None
            if record is None:
                # The server has a working directory of its own.
                wanted = settings.model if model is None else model
                if Path(wanted).exists():
                    wanted = str(Path(wanted).absolute())
                child = _start(command(wanted, settings, _free_port(settings, report)), paths)
            record = _wait_ready(paths, child, report)
    if name not in (None, record.model):
        raise ServerUnavailable(
            f"a server for {record.model} is running at {record.url}, {name} was asked for; "
            "end it with `chatrt stop`, or chat with it by leaving the name out"
        )
    if record.version != chatrt.__version__:
        report(f"the server is chatrt {record.version}, this is {chatrt.__version__}")
    return Endpoint(record.url, ensure_api_keys(settings.api_key_file or paths.api_key)[0])


def stop_server(paths: Paths, *, timeout_s: float = STOP_TIMEOUT_S) -> ServerRecord | None:
    """Tells the running server to end and waits until it has; None if there was none.

    Raises:
        ServerUnavailable: It may not be ended, or has not ended within `timeout_s`.
    """
    record = find_server(paths)
    if record is None:
        return None
    try:
        os.kill(record.pid, signal.SIGTERM)
    except PermissionError as error:
        raise ServerUnavailable(f"process {record.pid} is another user's") from error
    except ProcessLookupError:
        return record
    end = time.monotonic() + timeout_s
    while _answers(record.url, "/health"):
        if time.monotonic() > end:
            raise ServerUnavailable(
                f"the server (process {record.pid}) has not ended within {timeout_s:g} s"
            )
        time.sleep(_POLL_S)
    return record


# Starting


@dataclass(frozen=True, slots=True)
class _Child:
    """A server that this process started; its part of the log begins at `log_start`."""

    process: subprocess.Popen[bytes]
    log_start: int

    def check(self, log: Path) -> None:
        """Raises ServerUnavailable with the server's own sentence if it has ended."""
        if (status := self.process.poll()) is not None:
            raise ServerUnavailable(_why_it_ended(log, self.log_start, status))

    def end(self) -> None:
        """Ends the server, which nobody waits for any more."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def let_go(self) -> None:
        """Leaves the server running: Popen would warn that nobody waited for it."""
        self.process.returncode = 0


def _start(command: Sequence[str], paths: Paths) -> _Child:
    ensure_folder(paths.logs)
    log = paths.server_log
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_name(log.name + ".1"))
    paths.server_record.unlink(missing_ok=True)
    paths.server_status.unlink(missing_ok=True)
    flags = 0
    if sys.platform == "win32":
        flags = subprocess.DETACHED_PROCESS
    with log.open("ab") as output:
        log_start = output.seek(0, os.SEEK_END)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=paths.state,  # neither pins the caller's folder nor imports from it
                start_new_session=True,
                creationflags=flags,
            )
        except OSError as error:
            raise ServerUnavailable(f"{command[0]} cannot be started: {error}") from error
    return _Child(process, log_start)


def _wait_ready(paths: Paths, child: _Child | None, report: Callable[[str], None]) -> ServerRecord:
    """Waits until a server is ready; `child` is the one started here, None if it ran already."""
    try:
        record = _poll_ready(paths, child, report)
    except BaseException:
        if child is not None:
            child.end()
        raise
    if child is not None:
        child.let_go()
    return record


def _poll_ready(paths: Paths, child: _Child | None, report: Callable[[str], None]) -> ServerRecord:
    told = "starting the server"
    report(told)
    last_change = time.monotonic()
    while True:
        record = read_record(paths)
        if record is not None and _answers(record.url, "/ready"):
            return record
        if child is not None:
            child.check(paths.server_log)
        elif find_server(paths) is None:
            raise ServerUnavailable("the server ended before it was ready")
        if (status := _read_status(paths)) not in ("", told):
            report(status)
            told, last_change = status, time.monotonic()
        if time.monotonic() > last_change + STALL_TIMEOUT_S:
            raise ServerUnavailable(
                f"the server did not get further than “{told}” within {STALL_TIMEOUT_S:g} s; "
                f"its log is {paths.server_log}"
            )
        time.sleep(_POLL_S)


def _read_status(paths: Paths) -> str:
    try:
        return paths.server_status.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _why_it_ended(log: Path, start: int, status: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(ERROR_PREFIX)] or lines
    sentence = said[-1].removeprefix(ERROR_PREFIX) if said else f"exit status {status}, no word"
    return f"the server could not start: {sentence} (log: {log})"


def _free_port(settings: Settings, report: Callable[[str], None]) -> int:
    """The port of the settings, or 0 (any) where another program has it."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        if os.name == "posix":
            # Without it a port would count as taken for a minute after its last server ended.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError:
            report(f"port {settings.port} is taken, another one is used")
            return 0
    return settings.port


@contextlib.contextmanager
def _start_lock(paths: Paths, report: Callable[[str], None]) -> Iterator[None]:
    """Held by one process at a time; the others wait and pass on how far the start is."""
    ensure_folder(paths.state)
    told = "another terminal is starting the server"
    with paths.start_lock.open("a+b") as file:
        while not _try_lock(file.fileno()):
            if (status := _read_status(paths) or told) != told:
                report(status)
                told = status
            time.sleep(_POLL_S)
        yield  # closing the file releases the lock, and so does the end of the process


def _try_lock(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _runs(pid: int) -> bool:
    if os.name != "posix":
        return True  # signal 0 would end the process on Windows; the health check decides
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _answers(url: str, path: str) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port, timeout=PROBE_TIMEOUT_S
    )
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
