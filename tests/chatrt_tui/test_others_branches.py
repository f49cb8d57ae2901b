"""Branches that other clients make of a conversation shown here, on a real server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt_tui.clean import clean_text
from tests.chatrt_tui.driving import prompt_text, say, until
from tests.chatrt_tui.sharing import (
    a_world,
    ask,
    beside_another,
    conversation_of,
    is_idle,
    terminal,
    transcript,
)

if TYPE_CHECKING:
    from chatrt.text.tokenizer import Tokenizer
    from chatrt_tui.app import ChatApp


async def test_branches_that_others_made_are_there_to_switch_to(tokenizer: Tokenizer) -> None:
    async with beside_another(tokenizer, "one", "two") as (_, app, pilot, other):
        before = transcript(app)
        here = str(conversation_of(app))
        first, _ = await other.http.turns(here)
        fork = await (await other.chat("fork", previous_response_id=first["id"])).collect()
        anew = await (
            await other.chat("anew", conversation=here, chatrt={"new_branch": True})
        ).collect()
        await until(lambda: places(app) == ["1/2", "1/2"])
        assert transcript(app) == before
        await pilot.press("ctrl+up", "right")
        await until(lambda: transcript(app)[2:] == ["fork", clean_text(fork.text)])
        await pilot.press("up", "right")
        await until(lambda: transcript(app) == ["anew", clean_text(anew.text)])
        await pilot.press("left")
        await until(lambda: transcript(app)[::2] == ["one", "fork"])  # the newest behind it
        await pilot.press("escape")
        await ask(app, pilot, "behind the fork")
        turns = await other.http.turns(here)
        assert turns[-1]["previous_response_id"] == fork.response_id


def places(app: ChatApp) -> list[str]:
    """Which branch of how many each turn shown is."""
    tree = app._chat.conversation.tree
    return [str(tree.place(turn)) for turn in tree.path]


async def test_a_turn_behind_an_older_tip_of_ours_takes_nothing_away(tokenizer: Tokenizer) -> None:
    async with beside_another(tokenizer, "one", "two") as (_, app, pilot, other):
        await say(pilot, "/undo")
        await until(lambda: transcript(app)[::2] == ["one"])
        # It goes on behind the newest turn, which is not what is shown here.
        answering = await other.chat("theirs", conversation=conversation_of(app))
        await answering.collect()
        await until(lambda: len(app._chat.conversation.tree) == 3)
        assert transcript(app)[::2] == ["one"]
        await say(pilot, "/redo")
        await say(pilot, "/redo")
        await until(lambda: transcript(app)[::2] == ["one", "two", "theirs"])


async def test_an_edit_computes_no_more_than_what_is_new(tokenizer: Tokenizer) -> None:
    async with a_world(tokenizer) as world, terminal(world) as (app, pilot):
        for text in ("one two three", "four five six"):
            await ask(app, pilot, text)
        await say(pilot, "/regen")
        await until(lambda: len(app._chat.conversation.tree) == 3 and is_idle(app))
        result = app._chat.conversation.tree.tip.result
        assert result is not None
        assert result.timing["kv"]["computed_tokens"] == 1  # regenerated: all of it was resident
        await say(pilot, "/undo")
        await say(pilot, "/edit")
        await until(lambda: prompt_text(app) == "one two three")
        await pilot.press("!", "enter")
        await until(lambda: len(app._chat.conversation.tree) == 4 and is_idle(app))
        assert places(app) == ["2/2"]
        result = app._chat.conversation.tree.tip.result
        assert result is not None
        kv = result.timing["kv"]
        assert kv["reused_tokens"] > kv["computed_tokens"]
