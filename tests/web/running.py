"""chatrt.js in Node and in a browser: how a script is run there, and what it begins with.

Knows: Node's flags, the module's path. Does not know: what a script asks.
Invariant: a script that ends otherwise than well fails its test with what it said.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from tests.support import time_scale

if TYPE_CHECKING:
    from tests.web.live import LiveServer
    from tests.web.page import Page

ROOT = Path(__file__).parents[2]
MODULE = ROOT / "chatrt" / "web" / "chatrt.js"
OLDEST_NODE = 20  # has WebSocket behind a flag, 22 without
_IN_NODE = f"""
import {{ ChatrtError, Client, connect }} from '{MODULE}';
const [url, apiKey] = process.argv.slice(2);
const tell = (result) => console.log(JSON.stringify(result));
"""
_IN_BROWSER = """
const [url, apiKey, done] = given;
const tell = (result) => done({ result: structuredClone(result) });
const { ChatrtError, Client, connect } = await import('/chatrt.js');
"""
# What every script begins with: sockets that it can drop, and how it tells of faults.
PRELUDE = """
const sockets = [];
class Spied extends WebSocket {
  constructor(...given) { super(...given); sockets.push(this); this.sent = []; }
  send(frame) { this.sent.push(JSON.parse(frame)); super.send(frame); }
}
const states = [];
const open = (options = {}) => connect({
  url, apiKey, WebSocket: Spied, onState: (state) => states.push(state), ...options });
const fault = (promise) =>
  promise.then(() => null, ({ name, code, status }) => [name, code, status]);
"""


def node_command() -> list[str]:
    """The command that runs a module from stdin; skips the test where there is no Node for it."""
    path = shutil.which("node")
    if path is None:
        pytest.skip("node is not installed")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    major = int(version.stdout.lstrip("v").partition(".")[0])
    if major < OLDEST_NODE:
        pytest.skip(f"node is version {major}, chatrt.js needs {OLDEST_NODE}")
    flags = [] if major >= 22 else ["--experimental-websocket", "--no-warnings"]
    return [path, *flags, "--input-type=module", "-"]


class InNode:
    """Runs scripts for servers."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    def __call__(self, server: LiveServer, body: str, key: str = "") -> Any:
        """What a script tells that is `PRELUDE` and then `body`."""
        return json.loads(self.output(_IN_NODE + PRELUDE + body, server.url, key))

    def output(self, script: str, *arguments: str) -> str:
        """What a script prints."""
        done = subprocess.run(
            [*self._command, *arguments],
            input=script,
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=30 * time_scale(),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


class InBrowser:
    """Runs the same scripts in a page of the server that they are about."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def __call__(self, server: LiveServer, body: str, key: str = "") -> Any:
        """What a script tells that is `PRELUDE` and then `body`."""
        browser = self._page.browser
        browser.get(server.url)
        script = f"const run = async (...given) => {{ {_IN_BROWSER + PRELUDE + body} }};"
        failed = "run(...arguments).catch((error) => arguments[2]({ failed: String(error) }))"
        told = browser.execute_async_script(f"{script} {failed}", server.url, key)
        self._page.log()  # a script may try what the page's policy forbids
        assert "failed" not in told, told
        return told["result"]


Run: TypeAlias = InNode | InBrowser
