from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.keys import Keys

from tests.web.live import until

if TYPE_CHECKING:
    from tests.web.live import LiveServer, Proxy
    from tests.web.page import Page

LONG = [f"word{index} " for index in range(400)]
PARAGRAPHS = [f"Paragraph {index}.\n\n" for index in range(400)]


def ask_and_hold(server: LiveServer, page: Page, question: str, num_deltas: int = 10) -> str:
    """Ask, and return what is shown once so much of the answer is, which stands still there."""
    server.script.holds[question] = num_deltas
    shown = "".join(server.script.answers[question][:num_deltas]).strip()
    page.ask(question)
    until(lambda: page.answers()[-1:] == [shown], "what was said so far")
    return shown


def test_an_answer_is_painted_while_it_is_written(page: Page, server: LiveServer) -> None:
    server.script.answers["count"] = LONG
    page.open(server.url)
    first = ask_and_hold(server, page, "count")
    assert page.is_running()
    assert first == "".join(LONG[:10]).strip()
    server.go_on(server.asked("count"))
    page.wait_answers("".join(LONG).strip())
    assert not page.is_running()
    assert "TTFT" in page.one(".foot summary").text


def test_one_paint_shows_all_that_came_since_the_one_before(page: Page, server: LiveServer) -> None:
    server.script.answers["count"] = LONG
    page.open(server.url)
    page.run(
        "window.paints = 0; new MutationObserver(() => window.paints++)"
        ".observe(document.querySelector('#turns'), {subtree: true, childList: true})"
    )
    page.ask("count")
    page.wait_answers("".join(LONG).strip())
    assert 2 < page.run("return window.paints") < len(LONG)


@pytest.mark.parametrize("how", ["button", "Esc"])
def test_a_stop_keeps_what_was_written(page: Page, server: LiveServer, how: str) -> None:
    server.script.answers["count"] = LONG
    page.open(server.url)
    shown = ask_and_hold(server, page, "count")
    page.click("#stop") if how == "button" else page.keys(Keys.ESCAPE)
    page.wait_text(".note", "stopped")
    assert page.answers()[0].startswith(shown)
    assert not page.is_running()
    page.browser.refresh()
    page.wait_text(".note", "stopped")
    page.ask("and then?")
    page.wait_answers(page.answers()[0], "You said: and then?")
    assert server.asked("and then?").parent_id == server.asked("count").log.response_id


def test_a_lost_connection_goes_on_without_gap_or_duplicate(
    page: Page, server: LiveServer, proxy: Proxy
) -> None:
    server.script.answers["count"] = LONG
    page.open(proxy.url)
    shown = ask_and_hold(server, page, "count")
    proxy.cut(refuse=True)
    page.wait_text("#banner", "The connection was lost")
    assert page.answers() == [shown]
    server.go_on(server.asked("count"))
    proxy.accept()
    page.wait_answers("".join(LONG).strip())
    assert not page.one("#banner").is_displayed()
    page.ask("still there?")
    page.wait_answers("".join(LONG).strip(), "You said: still there?")


def test_many_cuts_lose_and_repeat_nothing(page: Page, server: LiveServer, proxy: Proxy) -> None:
    server.script.answers["count"] = LONG
    page.open(proxy.url)
    page.ask("count")
    for num_chars in (30, 300, 900, 1500):
        wait_longer(page, num_chars)
        before = proxy.num_accepted
        proxy.cut()
        wait_accepted(proxy, before + 1)
    page.wait_answers("".join(LONG).strip())


def wait_longer(page: Page, num_chars: int) -> None:
    until(lambda: page.answers() and len(page.answers()[0]) > num_chars, "more text")


def wait_accepted(proxy: Proxy, number: int) -> None:
    until(lambda: proxy.num_accepted >= number, "a new connection")


def test_a_reload_goes_on_with_the_answer_that_runs(page: Page, server: LiveServer) -> None:
    server.script.answers["count"] = LONG
    page.open(server.url)
    page.ask("hello")
    page.wait_answers("You said: hello")
    shown = ask_and_hold(server, page, "count")
    page.browser.refresh()
    until(lambda: len(page.answers()) == 2 and page.answers()[1].startswith(shown), "both turns")
    assert page.questions() == ["hello", "count"]
    assert page.is_running()
    server.go_on(server.asked("count"))
    page.wait_answers("You said: hello", "".join(LONG).strip())


def test_a_draft_outlives_a_reload_until_it_is_sent(page: Page, server: LiveServer) -> None:
    page.open(server.url)
    page.one("#prompt").send_keys("half a thought")
    page.browser.refresh()
    page.wait_usable()
    assert page.one("#prompt").get_property("value") == "half a thought"
    page.ask(", and its end")
    page.wait_answers("You said: half a thought, and its end")
    page.browser.refresh()
    page.wait_usable()
    assert page.one("#prompt").get_property("value") == ""


def test_what_another_client_asks_shows_up_here(page: Page, server: LiveServer) -> None:
    page.open(server.url)
    page.ask("hello")
    page.wait_answers("You said: hello")
    elsewhere = """
        const {connect} = await import('/chatrt.js');
        const client = await connect();
        const [{id}] = await client.turns(location.hash.slice(1));
        await client.send({input: 'from elsewhere', previous_response_id: id});
        client.close();
    """
    page.run(f"(async () => {{{elsewhere}}})()")
    until(lambda: page.questions() == ["hello", "from elsewhere"], "the other question")
    page.wait_answers("You said: hello", "You said: from elsewhere")


def test_an_answer_goes_on_while_another_conversation_is_shown(
    page: Page, server: LiveServer
) -> None:
    server.script.answers["count"] = LONG
    page.open(server.url)
    ask_and_hold(server, page, "count")
    page.click("#new-chat")
    page.ask("hello")
    page.wait_answers("You said: hello")
    page.browser.back()
    until(lambda: page.questions() == ["count"] and page.is_running(), "the first conversation")
    server.go_on(server.asked("count"))
    page.wait_answers("".join(LONG).strip())
    page.browser.refresh()
    page.wait_answers("".join(LONG).strip())
    assert page.run("return sessionStorage.length") == 0


def test_what_is_open_below_an_answer_stays_open(page: Page, server: LiveServer) -> None:
    page.open(server.url)
    page.ask("one")
    page.wait_answers("You said: one")
    page.click("summary")
    page.wait_text(".figures", "send")
    page.ask("two")
    page.wait_answers("You said: one", "You said: two")
    assert page.one("details").get_attribute("open")


def test_who_reads_back_stays_where_they_are(page: Page, server: LiveServer) -> None:
    server.script.answers["tell"] = PARAGRAPHS
    page.open(server.url)
    ask_and_hold(server, page, "tell", num_deltas=100)
    top = "return document.querySelector('#scroller').scrollTop"
    until(lambda: page.run(top) > 100, "a view that follows the end")
    page.run("document.querySelector('#scroller').scrollTop = 100")
    until(lambda: page.one("#latest").is_displayed(), "the way back to the end")
    server.go_on(server.asked("tell"))
    until(lambda: "Paragraph 399." in page.answers()[0], "the whole answer")
    until(lambda: not page.is_running(), "its end")
    assert page.run(top) == 100
    page.click("#latest")
    until(lambda: page.run(top) > 1000, "the end")
    assert not page.one("#latest").is_displayed()


def test_conversations_are_listed_searched_opened_and_deleted(
    page: Page, server: LiveServer
) -> None:
    page.open(server.url)
    for text in ("red apple", "green pear"):
        page.click("#new-chat")
        page.ask(text)
        page.wait_answers(f"You said: {text}")
    until(lambda: titles(page) == ["green pear", "red apple"], "both conversations")
    page.one("#search").send_keys("apple")
    until(lambda: titles(page) == ["red apple"], "the one that was searched")
    page.click("#conversations .open")
    page.wait_answers("You said: red apple")
    page.one("#search").clear()
    page.one("#search").send_keys(" ")
    until(lambda: len(titles(page)) == 2, "all of them again")
    page.browser.back()
    page.wait_answers("You said: green pear")
    page.run("document.querySelector('#conversations [aria-current] + .delete').click()")
    assert len(titles(page)) == 2  # one click alone deletes nothing
    page.run("document.querySelector('#conversations .armed').click()")
    until(lambda: titles(page) == ["red apple"], "the one that is left")
    until(lambda: page.answers() == [], "an empty chat")
    assert "#" not in page.browser.current_url


def titles(page: Page) -> list[str]:
    script = "return [...document.querySelectorAll('#conversations .open')].map(e => e.innerText)"
    return [str(title) for title in page.run(script)]


def test_what_is_typed_is_sent_ahead_and_again_when_it_grows(
    page: Page, server: LiveServer
) -> None:
    page.open(server.url)
    prompt = page.one("#prompt")
    prompt.send_keys("What is")
    until(lambda: typed(server)[-1:] == ["What is"], "the first half")
    prompt.send_keys(" the time?")
    until(lambda: typed(server)[-1:] == ["What is the time?"], "the second half")
    lane = list(server.service.responses.values())[-1].context.lane_key
    prompt.send_keys(Keys.ENTER)
    page.wait_answers("You said: What is the time?")
    assert server.asked("What is the time?").context.lane_key == lane
    assert page.questions() == ["What is the time?"]


def test_nothing_is_sent_ahead_where_the_switch_is_off(page: Page, server: LiveServer) -> None:
    page.open(server.url)
    page.click("#types-ahead")
    page.one("#prompt").send_keys("a secret draft")
    page.browser.refresh()
    page.wait_usable()
    assert not page.one("#types-ahead").is_selected()
    page.ask(", sent")
    page.wait_answers("You said: a secret draft, sent")
    assert typed(server) == []


def typed(server: LiveServer) -> list[str]:
    """The half-typed texts that the server was sent."""
    responses = list(server.service.responses.values())
    return [r.message.input[-1].content for r in responses if r.message.partial]


def test_a_chat_is_held_with_the_keyboard_alone(page: Page, server: LiveServer) -> None:
    page.open(server.url)
    assert page.focused() == "prompt"
    page.keys("a first")
    page.shifted(Keys.ENTER)
    page.keys("b", Keys.ENTER)
    page.wait_answers("You said: a first\nb")
    assert page.focused() == "prompt"
    for _ in range(20):
        if page.focused("className") == "quiet regenerate":
            break
        page.shifted(Keys.TAB)
    assert page.run("return document.activeElement.matches(':focus-visible')")
    page.keys(Keys.ENTER)
    page.wait_text(".switcher", "2/2")
    page.wait_answers("You said: a first\nb")
    page.run("document.querySelector('.switcher .before').focus()")
    page.keys(Keys.ENTER)
    page.wait_text(".switcher", "1/2")
    assert page.focused("className") == "quiet after"  # the other way is now at its end


def test_page_keys_read_back_from_the_prompt(page: Page, server: LiveServer) -> None:
    server.script.answers["tell"] = PARAGRAPHS[:100]
    page.open(server.url)
    page.ask("tell")
    until(lambda: page.all(".foot summary"), "the end of the answer")
    top = "return document.querySelector('#scroller').scrollTop"
    end = until(lambda: page.run(top), "a view at the end")
    page.keys(Keys.PAGE_UP)
    until(lambda: page.run(top) < end - 100, "an earlier page")
    assert page.focused() == "prompt"
    assert page.one("#latest").is_displayed()
    page.keys(Keys.PAGE_DOWN, Keys.PAGE_DOWN)
    until(lambda: not page.one("#latest").is_displayed(), "the end again")


def test_a_finished_answer_is_told_once_and_none_of_its_pieces(
    page: Page, server: LiveServer
) -> None:
    server.script.answers["count"] = LONG
    page.open(server.url)
    page.run(
        "window.told = []; new MutationObserver(() => window.told.push("
        "document.querySelector('#announcer').textContent))"
        ".observe(document.querySelector('#announcer'), {childList: true})"
    )
    page.ask("count")
    page.wait_answers("".join(LONG).strip())
    assert page.run("return window.told") == ["Answer: " + "".join(LONG)]
    live = page.run(
        "return [...document.querySelectorAll('#turns, #turns *')]"
        ".filter(e => e.closest('[aria-live], [role=log], [role=status], [role=alert]')).length"
    )
    assert live == 0


def test_the_page_fits_a_narrow_screen(page: Page, server: LiveServer) -> None:
    server.script.answers["wide"] = ["```\n" + "x" * 300 + "\n```\n\n" + "y" * 300]
    metrics = {"width": 375, "height": 700, "deviceScaleFactor": 1, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    page.open(server.url)
    page.ask("wide")
    until(lambda: page.all(".foot summary"), "the whole answer")
    assert page.run("return document.documentElement.scrollWidth") == 375
    assert not page.one("#sidebar").is_displayed()
    page.click("#open-drawer")
    until(lambda: page.focused() == "new-chat", "the drawer")
    assert page.one("#sidebar").is_displayed()
    page.keys(Keys.ESCAPE)
    until(lambda: not page.one("#sidebar").is_displayed(), "a closed drawer")
    assert page.focused() == "open-drawer"


def test_a_server_whose_model_is_loading_is_waited_for(page: Page, server: LiveServer) -> None:
    models, server.service.models = server.service.models, list  # type: ignore[method-assign]
    page.browser.get(server.url)
    page.wait_text("#banner", "The model is loading")
    server.service.models = models  # type: ignore[method-assign]
    page.wait_usable()
    assert not page.one("#banner").is_displayed()
    assert page.one("#model").text == "scripted"


def test_a_question_that_the_server_refuses_is_told_and_can_be_sent_again(
    page: Page, server: LiveServer
) -> None:
    page.open(server.url)
    page.ask("hello")
    page.wait_answers("You said: hello")
    server.forget(server.asked("hello"))
    page.ask("and?")
    page.wait_text(".note.error", "no response")
    assert page.questions() == ["hello", "and?"]
    assert "Try again" in page.one(".turn:last-child .foot").text
