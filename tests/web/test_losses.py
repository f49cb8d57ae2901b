"""What a person wrote and what was answered is lost in no way that a page can help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.web.conftest import KEY, chromium
from tests.web.live import Proxy, until
from tests.web.page import Page
from tests.web.test_safety import sign_in

if TYPE_CHECKING:

    from tests.web.live import LiveServer, LoopThread

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


# Frames wait; a slow network, in one tab and from now on.
SLOW_SOCKET = """
    window.waiting = [];
    const send = WebSocket.prototype.send;
    WebSocket.prototype.send = function (data) {
      window.waiting.push([data, () => send.call(this, data)]);
    };
    window.letGo = () => {
      WebSocket.prototype.send = send;
      for (const [, go] of window.waiting) go();
    };
"""


def test_a_first_message_is_not_lost_by_going_to_another_conversation_at_once(
    page: Page, server: LiveServer
) -> None:
    page.open(server.url)
    page.ask("hello")
    page.wait_answers("You said: hello")
    first = page.run("return location.hash")
    page.click("#new-chat")
    page.run(SLOW_SOCKET)
    page.ask("precious")
    waiting = "return String(window.waiting)"
    until(lambda: "conversation.create" in page.run(waiting), "a request on its way")
    page.one("#prompt").send_keys("and more")
    page.run("location.hash = arguments[0]", first)
    page.wait_answers("You said: hello")
    page.run("window.letGo()")
    drafts = "return sessionStorage.getItem('chatrt.drafts') ?? ''"
    until(lambda: "precious" in page.run(drafts), "a draft of the new chat")
    assert prompt(page) == ""
    page.click("#new-chat")
    until(lambda: prompt(page) == "precious\n\nand more", "what was not asked")


def test_a_first_message_in_an_outage_is_back_before_what_was_typed_since(
    page: Page, server: LiveServer, proxy: Proxy
) -> None:
    page.open(proxy.url)
    proxy.stall()
    page.ask("precious")
    page.one("#prompt").send_keys("and more")
    proxy.cut(refuse=True)
    until(lambda: prompt(page) == "precious\n\nand more", "both texts")
    page.wait_text("#banner", "The connection was lost. Trying again")
    assert page.one("#banner-action").is_displayed()
    proxy.accept()
    page.wait_usable()
    page.one("#prompt").send_keys("\n")
    page.wait_answers("You said: precious\n\nand more")


def test_a_first_message_on_its_way_outlives_a_reload(
    page: Page, server: LiveServer, proxy: Proxy
) -> None:
    page.open(proxy.url)
    proxy.stall()
    page.ask("precious")
    page.one("#prompt").send_keys("and more")
    page.browser.get("about:blank")
    proxy.cut()
    page.open(proxy.url)
    assert prompt(page) == "precious\n\nand more"
    page.browser.refresh()
    page.wait_usable()
    assert prompt(page) == "precious\n\nand more"
    page.one("#prompt").clear()
    page.ask("hello")
    page.wait_answers("You said: hello")
    assert page.run("return sessionStorage.length") == 0


def test_signing_out_gives_no_message_back_to_whoever_comes_next(
    page: Page, loop: LoopThread, keyed_server: LiveServer
) -> None:
    proxy = Proxy(loop, keyed_server.port)
    try:
        page.browser.get(proxy.url)
        sign_in(page, KEY)
        page.wait_usable()
        proxy.stall()
        page.ask("precious")
        page.click("#sign-out")
        until(lambda: page.one("#key").is_displayed(), "the question for a key")
        proxy.cut()
        sign_in(page, KEY)
        page.wait_usable()
        assert prompt(page) == ""
        assert page.run("return sessionStorage.length") == 1  # the key
    finally:
        proxy.stop()
