"""A real `chatrt serve` in a process of its own, and how tests look into it.

Knows: the command line, the server's record, HTTP routes. Does not know: what a test asks.
Invariant: a server that a test started has ended when its fixture is done.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chatrt.api_keys import read_api_keys
from chatrt.launch import read_record
from chatrt.paths import Paths
from chatrt.testing.serving import TERMINAL, Caller, calling_url
from tests.support import time_scale

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

START_TIMEOUT_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class HttpReply:
    """An HTTP answer, its JSON decoded."""

    status: int
    body: Any


@dataclass(slots=True)
class ServerProcess:
    """One server on a free port of loopback, its folders below `home`."""

    home: Path
    process: subprocess.Popen[bytes]
    started_s: float = field(default_factory=time.monotonic)
    url: str = ""

    @classmethod
    def start(cls, home: Path, model: str | None = None, *flags: str) -> ServerProcess:
        """Start a server and return once it is ready."""
        server = cls.launch(home, model, *flags)
        try:
            server.wait_ready()
        except BaseException:
            server.kill()
            raise
        return server

    @classmethod
    def launch(cls, home: Path, model: str | None = None, *flags: str) -> ServerProcess:
        """Start a server and return at once."""
        home.mkdir(parents=True, exist_ok=True)
        arguments = [] if model is None else [model]
        with (home / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "chatrt", "serve", *arguments, "--port", "0", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(home),
            )
        return cls(home, process)

    def wait_ready(self) -> None:
        """Return when `/ready` answers."""
        end = time.monotonic() + START_TIMEOUT_S * time_scale()
        while time.monotonic() < end:
            assert self.process.poll() is None, f"the server ended: {self.log()}"
            record = read_record(self.paths)
            if record is not None and record.pid == self.process.pid:
                self.url = record.url
                if self.get("/ready").status == 200:
                    return
            time.sleep(_POLL_S)
        raise AssertionError(f"the server is not ready: {self.log()}")

    @property
    def paths(self) -> Paths:
        return Paths.find({"CHATRT_HOME": str(self.home)})

    @property
    def api_key(self) -> str:
        return read_api_keys(self.paths.api_key)[0]

    @property
    def base_url(self) -> str:
        """What an SDK is given."""
        return self.url.replace("ws://", "http://").removesuffix("/responses")

    def log(self) -> str:
        """All that the server printed."""
        return (self.home / "log").read_text(encoding="utf-8", errors="replace")

    def get(self, path: str, *, method: str = "GET", key: str | None = None) -> HttpReply:
        """A request without a body; `path` begins with `/`."""
        address = self.base_url.removesuffix("/v1") + path
        headers = {"Authorization": f"Bearer {key or self.api_key}"}
        request = urllib.request.Request(address, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30 * time_scale()) as reply:
                return HttpReply(reply.status, _decoded(reply.read()))
        except urllib.error.HTTPError as refused:
            with refused:
                return HttpReply(refused.code, _decoded(refused.read()))

    def delete(self, path: str) -> HttpReply:
        """DELETE."""
        return self.get(path, method="DELETE")

    def metrics(self) -> dict[str, float]:
        """The samples of `/metrics`, by their name with labels."""
        text = str(self.get("/metrics").body)
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def pages(self) -> dict[str, int]:
        """KV pages by state, as `/metrics` has them now."""
        pattern = re.compile(r'chatrt_kv_pages\{state="(\w+)"\}')
        found = [(pattern.fullmatch(name), value) for name, value in self.metrics().items()]
        return {match[1]: int(value) for match, value in found if match}

    @asynccontextmanager
    async def caller(self, **options: Any) -> AsyncIterator[Caller]:
        """A plain connection that sees every frame; `options` are those of `connect`."""
        headers = {"Authorization": f"Bearer {self.api_key}"}
        async with calling_url(self.url, **{"additional_headers": headers, **options}) as caller:
            yield caller

    def terminate(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """The exit status."""
        return self.process.wait(timeout=30 * time_scale())

    def kill(self) -> None:
        """SIGKILL; no harm if it has ended."""
        self.process.kill()
        self.process.wait()


def environment(home: Path) -> dict[str, str]:
    """The variables of a process whose folders lie below `home`."""
    return {**os.environ, "CHATRT_HOME": str(home), "CHATRT_DEBUG": ""}


async def turn(caller: Caller, text: str, **fields: Any) -> dict[str, Any]:
    """One greedy turn on a connection; its terminal event."""
    await caller.create(text, **{"temperature": 0, **fields})
    return (await caller.until(TERMINAL))[-1]


def output_text(response: dict[str, Any]) -> str:
    """All text of a response object."""
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 5.0) -> None:
    """Poll a state that nothing announces, such as `/metrics`."""
    end = time.monotonic() + timeout_s * time_scale()
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(_POLL_S)


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode()
