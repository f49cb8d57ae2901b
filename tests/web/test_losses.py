"""What a person wrote and what was answered is lost in no way that a page can help."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.keys import Keys

from chatrt.client import ResponseRequest
from tests.web.conftest import KEY, chromium
from tests.web.live import LiveServer, Proxy, another_client, until
from tests.web.page import Page
from tests.web.test_edges import rows
from tests.web.test_safety import sign_in

if TYPE_CHECKING:
    from tests.web.live import LoopThread

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


def test_a_question_that_no_server_received_is_in_the_prompt_again_after_a_reload(
    page: Page, server: LiveServer, proxy: Proxy
) -> None:
    page.open(proxy.url)
    page.ask("hello")
    page.wait_answers("You said: hello")
    proxy.stall()
    page.ask("precious")
    until(page.is_running, "a question on its way")
    page.one("#prompt").send_keys("and more")
    proxy.cut()
    page.wait_text(".note.error", "connection was lost")
    assert page.questions() == ["hello", "precious"]
    page.wait_usable()
    page.browser.refresh()
    page.wait_answers("You said: hello")
    until(lambda: prompt(page) == "precious\n\nand more", "what was not asked")
    assert "does not have your last message" in banner(page)
    page.browser.refresh()
    page.wait_answers("You said: hello")
    assert prompt(page) == "precious\n\nand more"
    page.keys(Keys.ENTER)
    page.wait_answers("You said: hello", "You said: precious\n\nand more")
    assert page.run("return sessionStorage.length") == 0


def test_a_question_that_was_received_before_the_connection_was_lost_is_not_given_back(
    page: Page, server: LiveServer, proxy: Proxy
) -> None:
    page.open(proxy.url)
    page.ask("hello")
    page.wait_answers("You said: hello")
    page.ask("precious")
    page.wait_answers("You said: hello", "You said: precious")
    hello = server.asked("hello").log.response_id
    content = [{"type": "message", "role": "user", "content": "precious"}]
    conversation = page.run("return location.hash.slice(1)")
    unnamed = {conversation: {"id": None, "input": content, "parent": hello}}
    page.run("sessionStorage.setItem('chatrt.running', arguments[0])", json.dumps(unnamed))
    page.browser.refresh()  # as it was kept when the page had not heard of it yet
    page.wait_answers("You said: hello", "You said: precious")
    until(lambda: page.run("return sessionStorage.length") == 0, "nothing that is kept")
    assert prompt(page) == ""


def test_a_question_whose_answer_a_killed_server_lost_is_in_the_prompt_again_after_a_reload(
    page: Page, server: LiveServer
) -> None:
    server.script.answers["count"] = ["one ", "two ", "three"]
    server.script.holds["count"] = 1
    page.open(server.url)
    page.ask("hello")
    page.wait_answers("You said: hello")
    page.ask("count")
    until(lambda: page.answers()[1:] == ["one"], "an answer that runs")
    lost = server.asked("count")
    server.forget(lost)
    page.browser.refresh()
    until(lambda: prompt(page) == "count", "the question")
    page.wait_answers("You said: hello")
    assert "does not have your last message" in banner(page)
    assert not page.is_running()
    server.go_on(lost)
    del server.script.holds["count"]
    page.keys(Keys.ENTER)
    page.wait_answers("You said: hello", "one two three")


@pytest.mark.parametrize("how", ["message", "edit"])
def test_a_message_to_a_conversation_deleted_elsewhere_begins_a_new_chat(
    page: Page, loop: LoopThread, server: LiveServer, how: str
) -> None:
    page.open(server.url)
    page.ask("one")
    page.wait_answers("You said: one")
    page.ask("two")
    page.wait_answers("You said: one", "You said: two")
    with another_client(loop, server) as client:
        loop.call(client.http.delete_conversation(page.run("return location.hash.slice(1)")))
    if how == "message":
        page.ask("precious")
    else:
        page.click(".edit")
        page.one(".editor").send_keys(Keys.CONTROL + "a")
        page.one(".editor").send_keys("precious" + Keys.ENTER)
    until(lambda: prompt(page) == "precious", "the message")
    assert "deleted elsewhere" in banner(page)
    assert page.questions() == []
    assert page.run("return location.hash") == ""
    page.one("#prompt").send_keys(Keys.ENTER)
    page.wait_answers("You said: precious")
    assert banner(page) == ""
    until(lambda: rows(page) == ["precious"], "its conversation in the list")


def test_a_key_that_is_taken_back_takes_no_half_typed_message_with_it(
    page: Page, loop: LoopThread, keyed_server: LiveServer
) -> None:
    another = LiveServer(loop, api_keys=("another-key",))
    proxy = Proxy(loop, keyed_server.port)
    try:
        page.browser.get(proxy.url)
        sign_in(page, KEY)
        page.wait_usable()
        page.ask("hello")
        page.wait_answers("You said: hello")
        page.one("#prompt").send_keys("a long half-typed letter")
        proxy.target_port = another.port
        proxy.cut()
        page.wait_text("#key-error", "does not take this key")
        assert KEY not in page.run("return JSON.stringify(sessionStorage)")
        assert page.questions() == []
        proxy.target_port = keyed_server.port
        sign_in(page, KEY)
        page.wait_answers("You said: hello")
        assert prompt(page) == "a long half-typed letter"
    finally:
        proxy.stop()
        another.stop()


def test_signing_out_while_anothers_answer_is_watched_is_no_error(
    page: Page, loop: LoopThread, keyed_server: LiveServer
) -> None:
    keyed_server.script.answers["count"] = ["one ", "two ", "three"]
    keyed_server.script.holds["count"] = 1
    page.browser.get(keyed_server.url)
    sign_in(page, KEY)
    page.wait_usable()
    page.ask("hello")
    page.wait_answers("You said: hello")
    hello = keyed_server.asked("hello").log.response_id
    with another_client(loop, keyed_server, KEY) as client:
        loop.call(client.send(ResponseRequest(input="count", previous_response_id=hello)))
        until(lambda: page.answers()[1:] == ["one"], "the other's answer")
        page.click("#sign-out")
        until(lambda: page.one("#key").is_displayed(), "the question for a key")
        keyed_server.go_on(keyed_server.asked("count"))
    assert page.asynchronous("await new Promise((go) => setTimeout(go)); return 1")
    assert [line for line in page.log() if "TypeError" in line] == []


def test_a_question_lost_in_a_conversation_deleted_elsewhere_is_given_back_after_a_reload(
    page: Page, loop: LoopThread, server: LiveServer, proxy: Proxy
) -> None:
    page.open(proxy.url)
    page.ask("hello")
    page.wait_answers("You said: hello")
    proxy.stall()
    page.ask("precious")
    until(page.is_running, "a question on its way")
    proxy.cut()
    page.wait_text(".note.error", "connection was lost")
    page.wait_usable()
    with another_client(loop, server) as client:
        loop.call(client.http.delete_conversation(page.run("return location.hash.slice(1)")))
    page.browser.refresh()
    until(lambda: prompt(page) == "precious", "the question")
    assert "deleted elsewhere" in banner(page)
    assert page.questions() == []
    assert page.run("return location.hash") == ""
