from __future__ import annotations

from typing import TYPE_CHECKING

from selenium.webdriver.common.keys import Keys

if TYPE_CHECKING:
    from tests.web.live import LiveServer
    from tests.web.page import Page


def test_a_regenerated_answer_stands_beside_the_first_one(page: Page, server: LiveServer) -> None:
    server.script.answers["roll"] = ["One."]
    page.open(server.url)
    page.ask("roll")
    page.wait_answers("One.")
    page.ask("go on")
    page.wait_answers("One.", "You said: go on")
    server.script.answers["roll"] = ["Two."]
    page.click(".turn:first-child .regenerate")
    page.wait_answers("Two.")
    assert page.one(".switcher").text == "‹2/2›"
    page.click(".switcher .before")
    page.wait_answers("One.", "You said: go on")
    assert page.one(".switcher").text == "‹1/2›"
    page.browser.refresh()
    page.wait_answers("Two.")  # the newest branch


def test_an_edit_begins_a_branch_behind_the_turn_before(page: Page, server: LiveServer) -> None:
    page.open(server.url)
    page.ask("first")
    page.wait_answers("You said: first")
    page.ask("second")
    page.wait_answers("You said: first", "You said: second")
    page.click(".turn:last-child .edit")
    page.one(".editor").send_keys(" thought" + Keys.ENTER)
    page.wait_answers("You said: first", "You said: second thought")
    first = server.asked("first").log.response_id
    assert server.asked("second thought").parent_id == first
    page.click(".switcher .before")
    page.wait_answers("You said: first", "You said: second")
    page.click(".turn:last-child .edit")
    page.keys("not this", Keys.ESCAPE)
    assert page.questions() == ["first", "second"]


def test_a_regeneration_and_an_edit_keep_the_system_message(page: Page, server: LiveServer) -> None:
    page.open(server.url)
    made = """
        const {connect} = await import('/chatrt.js');
        const client = await connect();
        const {id} = await client.createConversation('made elsewhere');
        const input = ['system', 'user'].map((role) => ({role, content: `a ${role}'s`}));
        await client.send({input, conversation: id, chatrt: {new_branch: true}});
        client.close();
        location.hash = id;
    """
    page.run(f"(async () => {{{made}}})()")
    page.wait_answers("You said: a user's")
    assert page.questions() == ["a user's"]
    page.click(".regenerate")
    page.wait_text(".switcher", "2/2")
    page.click(".edit")
    page.one(".editor").send_keys("!" + Keys.ENTER)
    page.wait_answers("You said: a user's!")
    inputs = [r.message.input for r in server.service.responses.values() if not r.message.partial]
    roles_and_texts = [[(item.role, item.content) for item in one] for one in inputs]
    system = ("system", "a system's")
    first = [system, ("user", "a user's")]
    assert roles_and_texts == [first, first, [system, ("user", "a user's!")]]
