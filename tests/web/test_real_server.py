"""The page in front of a whole server in a process of its own, with a tiny random model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.keys import Keys

from chatrt.testing.models import tiny_config
from chatrt.testing.tokenizer import tiny_tokenizer
from tests.chatrt.models_support import random_state, write_safetensors
from tests.e2e.process import ServerProcess
from tests.support import share_kernels
from tests.web.live import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.web.page import Page

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a store, a key and a model that says something else for every seed."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = tiny_tokenizer(folder)
    config = tiny_config(vocab_size=tokenizer.vocab_size, max_context=2048)
    write_safetensors(folder, config, random_state(config))
    home = share_kernels(tmp_path_factory.mktemp("whole_server") / "home")
    flags = ("--kv-memory-bytes", "64MiB", "--max-output-tokens", "40")
    running = ServerProcess.start(home, str(folder), *flags)
    yield running
    running.kill()


def test_a_conversation_with_branches_outlives_a_reload(
    page: Page, whole_server: ServerProcess
) -> None:
    address = whole_server.base_url.removesuffix("v1")
    assert f"web page: {address} " in whole_server.log()
    page.browser.get(address)
    until(lambda: page.one("#key").is_displayed(), "the question for a key")
    page.one("#key").send_keys(whole_server.api_key + Keys.ENTER)
    page.wait_usable()

    for number, text in enumerate(("Hello there.", "And then?"), 1):
        page.one("#prompt").send_keys(text)
        page.one("#prompt").send_keys(Keys.ENTER)
        wait_ended(page, number)
    first, second = page.answers()
    assert first
    assert second
    page.click(".turn:last-child .regenerate")
    page.wait_text(".turn:last-child .switcher", "2/2")
    wait_ended(page, 2)
    assert page.answers() != [first, second]
    assert page.answers()[0] == first
    page.click(".turn:first-child .edit")
    page.one(".editor").send_keys(" Again" + Keys.ENTER)
    wait_ended(page, 1)
    assert page.questions() == ["Hello there. Again"]

    page.browser.refresh()
    wait_ended(page, 1)
    assert page.questions() == ["Hello there. Again"]
    page.click(".switcher .before")
    until(lambda: len(page.answers()) == 2, "the first branch")
    page.click(".turn:last-child .switcher .before")
    until(lambda: page.answers() == [first, second], "its first answer")

    page.click(".turn:last-child summary")
    page.wait_text(".turn:last-child .figures", "cached")
    page.wait_text(".turn:last-child .figures", "prefill")
    page.wait_text(".turn:last-child summary", "TTFT")
    assert whole_server.api_key not in whole_server.log()
    assert "Hello there" not in whole_server.log()


def test_an_address_of_no_conversation_says_so(page: Page, whole_server: ServerProcess) -> None:
    page.browser.get(whole_server.base_url.removesuffix("v1") + "#conv_none")
    until(lambda: page.one("#key").is_displayed(), "the question for a key")
    page.one("#key").send_keys(whole_server.api_key + Keys.ENTER)
    page.wait_text("#banner", "There is no such conversation")
    assert page.one("#banner-action").text == "New chat"


def wait_ended(page: Page, num_turns: int) -> None:
    """Wait until so many turns are shown, all of them at their end."""
    ended = "return document.querySelectorAll('.answer:not(.running) summary').length"
    until(lambda: page.run(ended) == num_turns and len(page.answers()) == num_turns, "all answers")
