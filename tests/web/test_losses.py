"""What a person wrote and what was answered is lost in no way that a page can help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.web.conftest import chromium
from tests.web.page import Page

if TYPE_CHECKING:
    from tests.web.live import LiveServer

FILL = """
    for (const size of [2 ** 20, 2 ** 10, 1]) {
      try {
        for (let index = 0; ; index++) sessionStorage.setItem(`${size}-${index}`, 'x'.repeat(size));
      } catch {}
    }
"""


def prompt(page: Page) -> str:
    """What stands in the prompt."""
    return str(page.one("#prompt").get_property("value"))


def banner(page: Page) -> str:
    """What is told above the chat."""
    shown = "const b = document.querySelector('#banner'); return b.hidden ? '' : b.innerText"
    return str(page.run(shown))


def test_an_answer_is_not_failed_because_the_browsers_storage_is_full(
    page: Page, server: LiveServer
) -> None:
    page.open(server.url)
    page.run(FILL)
    page.ask("hello")
    page.wait_answers("You said: hello")
    assert page.one(".note").text == ""
    page.one("#prompt").send_keys("typed with storage full")
    assert prompt(page) == "typed with storage full"


def test_the_page_is_not_blank_where_the_browser_refuses_storage(server: LiveServer) -> None:
    blocked = {"profile.default_content_setting_values.cookies": 2}
    with chromium(blocked) as driver:
        page = Page(driver)
        page.open(server.url)
        page.ask("hello")
        page.wait_answers("You said: hello")
        page.click("#types-ahead")
        assert not page.one("#types-ahead").is_selected()
        assert not [line for line in page.log() if "SecurityError" in line or "Uncaught" in line]
