"""Answers to the page's requests that come late, in whichever order: nothing is mixed up."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from chatrt.client import ResponseRequest
from tests.web.live import LiveServer, Proxy, another_client, until
from tests.web.test_losses import banner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.web.live import LoopThread
    from tests.web.page import Page

# Answers to requests whose address holds `held` wait until `window.answer()`.
SLOW_HTTP = """
    const asked = window.fetch;
    window.waiting = [];
    window.answer = () => window.waiting.splice(0).forEach((go) => go());
    window.fetch = async (url, options) => {
      const reply = await asked(url, options);
      if (!String(url).includes(window.held)) return reply;
      const body = await reply.text();
      if (String(url).includes(window.held)) await new Promise((go) => window.waiting.push(go));
      const { status, headers } = reply;
      return new Response(body, { status, headers });
    };
"""


@contextlib.contextmanager
def slow_http(page: Page) -> Iterator[None]:
    """Pages that are loaded meanwhile have `SLOW_HTTP` in them."""
    command = "Page.addScriptToEvaluateOnNewDocument"
    added = page.browser.execute_cdp_cmd(command, {"source": SLOW_HTTP})
    yield
    page.browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


@pytest.mark.parametrize("then", ["an older conversation", "a new chat"])
def test_a_late_word_that_one_is_gone_leaves_what_was_opened_since(
    page: Page, server: LiveServer, then: str
) -> None:
    server.script.answers["count"] = ["one ", "two ", "three"]
    server.script.holds["count"] = 1
    with slow_http(page):
        page.open(server.url)
        page.run("window.held = 'conv_gone'")
        page.ask("hello")
        page.wait_answers("You said: hello")
        first = page.run("return location.hash")
        page.click("#new-chat")
        page.run("location.hash = 'conv_gone'")
        until(lambda: page.run("return window.waiting.length"), "a slow answer")
        if then == "a new chat":
            page.click("#new-chat")
            page.ask("count")
            until(lambda: page.answers() == ["one"], "an answer that runs")
        else:
            page.run("location.hash = arguments[0]", first)
            page.wait_answers("You said: hello")
        shown = page.answers(), page.run("return location.hash"), page.is_running()
        page.asynchronous("window.answer(); await new Promise((go) => setTimeout(go))")
        assert (page.answers(), page.run("return location.hash"), page.is_running()) == shown
        assert banner(page) == ""


def test_a_slow_conversation_does_not_replace_the_one_that_one_went_back_to(
    page: Page, server: LiveServer
) -> None:
    with slow_http(page):
        page.open(server.url)
        for text in ("one", "two"):
            page.click("#new-chat")
            page.ask(text)
            page.wait_answers(f"You said: {text}")
        page.run("window.held = '/turns'")
        page.click("#conversations li:last-child .open")
        until(lambda: page.run("return window.waiting.length"), "a slow answer")
        page.browser.back()
        page.asynchronous("window.answer(); await new Promise((go) => setTimeout(go))")
        assert page.questions() == ["two"]
        page.ask("three")
        page.wait_answers("You said: two", "You said: three")


def test_going_elsewhere_in_an_outage_keeps_the_page_and_gets_there_behind_it(
    page: Page, server: LiveServer, proxy: Proxy
) -> None:
    server.script.answers["count"] = ["one ", "two ", "three"]
    server.script.holds["count"] = 1
    page.open(proxy.url)
    page.ask("hello")
    page.wait_answers("You said: hello")
    first = page.run("return location.hash")
    page.click("#new-chat")
    page.ask("count")
    until(lambda: page.answers() == ["one"], "an answer that runs")
    proxy.cut(refuse=True)
    page.wait_text("#banner", "The connection was lost")
    page.log()
    page.run("location.hash = arguments[0]", first)
    until(lambda: any("/turns" in line for line in page.log()), "a refused request")
    assert page.questions() == ["count"]
    assert page.run("return location.hash") == first
    page.wait_text("#banner", "The connection was lost")
    proxy.accept()
    page.wait_answers("You said: hello")
    assert page.run("return location.hash") == first
    page.browser.back()
    until(page.is_running, "the one that runs")
    server.go_on(server.asked("count"))
    page.wait_answers("one two three")


@pytest.mark.parametrize("when", ["opened", "connected again"])
def test_a_turn_that_ends_while_a_conversation_is_fetched_is_shown_and_followed(
    page: Page, loop: LoopThread, server: LiveServer, proxy: Proxy, when: str
) -> None:
    server.script.answers["count"] = ["one ", "two ", "three"]
    server.script.holds["count"] = 1
    with slow_http(page), another_client(loop, server) as client:
        page.open(proxy.url)
        page.ask("one")
        page.wait_answers("You said: one")
        if when == "opened":
            page.open(proxy.url)
        else:
            proxy.cut(refuse=True)
            page.wait_text("#banner", "The connection was lost")
        one = server.asked("one").log.response_id
        loop.call(client.send(ResponseRequest(input="count", previous_response_id=one)))
        count = server.asked("count")
        page.run("window.held = '/turns'")
        if when == "opened":
            page.click("#conversations .open")
        else:
            proxy.accept()
        until(lambda: page.run("return window.waiting.length"), "a list on its way")
        server.go_on(count)
        until(lambda: count.log.finished, "the end of the answer")
        page.run("window.held = 'nothing'; window.answer()")
        page.wait_answers("You said: one", "one two three")
        until(lambda: page.questions() == ["one", "count"], "the question")
        page.ask("next")
        page.wait_answers("You said: one", "one two three", "You said: next")
        assert server.asked("next").parent_id == count.log.response_id
