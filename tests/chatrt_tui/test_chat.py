"""The chat as a person uses it: keys in, what is painted out, against the scripted server."""

from __future__ import annotations

import asyncio
import re
import time
from functools import partial
from typing import Any

from textual import events

from chatrt.testing.scripted_server import ScriptedAnswer, ScriptedServer
from chatrt_tui.answer_view import AnswerView
from chatrt_tui.chat import Chat
from chatrt_tui.code import CodeBlock
from chatrt_tui.prompt import Prompt
from chatrt_tui.status import Banner, StatusLine
from chatrt_tui.transcript import Transcript
from chatrt_tui.turn_view import UserMessage
from tests.chatrt_tui.driving import (
    TIME_SCALE,
    answer,
    app_at,
    figures,
    idle,
    prompt_text,
    say,
    screen_text,
    state,
    until,
)

TIMING = {"decode_tps": 243.2, "ttft_ms": 6.0, "stages": {"queue_ms": 0.1, "prefill_ms": 4.8}}
USAGE = {
    "input_tokens": 800,
    "input_tokens_details": {"cached_tokens": 768},
    "total_tokens": 812,
}


def has_length(prompt: Prompt, length: int) -> bool:
    return len(prompt.text) == length


async def test_a_turn_streams_and_is_painted_as_markdown() -> None:
    pieces = ["# Head", "ing\n\nIn **bo", "ld**, then:\n\n```py", "thon\nx = 1\n", "```\n\nEnd."]
    async with (
        ScriptedServer([ScriptedAnswer(pieces, first_delay_s=0.2, delay_s=0.05)]) as server,
        app_at(server.url) as (app, pilot),
    ):
        await say(pilot, "hello there")
        await until(lambda: "answering" in state(app))
        await until(lambda: "End." in screen_text(app))
        painted = screen_text(app)
        assert "hello there" in painted
        assert "In bold, then:" in painted
        assert "x = 1" in painted
        assert "```" not in painted
        assert app.query_one(CodeBlock).code == "x = 1"


async def test_an_open_fence_is_painted_as_plain_text_before_it_closes() -> None:
    pieces = ["```python\n", "x = 1\n", "y = 2\n", "z = 3\n", "```\n"]
    async with (
        ScriptedServer([ScriptedAnswer(pieces, delay_s=0.3)]) as server,
        app_at(server.url) as (app, pilot),
    ):
        await say(pilot, "code")
        await until(lambda: "x = 1" in screen_text(app))
        assert "y = 2" not in screen_text(app)
        await until(lambda: idle(app))
        assert "z = 3" in screen_text(app)


async def test_the_status_line_shows_the_last_turns_figures_and_the_details_all_of_them() -> None:
    reply = ScriptedAnswer(["ok"], timing=TIMING, usage=USAGE)
    async with ScriptedServer([reply]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "hi")
        await until(lambda: "tok/s" in figures(app))
        assert figures(app).startswith("TTFT ")
        assert figures(app).endswith(" ms · 243 tok/s · 96 % cached · 812/8192 tokens")
        prefill = re.compile(r"prefill +█+ +4\.8 ms")
        assert not prefill.search(screen_text(app))
        await pilot.press("ctrl+t")
        await until(lambda: prefill.search(screen_text(app)))
        await pilot.press("ctrl+t")
        await until(lambda: not prefill.search(screen_text(app)))


async def test_figures_are_shown_once_and_move_under_their_answer_when_the_next_one_runs() -> None:
    replies = [
        ScriptedAnswer(["ok"], timing=TIMING, usage=USAGE),
        ScriptedAnswer(["word "] * 1000, delay_s=0.01),
    ]
    async with ScriptedServer(replies) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "hi")
        await until(lambda: "243 tok/s" in screen_text(app))
        assert screen_text(app).count("243 tok/s") == 1
        await say(pilot, "more")
        await until(lambda: "word" in screen_text(app))
        assert figures(app) == ""
        assert state(app) == "answering · Esc stops"
        assert screen_text(app).count("243 tok/s") == 1


async def test_figures_are_whole_in_80_columns_and_the_models_name_gives_way() -> None:
    speculation = {"drafted": 3, "mean_accepted_length": 2.9}
    timing = {**TIMING, "speculation": speculation}
    reply = ScriptedAnswer(["ok"], timing=timing, usage=USAGE)
    async with (
        ScriptedServer([reply]) as server,
        app_at(server.url, size=(80, 24)) as (app, pilot),
    ):
        await say(pilot, "hi")
        await until(lambda: "2.9 tokens/step · 812/8192 tokens" in screen_text(app))


async def test_escape_keeps_the_partial_answer_and_the_half_typed_prompt() -> None:
    replies = [ScriptedAnswer(["word "] * 1000, delay_s=0.01), ScriptedAnswer(["more"])]
    async with ScriptedServer(replies) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "go")
        await until(lambda: "word" in answer(app))
        await pilot.press(*"half")
        await pilot.press("escape")
        await until(lambda: idle(app))
        assert answer(app).startswith("word ")
        assert "stopped" in screen_text(app)
        assert prompt_text(app) == "half"
        await pilot.press("enter")
        await until(lambda: "more" in answer(app))
        first, second = server.creates()
        assert "previous_response_id" not in first
        assert second["previous_response_id"].startswith("resp_")


async def test_text_after_enter_is_the_next_prompt_and_stays_while_an_answer_runs() -> None:
    replies = [ScriptedAnswer(["word "] * 1000, delay_s=0.01)]
    async with ScriptedServer(replies) as server, app_at(server.url) as (app, pilot):
        app.query_one(Prompt).insert("first")
        await pilot.press("enter", *"next", "enter")
        await until(lambda: answer(app))
        assert prompt_text(app) == "next"
        assert [create["input"] for create in server.creates()] == ["first"]


async def test_a_lost_connection_shows_a_banner_and_goes_on_in_the_same_conversation() -> None:
    replies = [
        ScriptedAnswer(["one"]),
        ScriptedAnswer(["a ", "b ", "c "], delay_s=0.05, drop_after=2),
        ScriptedAnswer(["three"]),
    ]
    async with ScriptedServer(replies) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "1")
        await until(lambda: idle(app))
        await server.stop()
        banner = app.query_one(Banner)
        await until(lambda: banner.has_class("-shown"))
        await until(lambda: "trying again in" in screen_text(app))
        await server.start()
        await until(lambda: not banner.has_class("-shown"))
        await say(pilot, "2")
        await until(lambda: "a b " in answer(app) and idle(app))
        await say(pilot, "3")
        await until(lambda: "three" in answer(app))
        first, second, third = server.creates()
        assert second["previous_response_id"] == "resp_2"
        assert third["previous_response_id"] == "resp_3"
        created = [m for m in server.requests if m["type"] == "chatrt.conversation.create"]
        assert len(created) == 1
        assert first["conversation"] == "conv_1"


async def test_a_question_typed_before_the_connection_is_sent_when_it_is_there() -> None:
    server = ScriptedServer([ScriptedAnswer(["late"])])
    await server.start()
    await server.stop()
    async with app_at(server.url, connected=False) as (app, pilot):
        await say(pilot, "early")
        await until(lambda: app.query_one(Banner).has_class("-shown"))
        await server.start()
        await until(lambda: answer(app) == "late")
    await server.stop()


async def test_a_server_that_names_its_model_while_the_screen_goes_harms_nothing() -> None:
    async with ScriptedServer([ScriptedAnswer(["hi"])]) as server, app_at(server.url) as (app, _):
        await until(lambda: "scripted" in screen_text(app))
        await app.query_one(StatusLine).remove()
        await app.query_one(Chat)._read_model().wait()


async def test_a_question_that_waits_for_the_server_says_so() -> None:
    async with (
        ScriptedServer([ScriptedAnswer(["late"])]) as server,
        app_at(server.url) as (app, pilot),
    ):
        await server.stop()
        await until(lambda: app.query_one(Banner).has_class("-shown"))
        await say(pilot, "early")
        await until(lambda: "will be sent when the server is back" in screen_text(app))
        await server.start()
        await until(lambda: answer(app) == "late")
        assert "will be sent" not in screen_text(app)


async def test_a_refused_question_says_why_and_comes_back_into_the_prompt() -> None:
    error = {"code": "context_length_exceeded", "message": "9001 tokens do not fit in 8192"}
    replies = [ScriptedAnswer(error=error), ScriptedAnswer(["fine"])]
    async with ScriptedServer(replies) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "too long")
        await until(lambda: prompt_text(app) == "too long")
        assert "9001 tokens do not fit in 8192" in screen_text(app)
        await pilot.press("enter")
        await until(lambda: answer(app) == "fine")
        assert all(create["conversation"] == "conv_1" for create in server.creates())


async def test_hostile_text_never_reaches_the_terminal() -> None:
    pieces = ["safe \x1b", "[2J\x1b]0;ti", "tle\x07[b]not markup[/b] \x9b31m", "end\x00\x08"]
    async with (
        ScriptedServer([ScriptedAnswer(pieces)]) as server,
        app_at(server.url) as (
            app,
            pilot,
        ),
    ):
        await say(pilot, "\x1b[31mfrom me\x07 [red]x[/red]")
        await until(lambda: idle(app) and answer(app))
        painted = screen_text(app)
        assert "safe [b]not markup[/b] end" in painted
        assert "from me [red]x[/red]" in painted
        assert not any((ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 for c in painted)


async def test_the_view_stays_where_one_reads_and_follows_only_at_the_end() -> None:
    pieces = [f"line {i} " + "word " * 40 + "\n\n" for i in range(60)]
    # Its second half comes when one reads, however long the first one took to be painted.
    reads = asyncio.Event()
    reply = ScriptedAnswer(pieces, delay_s=0.03, holds_at=30, go_on=reads)
    async with ScriptedServer([reply]) as server, app_at(server.url) as (app, pilot):
        transcript = app.query_one(Transcript)
        await say(pilot, "go")
        await until(lambda: transcript.max_scroll_y > 20)
        await until(lambda: transcript.scroll_y >= transcript.max_scroll_y - 5, within_s=30)
        await pilot.press("pageup")
        await pilot.pause(0.1)
        at, length = transcript.scroll_y, len(answer(app))
        assert at < transcript.max_scroll_y
        reads.set()
        await until(lambda: len(answer(app)) > length + 200, within_s=30)
        assert transcript.scroll_y == at
        await pilot.press("ctrl+end")
        await until(lambda: idle(app), within_s=30)  # sixty blocks, laid out again and again
        await until(lambda: "line 59" in screen_text(app))


async def test_a_key_press_is_handled_within_50_ms_while_300_tokens_a_second_stream() -> None:
    words = ["word ", "and ", "**more** ", "of `it`, ", "on\n\n"] * 200
    reply = ScriptedAnswer(words, delay_s=1 / 300)
    async with ScriptedServer([reply]) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "go")
        await until(lambda: len(answer(app)) > 500)
        waits_ms = []
        prompt = app.query_one(Prompt)
        for i in range(1, 21):
            start = time.perf_counter()
            app.post_message(events.Key("x", "x"))
            await until(partial(has_length, prompt, i), pause_s=0.001)
            waits_ms.append((time.perf_counter() - start) * 1000)
            await asyncio.sleep(0.03)
        assert not idle(app)
        # One of twenty may meet a pause of the machine itself.
        assert sorted(waits_ms)[-2] < 50 * TIME_SCALE


async def test_a_new_chat_is_a_new_conversation_and_drops_late_text_of_the_old() -> None:
    replies = [ScriptedAnswer(["old "] * 1000, delay_s=0.01), ScriptedAnswer(["new"])]
    async with ScriptedServer(replies) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "first")
        await until(lambda: "old" in answer(app))
        await pilot.press("ctrl+n")
        await until(lambda: not app.query(AnswerView))
        await say(pilot, "second")
        await until(lambda: answer(app) == "new" and idle(app))
        assert "old" not in screen_text(app)
        assert [create.get("conversation") for create in server.creates()] == ["conv_1", "conv_3"]


async def test_an_old_conversation_is_found_opened_and_continued() -> None:
    replies = [ScriptedAnswer([text]) for text in ("Paris.", "Rome.", "Lyon.")]
    async with ScriptedServer(replies) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "capital of France?")
        await until(lambda: idle(app))
        await pilot.press("ctrl+n")
        await until(lambda: not app.query(AnswerView))
        await say(pilot, "capital of Italy?")
        await until(lambda: answer(app) == "Rome." and idle(app))
        await pilot.press("ctrl+o")
        await until(lambda: "capital of France?" in screen_text(app))
        await pilot.press(*"france")
        await until(lambda: "Italy?  1 turn" not in screen_text(app))
        await pilot.press("enter")
        await until(lambda: answer(app) == "Paris.")
        assert len(app.query(UserMessage)) == 1
        await say(pilot, "and the next city?")
        await until(lambda: answer(app) == "Lyon.")
        last = server.creates()[-1]
        assert last["previous_response_id"] == "resp_2"
        assert "conversation" not in last
        assert server.creates()[0]["conversation"] == "conv_1"


class _TellsStatus(ScriptedServer):
    """A scripted server whose items say, as the real one's do, whether an answer is whole."""

    def _items(self, conversation: Any) -> list[dict[str, Any]]:
        items = super()._items(conversation)
        for item in items:
            if item["role"] == "assistant":
                whole = self._turns[item["response_id"]].response["status"] == "completed"
                item["status"] = "completed" if whole else "incomplete"
        return items


async def test_an_answer_that_was_stopped_is_told_to_be_so_when_it_is_opened_again() -> None:
    replies = [ScriptedAnswer(["whole"]), ScriptedAnswer(["half "] * 1000, delay_s=0.01)]
    async with _TellsStatus(replies) as server, app_at(server.url) as (app, pilot):
        await say(pilot, "first")
        await until(lambda: answer(app) == "whole" and idle(app))
        await say(pilot, "second")
        await until(lambda: "half" in answer(app))
        await pilot.press("escape")
        await until(lambda: idle(app))
        await pilot.press("ctrl+n", "ctrl+o")
        await until(lambda: "first  2 turns" in screen_text(app))
        await pilot.press("enter")
        await until(lambda: answer(app).startswith("half ") and idle(app))
        lines = [line.strip() for line in screen_text(app).splitlines()]
        assert lines.count("stopped") == 1
        assert lines.index("stopped") > lines.index("whole") + 1


async def test_ctrl_c_copies_a_selection_and_otherwise_quits_at_the_second_press() -> None:
    async with (
        ScriptedServer([ScriptedAnswer(["x"])]) as server,
        app_at(server.url) as (
            app,
            pilot,
        ),
    ):
        prompt = app.query_one(Prompt)
        prompt.insert("copy me")
        prompt.select_all()
        await pilot.press("ctrl+c")
        assert app.clipboard == "copy me"
        prompt.move_cursor((0, 0))
        await pilot.press("ctrl+c")
        await until(lambda: "Ctrl+C again quits" in screen_text(app))
        assert app.is_running
        await pilot.press("ctrl+c")
        await until(lambda: not app.is_running)


async def test_the_prompt_is_painted_before_any_server_answers() -> None:
    async with app_at("ws://127.0.0.1:1", connected=False) as (app, pilot):
        await pilot.pause()
        assert "Write a message." in screen_text(app)
