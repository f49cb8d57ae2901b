"""Branches as a person makes them: keys and clicks in, requests and what is painted out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from chatrt_tui.prompt import Prompt
from chatrt_tui.transcript import Transcript
from chatrt_tui.turn_view import BranchLine, TurnView, UserMessage
from tests.chatrt_tui.driving import (
    answer,
    app_at,
    figures,
    has_answered,
    idle,
    prompt_text,
    say,
    screen_text,
    state,
    until,
)

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from chatrt_tui.app import ChatApp

LONG = ScriptedAnswer(["word "] * 1000, delay_s=0.01)


def numbered(message: dict[str, Any]) -> ScriptedAnswer:
    """An answer that says what it answers, and with which seed if one was given."""
    seed = message.get("chatrt", {}).get("seed")
    asked = message["input"]
    text = asked if isinstance(asked, str) else asked[-1]["content"]
    return ScriptedAnswer([f"to {text}" + ("" if seed is None else " again")])


def shown(app: ChatApp) -> list[str]:
    """The questions of the path shown, each with its place where it has siblings."""
    told = []
    for view in app.query_one(Transcript).views:
        place = "".join(f" {line.render()}" for line in view.query(BranchLine))
        told.append(f"{view.query_one(UserMessage).render()}{place}")
    return told


async def asked(app: ChatApp, pilot: Pilot[None], *texts: str) -> None:
    """Ask these one after the other."""
    for text in texts:
        await say(pilot, text)
        await until(lambda question=text: has_answered(app, question))  # type: ignore[misc]


async def select(app: ChatApp, pilot: Pilot[None], number: int) -> TurnView:
    """Select the turn of this index by keyboard."""
    views = app.query_one(Transcript).views
    for _ in range(len(views) - number):
        await pilot.press("ctrl+up")
    await until(lambda: app.focused is views[number])
    return views[number]


async def test_a_turn_is_answered_once_more_beside_its_first_answer() -> None:
    async with ScriptedServer(numbered) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "one", "two")
        await select(app, pilot, 1)
        await pilot.press("r")
        await until(lambda: answer(app) == "to two again" and idle(app))
        first, second, third = server.creates()
        assert third["input"] == second["input"] == "two"
        assert third["previous_response_id"] == second["previous_response_id"]
        assert third["chatrt"]["seed"] >= 0
        assert "chatrt" not in first
        await until(lambda: shown(app) == ["one", "two ‹ 2/2 ›"])
        await say(pilot, "three")
        await until(lambda: answer(app) == "to three" and idle(app))
        assert server.creates()[-1]["previous_response_id"] == "resp_4"


async def test_at_temperature_0_a_sentence_says_that_the_same_words_come_again() -> None:
    async with ScriptedServer(numbered) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "one")
        await say(pilot, "/temp 0")
        await say(pilot, "/regen")
        await until(lambda: "the same words come again" in screen_text(app))
        await until(lambda: len(server.creates()) == 2 and idle(app))


async def test_the_first_question_is_edited_in_a_new_branch_and_the_draft_comes_back() -> None:
    async with ScriptedServer(numbered) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "one", "two")
        app.query_one(Prompt).insert("half")
        await select(app, pilot, 0)
        await pilot.press("e")
        await until(lambda: prompt_text(app) == "one")
        await until(lambda: "Editing an earlier message" in screen_text(app))
        await pilot.press("s", "enter")
        await until(lambda: answer(app) == "to ones" and idle(app))
        created = server.creates()[-1]
        assert created["conversation"] == "conv_1"
        assert created["chatrt"] == {"new_branch": True}
        assert "previous_response_id" not in created
        await until(lambda: shown(app) == ["ones ‹ 2/2 ›"])
        assert prompt_text(app) == "half"
        await until(lambda: "Editing" not in screen_text(app))


async def test_escape_leaves_an_edit_and_gives_the_draft_back() -> None:
    async with ScriptedServer(numbered) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "one")
        app.query_one(Prompt).insert("half")
        await say(pilot, "")  # nothing is lost by a stray key either
        await until(lambda: len(server.creates()) == 2 and idle(app))
        app.query_one(Prompt).insert("draft")
        await select(app, pilot, 0)
        await pilot.press("e")
        await until(lambda: prompt_text(app) == "one")
        await pilot.press("x", "escape")
        await until(lambda: prompt_text(app) == "draft")
        assert len(server.creates()) == 2
        await until(lambda: shown(app) == ["one", "half"])


async def test_switching_branches_asks_the_server_nothing_and_shows_the_newest_behind() -> None:
    async with ScriptedServer(numbered) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "one", "two", "three")
        await select(app, pilot, 1)
        await pilot.press("r")
        await until(lambda: answer(app) == "to two again" and idle(app))
        num_requests = len(server.requests)
        await select(app, pilot, 1)
        await pilot.press("left")
        await until(lambda: shown(app) == ["one", "two ‹ 1/2 ›", "three"])
        await until(lambda: answer(app) == "to three")
        assert isinstance(app.focused, TurnView)
        assert str(app.focused.query_one(UserMessage).render()) == "two"
        await pilot.press("left")
        await until(lambda: "This is branch 1/2" in screen_text(app))
        await pilot.press("right")
        await until(lambda: answer(app) == "to two again")
        await until(lambda: shown(app) == ["one", "two ‹ 2/2 ›"])
        assert len(server.requests) == num_requests


async def test_a_fork_goes_on_from_an_earlier_turn_and_back_again() -> None:
    async with ScriptedServer(numbered) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "one", "two", "three")
        await select(app, pilot, 0)
        await pilot.press("f")
        await until(lambda: shown(app) == ["one"])
        await until(lambda: "The conversation goes on from here" in screen_text(app))
        assert app.focused is app.query_one(Prompt)
        await asked(app, pilot, "other")
        await until(lambda: shown(app) == ["one", "other ‹ 2/2 ›"])
        assert server.creates()[-1]["previous_response_id"] == "resp_2"
        await say(pilot, "/branch previous")
        await until(lambda: shown(app) == ["one", "two ‹ 1/2 ›", "three"])


async def test_undo_goes_back_turn_by_turn_and_redo_forward_again() -> None:
    async with ScriptedServer(numbered) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "one", "two")
        await say(pilot, "/undo")
        await until(lambda: shown(app) == ["one"])
        await say(pilot, "/undo")
        await until(lambda: shown(app) == [])
        await until(lambda: "The conversation goes on from here" in screen_text(app))
        await say(pilot, "/undo")
        await until(lambda: "There is no turn to go back from" in screen_text(app))
        await say(pilot, "/redo")
        await say(pilot, "/redo")
        await until(lambda: shown(app) == ["one", "two"])
        assert len(server.creates()) == 2
        await say(pilot, "/undo")
        await say(pilot, "/undo")
        await asked(app, pilot, "begun anew")
        assert server.creates()[-1]["chatrt"] == {"new_branch": True}
        await until(lambda: shown(app) == ["begun anew ‹ 2/2 ›"])


async def test_while_an_answer_runs_nothing_moves_and_a_sentence_says_why() -> None:
    replies = [ScriptedAnswer(["one"]), LONG]
    async with ScriptedServer(replies) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "one")
        await say(pilot, "two")
        await until(lambda: "answering" in state(app) and answer(app).startswith("word"))
        for command in ("/undo", "/regen", "/edit"):
            await say(pilot, command)
            await until(lambda: "The answer is still coming" in screen_text(app))
            app.clear_notifications()
        await until(lambda: shown(app) == ["one", "two"])
        assert len(server.creates()) == 2


async def test_clicks_select_a_turn_and_switch_its_branches() -> None:
    async with ScriptedServer(numbered) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "one")
        await say(pilot, "/regen")
        await until(lambda: answer(app) == "to one again" and idle(app))
        line = app.query_one(BranchLine)
        await pilot.click(line, offset=(0, 0))
        await until(lambda: answer(app) == "to one")
        assert app.focused is app.query_one(Prompt)
        line = app.query_one(BranchLine)
        await pilot.click(line, offset=(line.size.width - 1, 0))
        await until(lambda: answer(app) == "to one again")
        await pilot.click(UserMessage)
        await until(lambda: isinstance(app.focused, TurnView))
        await until(lambda: "e Edit  r Regenerate  f Fork" in screen_text(app))
        await pilot.press("escape")
        await until(lambda: app.focused is app.query_one(Prompt))


async def test_what_is_typed_at_a_selected_turn_goes_into_the_prompt() -> None:
    async with ScriptedServer(numbered) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "one")
        await select(app, pilot, 0)
        await pilot.press(*"What")
        await until(lambda: prompt_text(app) == "What")


async def test_selecting_moves_up_and_down_and_ends_at_the_prompt() -> None:
    async with ScriptedServer(numbered) as server, app_at(server.url) as (app, pilot):
        await pilot.press("ctrl+up")
        await until(lambda: "There is no turn yet" in screen_text(app))
        await asked(app, pilot, "one", "two")
        one, two = app.query_one(Transcript).views
        await pilot.press("ctrl+up", "ctrl+up", "ctrl+up")
        await until(lambda: app.focused is one)
        await pilot.press("down")
        await until(lambda: app.focused is two)
        await pilot.press("ctrl+down")
        await until(lambda: app.focused is app.query_one(Prompt))


async def test_an_answer_and_its_code_are_copied() -> None:
    text = "<think>hm</think>Two:\n\n```python\na = 1\n```\n\nand\n\n```\nb = 2\n```\n"
    async with (
        ScriptedServer([ScriptedAnswer([text])]) as server,
        app_at(server.url) as (app, pilot),
    ):
        await asked(app, pilot, "code")
        view = await select(app, pilot, 0)
        await pilot.press("y")
        await until(lambda: app.clipboard.startswith("Two:"))
        assert "hm" not in app.clipboard
        for code in ("b = 2", "a = 1", "b = 2"):
            await pilot.press("c")
            await until(lambda wanted=code: app.clipboard == wanted)  # type: ignore[misc]
        assert view.code_blocks == ["a = 1", "b = 2"]


async def test_the_figures_in_the_status_line_are_those_of_the_last_turn_shown() -> None:
    def measured(message: dict[str, Any]) -> ScriptedAnswer:
        return ScriptedAnswer(["x"], timing={"decode_tps": 10.0 * len(message["input"])})

    async with ScriptedServer(measured) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "a", "abc")
        await until(lambda: "30 tok/s" in figures(app))
        await say(pilot, "/undo")
        await until(lambda: "10 tok/s" in figures(app))


async def test_a_refused_edit_is_in_the_prompt_again_and_the_tree_has_no_trace_of_it() -> None:
    error = {"code": "context_length_exceeded", "message": "9001 tokens do not fit in 8192"}
    replies = [ScriptedAnswer(["one"]), ScriptedAnswer(["two"]), ScriptedAnswer(error=error)]
    replies.append(ScriptedAnswer(["another"]))
    async with ScriptedServer(replies) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "one", "two")
        await say(pilot, "/edit")
        await until(lambda: prompt_text(app) == "two")
        await pilot.press("x", "enter")
        await until(lambda: prompt_text(app) == "twox" and idle(app))
        await until(lambda: "9001 tokens do not fit" in screen_text(app))
        assert len(app._chat.conversation.tree) == 2
        await until(lambda: shown(app) == ["one", "two"])
        # asked again as it stands, it is an edit still
        assert app._chat.editing
        await pilot.press("enter")
        await until(lambda: not app._chat.editing and idle(app))
        assert server.creates()[-1]["previous_response_id"] == server.creates()[-2].get(
            "previous_response_id"
        )


async def test_a_question_that_was_refused_takes_no_keys() -> None:
    error = {"code": "context_length_exceeded", "message": "9001 tokens do not fit in 8192"}
    replies = [ScriptedAnswer(["one"]), ScriptedAnswer(error=error), ScriptedAnswer(["three"])]
    async with ScriptedServer(replies) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "one")
        await say(pilot, "/stats")
        await say(pilot, "too long")
        await until(lambda: "9001 tokens do not fit" in screen_text(app) and idle(app))
        refused = [view for view in app.query(TurnView) if view.turn.question == "too long"][-1]
        refused.focus()
        await pilot.pause()
        for key in ("left", "f", "r", "e"):
            await pilot.press(key)
            refused.focus()
        await pilot.press("ctrl+up")
        await until(lambda: app._chat.selected is not None)
        assert app._chat.selected is not refused
        await pilot.press("escape")
        await until(lambda: app.focused is app.query_one(Prompt))
        await pilot.press("end", "ctrl+u")
        await say(pilot, "three")
        await until(lambda: shown(app)[-1] == "three" and idle(app))
        (first, _) = app._chat.conversation.tree.path
        assert server.creates()[-1]["previous_response_id"] == first.id
        assert len(server.creates()) == 3


async def test_a_message_that_begins_with_a_slash_is_edited_as_a_message() -> None:
    replies = [ScriptedAnswer(["one"]), ScriptedAnswer(["two"])]
    async with ScriptedServer(replies) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "//quit smoking")
        await until(lambda: len(server.creates()) == 1 and idle(app))
        await say(pilot, "/edit")
        await until(lambda: prompt_text(app) == "//quit smoking")
        await pilot.press("enter")
        await until(lambda: len(server.creates()) == 2 and idle(app))
        assert [create["input"] for create in server.creates()] == 2 * ["/quit smoking"]


async def test_a_draft_survives_an_edit_that_another_move_ends() -> None:
    replies = [ScriptedAnswer([word]) for word in ("one", "two")]
    async with ScriptedServer(replies) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "one", "two")
        await pilot.press(*"draft", "ctrl+up", "e")
        await until(lambda: prompt_text(app) == "two")
        await pilot.press("ctrl+up", "ctrl+up", "f")
        await until(lambda: shown(app) == ["one"])
        assert prompt_text(app) == "draft"
        assert not app._chat.editing


async def test_a_question_of_others_that_holds_escape_sequences_is_edited_without_them() -> None:
    hostile = "say \x1b]0;PWNED\x07red\x9b31mabc\x1b[2J"
    async with ScriptedServer(numbered) as server, app_at(server.url) as (app, pilot):
        await asked(app, pilot, "one")
        app._chat.conversation.tree.tip.question = hostile
        await pilot.press("ctrl+up", "e")
        await until(lambda: app._chat.editing)
        assert prompt_text(app) == "say redabc"
        await pilot.press("escape")
        app.query_one(Prompt).remember(hostile)
        await until(lambda: prompt_text(app) == "")
        await pilot.press("up")
        assert prompt_text(app) == "say redabc"
        await pilot.press("end", "x")
        assert prompt_text(app) == "say redabcx"
