"""What a person meets at the edges: refusals, lost servers, empty chats, the keyboard alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chatrt.errors import ChatrtError, Conflict, ContextLengthExceeded, InvalidValue, Overloaded

if TYPE_CHECKING:
    from tests.web.live import LiveServer
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
