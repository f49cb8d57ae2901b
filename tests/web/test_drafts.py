"""What stands in the prompt: whose draft it is, and what was sent before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selenium.webdriver.common.keys import Keys

from chatrt.errors import InvalidValue
from tests.web.live import until

if TYPE_CHECKING:
    from tests.web.live import LiveServer
    from tests.web.page import Page


def written(page: Page) -> str:
    """What stands in the prompt."""
    return str(page.run("return document.querySelector('#prompt').value"))


def wait_written(page: Page, text: str) -> None:
    until(lambda: written(page) == text, f"{text!r} in the prompt")


def test_a_draft_stays_in_the_chat_in_which_it_was_typed(page: Page, server: LiveServer) -> None:
    page.open(server.url)
    for text in ("one", "two"):
        page.click("#new-chat")
        page.ask(text)
        page.wait_answers(f"You said: {text}")
    page.keys("for two")
    page.click("#conversations li:last-child .open")
    page.wait_answers("You said: one")
    assert written(page) == ""
    page.one("#prompt").send_keys("for one")
    page.click("#new-chat")
    wait_written(page, "")
    page.keys("for a new one")
    page.browser.back()
    page.wait_answers("You said: one")
    assert written(page) == "for one"
    page.browser.back()
    page.wait_answers("You said: two")
    assert written(page) == "for two"
    page.browser.refresh()
    page.wait_answers("You said: two")
    assert written(page) == "for two"
    page.click("#new-chat")
    wait_written(page, "for a new one")
    page.keys(Keys.ENTER)
    page.wait_answers("You said: for a new one")
    assert written(page) == ""
    page.click("#new-chat")
    wait_written(page, "")


def test_a_draft_leaves_with_its_conversation(page: Page, server: LiveServer) -> None:
    page.open(server.url)
    page.ask("one")
    page.wait_answers("You said: one")
    until(lambda: page.all("#conversations [title*='1 turn ']"), "the conversation in the list")
    page.one("#prompt").send_keys("for one")
    page.run("document.querySelector('#conversations .delete').click()")
    page.run("document.querySelector('#conversations .armed').click()")
    until(lambda: page.answers() == [], "an empty chat")
    assert written(page) == ""
    until(lambda: page.run("return sessionStorage.length") == 0, "nothing that is kept")


def test_what_is_typed_while_a_chat_begins_belongs_to_it(page: Page, server: LiveServer) -> None:
    server.script.answers["count"] = ["one ", "two ", "three"]
    server.script.holds["count"] = 1
    page.open(server.url)
    page.keys("count", Keys.ENTER, "and then")
    until(page.is_running, "the answer")
    assert written(page) == "and then"
    page.click("#new-chat")
    wait_written(page, "")
    page.browser.back()
    wait_written(page, "and then")
    server.go_on(server.asked("count"))
    page.wait_answers("one two three")


def test_a_draft_of_no_conversation_is_kept_for_a_new_chat(page: Page, server: LiveServer) -> None:
    page.open(server.url)
    page.ask("one")
    page.wait_answers("You said: one")
    page.one("#prompt").send_keys("half a thought")
    deleted = """
        const {connect} = await import('/chatrt.js');
        const client = await connect();
        await client.deleteConversation(location.hash.slice(1));
        client.close();
    """
    page.asynchronous(deleted)
    page.browser.refresh()
    page.wait_text("#banner", "There is no such conversation")
    assert written(page) == "half a thought"


def test_a_message_of_a_chat_that_is_left_before_it_begins_is_not_lost(
    page: Page, server: LiveServer
) -> None:
    page.open(server.url)
    page.ask("one")
    page.wait_answers("You said: one")
    address = page.browser.current_url
    page.click("#new-chat")
    page.keys("never sent")
    page.run(  # both in one go: no server can answer in between
        "document.querySelector('#send').click();document.querySelector('#new-chat').click();"
    )
    wait_written(page, "never sent")
    page.browser.get(address)
    page.wait_answers("You said: one")
    assert written(page) == ""


def test_the_arrow_keys_bring_back_what_was_sent(page: Page, server: LiveServer) -> None:
    page.open(server.url)
    page.ask("first of all")
    page.wait_answers("You said: first of all")
    page.click("#new-chat")
    page.keys("one")
    page.shifted(Keys.ENTER)
    page.keys("more", Keys.ENTER)
    page.wait_answers("You said: one\nmore")
    page.ask("two")
    page.wait_answers("You said: one\nmore", "You said: two")
    page.keys(Keys.DOWN)
    assert written(page) == ""
    shown = []
    for key in (Keys.UP, Keys.UP, Keys.UP, Keys.UP, Keys.UP):  # the third moves to the first line
        page.keys(key)
        shown.append(written(page))
    assert shown == ["two", "one\nmore", "one\nmore", "first of all", "first of all"]
    shown = []
    for key in (Keys.DOWN, Keys.DOWN, Keys.DOWN):
        page.keys(key)
        shown.append(written(page))
    assert shown == ["one\nmore", "two", ""]
    page.keys(Keys.UP, "!", Keys.UP, Keys.DOWN)  # a text of one's own stays
    assert written(page) == "two!"
    page.browser.refresh()
    page.wait_answers("You said: one\nmore", "You said: two")
    assert written(page) == "two!"
    page.one("#prompt").clear()
    page.one("#prompt").send_keys(Keys.UP)
    assert written(page) == "two"
    page.keys(Keys.ENTER)
    page.wait_answers("You said: one\nmore", "You said: two", "You said: two")


def test_what_was_refused_comes_back_in_a_new_chat(page: Page, server: LiveServer) -> None:
    server.script.refusals["long"] = InvalidValue("too long")
    page.open(server.url)
    page.ask("long")
    page.wait_text(".note.error", "too long")
    page.click("#new-chat")
    page.keys(Keys.UP, Keys.BACKSPACE, Keys.ENTER)
    page.wait_answers("You said: lon")
