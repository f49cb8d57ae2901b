"""Headless Chromium and what it looks at."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from selenium import webdriver

from tests.web.live import LiveServer, LoopThread, Proxy
from tests.web.page import Page
from tests.web.running import InBrowser, InNode, Run, node_command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selenium.webdriver import Chrome

KEY = "a-key-for-tests-0123456789"
FOREIGN_HOST = "evil.example"  # the browser takes it for this machine
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # CI runs as root
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--window-size=1000,700",
    f"--host-resolver-rules=MAP {FOREIGN_HOST} 127.0.0.1",
)


def _no_browser(sentence: str) -> NoReturn:
    if os.environ.get("CHATRT_TEST_REQUIRE_BROWSER"):
        pytest.fail(sentence)
    pytest.skip(sentence)


@contextlib.contextmanager
def chromium(preferences: dict[str, Any] | None = None) -> Iterator[Chrome]:
    """Debian's Chromium, without a window."""
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in found:
        _no_browser("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = str(found[0])
    for flag in _FLAGS:
        options.add_argument(flag)
    options.add_experimental_option("prefs", preferences or {})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(found[1])))
    driver.set_script_timeout(60)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="session")
def browser() -> Iterator[Chrome]:
    """The browser of all tests that need no settings of their own."""
    with chromium() as driver:
        yield driver


@pytest.fixture
def page(browser: Chrome) -> Iterator[Page]:
    """A fresh tab; nothing that ran in it may have met the policy or thrown."""
    first = browser.current_window_handle
    browser.switch_to.new_window("tab")
    tab = Page(browser)
    tab.log()
    tab.log("performance")
    yield tab
    lines = tab.log()
    browser.close()
    browser.switch_to.window(first)
    # Refused and lost requests are told there too; tests are about those.
    faults = [line for line in lines if "Failed to load" not in line and "WebSocket" not in line]
    assert faults == []


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    """A thread in which servers run."""
    thread = LoopThread()
    yield thread
    thread.end()


@pytest.fixture
def server(loop: LoopThread) -> Iterator[LiveServer]:
    """A server that asks for no key."""
    running = LiveServer(loop)
    yield running
    running.stop()


@pytest.fixture
def keyed_server(loop: LoopThread) -> Iterator[LiveServer]:
    """A server that asks for `KEY`."""
    running = LiveServer(loop, api_keys=(KEY,))
    yield running
    running.stop()


@pytest.fixture
def proxy(loop: LoopThread, server: LiveServer) -> Iterator[Proxy]:
    """A way to the server that can be cut."""
    running = Proxy(loop, server.port)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def ready(browser: Chrome) -> Iterator[Page]:
    """The page, whose modules a script may import; the same one for all these tests."""
    loop = LoopThread()
    server = LiveServer(loop)
    browser.get(server.url)
    yield Page(browser)
    browser.get("about:blank")
    server.stop()
    loop.end()


@pytest.fixture
def in_node() -> InNode:
    """Runs scripts in Node."""
    return InNode(node_command())


@pytest.fixture(params=["node", "browser"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs scripts in Node, and in a browser."""
    if request.param == "node":
        return InNode(node_command())
    return InBrowser(request.getfixturevalue("page"))
