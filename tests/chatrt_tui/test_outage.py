"""A connection lost in mid-answer, and a context that is full: what the terminal says and does."""

from __future__ import annotations

from chatrt.testing.scripted_server import ScriptedAnswer
from chatrt_tui.status import Banner
from tests.chatrt.typing_support import ReadingServer
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

PIECES = [f"{number} " for number in range(30)]


async def test_an_answer_goes_on_growing_where_it_stopped() -> None:
    reply = ScriptedAnswer(PIECES, delay_s=0.02, survives=True)
    replies = [reply, ScriptedAnswer(["more"])]
    async with ReadingServer(replies) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "count")
        await until(lambda: answer(app).startswith("".join(PIECES[:10])))
        server.is_away = True  # until the outage has been seen: it may be over before one looks
        server.cut()
        await until(lambda: app.query_one(Banner).has_class("-shown"))
        server.is_away = False
        await until(lambda: not app.query_one(Banner).has_class("-shown"))
        await until(lambda: idle(app))
        assert answer(app) == "".join(PIECES)
        assert "stopped" not in screen_text(app)
        await say(pilot, "go on")
        await until(lambda: answer(app) == "more")
        assert server.creates()[1]["previous_response_id"] == "resp_2"
        made = [m for m in server.requests if m["type"] == "chatrt.conversation.create"]
        assert len(made) == 1


async def test_escape_while_cut_off_stops_the_answer_once_the_server_is_back() -> None:
    reply = ScriptedAnswer(["word "] * 1000, delay_s=0.02, survives=True)
    async with ReadingServer([reply]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "count")
        await until(lambda: answer(app).startswith("word " * 10))
        server.is_away = True
        server.cut()
        await until(lambda: state(app) == "cut off, waiting for the server · Esc stops")
        await pilot.press(*"half", "escape")
        assert state(app) == "stops when the server is back · Esc gives up"
        server.is_away = False
        await until(lambda: idle(app))
        assert answer(app).startswith("word " * 10)
        await until(lambda: "stopped" in screen_text(app))
        assert prompt_text(app) == "half"


async def test_a_second_escape_gives_up_on_a_server_that_stays_away() -> None:
    reply = ScriptedAnswer(["word "] * 1000, delay_s=0.01, survives=True)
    async with ReadingServer([reply]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "count")
        await until(lambda: answer(app).startswith("word word"))
        await server.stop()
        await until(lambda: "cut off" in state(app))
        await pilot.press("escape", "escape")
        await until(lambda: "the connection to the server was lost" in screen_text(app))
        assert answer(app).startswith("word word")
        assert prompt_text(app) == "count"  # no parent for what follows: it may be asked again


async def test_turns_left_out_of_a_full_context_are_told_under_the_answer_and_in_the_status() -> (
    None
):
    kv = {"dropped_turns": 3, "computed_tokens": 812}
    reply = ScriptedAnswer(["ok"], timing={"kv": kv}, usage={"total_tokens": 900})
    async with ReadingServer([reply]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "hi")
        await until(lambda: "3 turns left out" in figures(app))
        painted = " ".join(screen_text(app).split())
        assert "The context is full: the 3 oldest turns were left out of this answer." in painted
        assert "812 tokens had to be computed." in painted
        assert server.creates()[0]["truncation"] == "auto"


async def test_a_message_that_no_context_holds_is_refused_with_both_numbers_and_what_helps() -> (
    None
):
    error = {"code": "context_length_exceeded", "message": "9001 tokens do not fit in 8192"}
    replies = [ScriptedAnswer(error=error)]
    async with ReadingServer(replies) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "too long")
        await until(lambda: prompt_text(app) == "too long")
        painted = " ".join(screen_text(app).split())
        assert "9001 tokens do not fit in 8192. Shorten the message (Ctrl+L" in painted
        assert "or begin a new chat with Ctrl+N." in painted


async def test_a_message_that_a_killed_server_took_along_is_said_to_be_no_part_of_the_chat() -> (
    None
):
    lost = ScriptedAnswer(["half "] * 20, delay_s=0.01, drop_after=10, forgets=True)
    replies = [ScriptedAnswer(["one"]), lost, ScriptedAnswer(["three"])]
    async with ReadingServer(replies) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "first")
        await until(lambda: has_answered(app, "first"))
        await say(pilot, "second")
        await until(lambda: "half" in answer(app))
        await pilot.press(*"draft")
        await until(lambda: "This message is no part of the conversation" in screen_text(app))
        assert prompt_text(app) == "draft"
        await pilot.press("ctrl+l", "up")
        assert prompt_text(app) == "draft"
        await pilot.press("up")
        assert prompt_text(app) == "second"


async def test_where_no_server_is_left_the_banner_says_what_starts_one() -> None:
    async with ReadingServer([ScriptedAnswer(["one"])]) as server, app_at(server.url) as (app, _):
        await server.stop()
        await until(lambda: "no server answers" in screen_text(app))
        await until(lambda: "`chatrt serve` starts one" in " ".join(screen_text(app).split()))


async def test_enter_while_the_server_is_away_says_that_no_answer_is_coming() -> None:
    reply = ScriptedAnswer(["word "] * 1000, delay_s=0.02, survives=True)
    async with ReadingServer([reply]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "count")
        await until(lambda: answer(app).startswith("word "))
        server.is_away = True
        server.cut()
        await until(lambda: state(app).startswith("cut off"))
        await say(pilot, "next")
        await until(lambda: "No server answers yet." in screen_text(app))
        assert prompt_text(app) == "next"
        server.is_away = False
