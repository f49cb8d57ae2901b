"""What a person meets at the edges: refusals, lost servers, empty chats, the keyboard alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.keys import Keys

from chatrt.client import ResponseRequest
from chatrt.errors import ChatrtError, Conflict, ContextLengthExceeded, InvalidValue, Overloaded
from tests.web.live import another_client, until

if TYPE_CHECKING:
    from chatrt.client import ChatClient
    from tests.web.live import LiveServer, LoopThread, Proxy
    from tests.web.page import Page

TOO_LONG = "the prompt has 9000 tokens, the context holds 8192"


def test_a_message_that_is_too_long_says_what_helps(page: Page, server: LiveServer) -> None:
    server.script.refusals["long"] = ContextLengthExceeded(TOO_LONG)
    page.open(server.url)
    page.ask("long")
    advice = f"{TOO_LONG}. Shorten the message, or begin a new chat."
    page.wait_text(".note.error", advice)
    page.wait_text("#announcer", advice)
    assert page.all(".regenerate") == []
    page.click(".edit")
    page.one(".editor").send_keys("er, no: shorter\n")
    page.wait_answers("You said: longer, no: shorter")


@pytest.mark.parametrize(
    ("refusal", "helps"),
    [
        (InvalidValue("temperature is 9, at most 2"), False),
        (Conflict("the conversation is being answered"), True),
        (Overloaded("64 requests wait, at most 64"), True),
        (ChatrtError("the turn failed"), True),
    ],
)
def test_try_again_is_offered_only_where_it_can_help(
    page: Page, server: LiveServer, refusal: ChatrtError, *, helps: bool
) -> None:
    server.script.refusals["x"] = refusal
    page.open(server.url)
    page.ask("x")
    page.wait_text(".note.error", refusal.message)
    assert [button.text for button in page.all(".regenerate")] == ["Try again"] * helps


def rows(page: Page) -> list[str]:
    """The titles in the list."""
    script = "return [...document.querySelectorAll('#conversations .open')].map(e => e.innerText)"
    return [str(title) for title in page.run(script)]


def wait_rows(page: Page, titles: list[str]) -> None:
    until(lambda: rows(page) == titles, f"the rows {titles}")


def test_a_conversation_whose_first_message_was_refused_is_no_row(
    page: Page, server: LiveServer
) -> None:
    server.script.refusals["long"] = ContextLengthExceeded(TOO_LONG)
    server.script.answers["count"] = ["one ", "two ", "three"]
    server.script.holds["count"] = 1
    page.open(server.url)
    page.ask("long")
    page.wait_text(".note.error", TOO_LONG)
    page.click("#new-chat")
    page.ask("count")
    until(lambda: rows(page) == ["count"], "the one that runs")
    page.click("#new-chat")  # it still runs
    page.ask("hello")
    page.wait_answers("You said: hello")
    until(lambda: rows(page) == ["hello", "count"], "both that have a turn")
    page.click("#conversations li:last-child .open")
    until(page.is_running, "the one that runs")
    page.browser.refresh()
    until(lambda: rows(page) == ["hello", "count"], "both after a reload")
    server.go_on(server.asked("count"))
    page.wait_answers("one two three")
    assert rows(page) == ["hello", "count"]


def test_a_list_without_a_turn_says_that_it_is_empty(page: Page, server: LiveServer) -> None:
    server.script.refusals["x"] = InvalidValue("x is no question")
    page.open(server.url)
    page.ask("x")
    page.wait_text(".note.error", "x is no question")
    until(lambda: page.one("#none").is_displayed(), "an empty list")
    assert rows(page) == []


def test_rows_that_look_the_same_are_told_apart_by_time_and_whole_title(
    page: Page, server: LiveServer
) -> None:
    questions = [f"Please tell me in a few words about the number {number}" for number in (1, 2)]
    page.open(server.url)
    for question in questions:
        page.click("#new-chat")
        page.ask(question)
        page.wait_answers(f"You said: {question}")
    until(lambda: rows(page) == questions[::-1], "both conversations")
    times = "return [...document.querySelectorAll('#conversations time')].map(e => e.innerText)"
    assert page.run(times) == ["now", "now"]
    open_two, open_one = page.all("#conversations .open")
    cut = "return arguments[0].scrollWidth > arguments[0].clientWidth"
    assert page.run(cut, open_one)
    assert str(open_one.get_attribute("title")).startswith(f"{questions[0]}\n1 turn · ")
    assert str(open_two.get_attribute("title")).startswith(f"{questions[1]}\n1 turn · ")
    page.run("document.querySelector('#search').focus()")
    page.keys(Keys.TAB)
    assert page.run("return document.activeElement === arguments[0]", open_two)
    assert not page.run(cut, open_two)


def focus(page: Page, selector: str) -> None:
    """Put the focus on an element that is there, as the tab key would."""
    until(lambda: page.all(selector), selector)
    page.run("document.querySelector(arguments[0]).focus()", selector)


def test_the_keyboard_goes_on_at_the_new_version_of_an_answer(
    page: Page, server: LiveServer
) -> None:
    server.script.answers["count"] = ["one ", "two ", "three"]
    page.open(server.url)
    page.ask("count")
    page.wait_answers("one two three")
    server.script.holds["count"] = 1
    focus(page, ".regenerate")
    page.keys(Keys.ENTER)
    page.wait_text(".switcher", "2/2")
    assert page.focused("className") == "quiet before"
    until(lambda: page.answers() == ["one"], "the new version's first word")
    server.go_on(server.asked("count"))
    page.wait_answers("one two three")
    until(lambda: page.all(".regenerate"), "its end")
    assert page.focused("className") == "quiet before"
    page.keys(Keys.ENTER)
    page.wait_text(".switcher", "1/2")
    assert page.focused("className") == "quiet after"

    focus(page, ".edit")
    page.keys(Keys.ENTER, " to ten", Keys.ENTER)
    page.wait_answers("You said: count to ten")
    assert page.focused("className") == "quiet before"


def test_the_keyboard_goes_on_behind_try_again(page: Page, server: LiveServer) -> None:
    server.script.refusals["x"] = Overloaded("64 requests wait, at most 64")
    page.open(server.url)
    page.ask("x")
    page.wait_text(".note.error", "64 requests")
    focus(page, ".regenerate")
    page.keys(Keys.ENTER)
    page.wait_text(".switcher", "2/2")
    page.wait_text(".note.error", "64 requests")
    until(lambda: page.all(".regenerate"), "its end")
    assert page.focused("className") == "quiet before"


def test_the_keyboard_goes_on_at_the_next_row_when_one_is_deleted(
    page: Page, server: LiveServer
) -> None:
    page.open(server.url)
    for text in ("one", "two", "three"):
        page.click("#new-chat")
        page.ask(text)
        page.wait_answers(f"You said: {text}")
    until(lambda: len(page.all("#conversations [title*='1 turn ']")) == 3, "all three at their end")
    for left, focused in ((["three", "one"], "one"), (["three"], "three")):
        focus(page, "#conversations li:nth-child(2) .delete")
        page.keys(Keys.ENTER, Keys.ENTER)
        wait_rows(page, left)
        assert (page.focused("className"), page.focused("innerText")) == ("open", focused)
    page.keys(Keys.TAB, Keys.ENTER, Keys.ENTER)  # the one that is open
    until(lambda: rows(page) == [], "an empty list")
    assert page.focused() == "prompt"


def test_the_keyboard_is_not_lost_with_a_button_that_hides(
    page: Page, server: LiveServer, proxy: Proxy
) -> None:
    server.script.answers["tell"] = [f"Paragraph {index}.\n\n" for index in range(100)]
    page.open(proxy.url)
    page.ask("tell")
    until(lambda: page.all(".foot summary"), "the end of the answer")
    page.keys(Keys.PAGE_UP)
    until(lambda: page.one("#latest").is_displayed(), "the way back to the end")
    focus(page, "#latest")
    page.keys(Keys.ENTER)
    until(lambda: not page.one("#latest").is_displayed(), "the end")
    assert page.focused() == "scroller"
    proxy.cut(refuse=True)
    page.wait_text("#banner", "The connection was lost")
    focus(page, "#banner-action")
    proxy.accept()
    page.wait_usable()
    assert page.focused() == "prompt"


def test_an_address_of_no_conversation_says_so_until_one_goes_on(
    page: Page, server: LiveServer
) -> None:
    page.open(server.url + "#conv_none")
    page.wait_text("#banner", "There is no such conversation")
    page.click("#banner-action")
    assert not page.one("#banner").is_displayed()
    assert page.focused() == "prompt"
    page.ask("hello")
    page.wait_answers("You said: hello")
    page.run("location.hash = 'conv_unknown'")
    page.wait_text("#banner", "There is no such conversation")
    assert page.answers() == []
    assert page.browser.current_url == server.url
    page.ask("and a new one")
    page.wait_answers("You said: and a new one")
    assert not page.one("#banner").is_displayed()
    page.run("location.hash = 'conv_unknown'")
    page.wait_text("#banner", "There is no such conversation")
    page.browser.back()
    page.wait_answers("You said: and a new one")
    assert not page.one("#banner").is_displayed()


def test_a_stop_while_the_server_is_away_says_when_it_stops(
    page: Page, server: LiveServer, proxy: Proxy
) -> None:
    server.script.answers["count"] = ["one ", "two ", "three"]
    server.script.holds["count"] = 1
    page.open(proxy.url)
    page.ask("count")
    until(lambda: page.answers() == ["one"], "a first word")
    proxy.cut(refuse=True)
    page.wait_text("#banner", "The connection was lost")
    page.keys(Keys.ESCAPE)
    page.wait_text("#told", "The answer stops when the server is back.")
    page.wait_text("#announcer", "The answer stops when the server is back.")
    proxy.accept()
    page.wait_text(".note", "stopped")
    assert page.one("#told").text == ""
    page.keys(Keys.ESCAPE)  # nothing runs: nothing is said
    assert page.one("#told").text == ""


def test_a_message_while_the_server_is_away_stays_and_says_so(
    page: Page, server: LiveServer, proxy: Proxy
) -> None:
    page.open(proxy.url)
    page.ask("hello")
    page.wait_answers("You said: hello")
    proxy.cut(refuse=True)
    page.wait_text("#banner", "The connection was lost")
    page.ask("and?")
    page.wait_text("#told", "The server is away: your text stays here.")
    assert page.one("#prompt").get_property("value") == "and?"
    page.click(".regenerate")
    page.wait_text("#told", "The server is away: nothing was sent.")
    proxy.accept()
    page.wait_usable()
    until(lambda: not page.one("#told").is_displayed(), "a line that is empty again")
    page.ask(" still")
    page.wait_answers("You said: hello", "You said: and? still")


def test_why_an_edit_has_to_wait_for_the_answer_that_runs_is_said(
    page: Page, server: LiveServer
) -> None:
    server.script.answers["count"] = ["one ", "two ", "three"]
    server.script.holds["count"] = 1
    page.open(server.url)
    page.ask("hello")
    page.wait_answers("You said: hello")
    page.click(".edit")
    page.ask("count")
    until(lambda: page.answers()[1:] == ["one"], "an answer that runs")
    page.one(".editor").send_keys("!" + Keys.ENTER)
    page.wait_text("#banner", "An answer is being written: stop it first, or wait for its end.")
    assert page.one("#banner").is_displayed()
    assert page.one(".editor").get_property("value") == "hello!"
    server.go_on(server.asked("count"))
    until(lambda: not page.one("#banner").is_displayed(), "its end")
    page.one(".editor").send_keys(Keys.ENTER)
    page.wait_answers("You said: hello!")


async def hold_chats(client: ChatClient, num_chats: int) -> None:
    """So many conversations with one turn each."""
    for number in range(num_chats):
        made = await client.create_conversation(f"chat {number}")
        answer = await client.send(ResponseRequest(input="hello", conversation=made))
        await answer.collect()


def test_a_list_of_many_conversations_keeps_its_rows_and_shows_the_newest(
    page: Page, loop: LoopThread, server: LiveServer
) -> None:
    with another_client(loop, server) as client:
        loop.call(hold_chats(client, 210))
    page.open(server.url)
    until(lambda: rows(page)[:1] == ["chat 209"], "the list")
    assert rows(page) == [f"chat {number}" for number in range(209, 9, -1)]
    page.run("""
        window.numMade = 0;
        new MutationObserver((changes) => {
          for (const { addedNodes } of changes) window.numMade += addedNodes.length;
        }).observe(document.querySelector('#conversations'), {childList: true});
    """)
    page.ask("hello")
    page.wait_answers("You said: hello")
    until(lambda: rows(page)[:2] == ["hello", "chat 209"], "the new conversation")
    assert page.run("return window.numMade") < 10
    assert len(rows(page)) == 200
    assert page.one("#more").text == "Show more (11 older)"
    page.click("#more")
    until(lambda: rows(page)[-1] == "chat 0", "all")
    assert page.run("return document.activeElement.innerText") == "chat 10"
    assert not page.one("#more").is_displayed()
    page.one("#search").send_keys("chat 20")
    until(lambda: len(rows(page)) == 11, "those that were searched")
