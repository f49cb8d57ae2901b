"""A conversation of 500 turns: opening it, reading back, branches; keys are handled meanwhile."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from textual import events
from textual.widgets import OptionList

from chatrt.params import SamplingParams
from chatrt.server.handshake import NO_KEY_ID
from chatrt.store import Store, StoredTurn
from chatrt.testing.serving import serving as serving_port
from chatrt_tui.app import ChatApp
from chatrt_tui.prompt import Prompt
from chatrt_tui.transcript import FIRST_TURNS, MOST_TURNS, Transcript
from chatrt_tui.turn_view import TurnView
from tests.chatrt.service_support import MODEL, serving
from tests.chatrt_tui.driving import TIME_SCALE, prompt_text, say, screen_text, state, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from textual.pilot import Pilot

    from chatrt.text.tokenizer import Tokenizer

NUM_TURNS = 500
_ANSWER = """Answer {n} in **two** paragraphs, of which the first has `code` and a list.

- one thing, and
- another

```python
def answer() -> int:
    return {n}
```

The end of answer {n}."""


def fill(path: Path, key_id: str) -> None:
    """A conversation of 500 turns; the tenth before the last one has a branch of one turn."""
    with Store.open(path) as store:
        store.create_conversation("conv_long", key_id, created_at=1.0, title="a long one")
        names = [*(f"resp_{n}" for n in range(NUM_TURNS)), "resp_fork"]
        for n, name in enumerate(names):
            parent_id = names[n - 1] if n else None
            if name == "resp_fork":
                # Saved last, and so the newest: the long branch is one key away.
                parent_id = names[NUM_TURNS - 11]
            store.save_turn(
                StoredTurn(
                    response_id=name,
                    parent_id=parent_id,
                    conversation_id="conv_long",
                    key_id=key_id,
                    model=MODEL,
                    input_json=f'"question {n}"',
                    prompt_ids=(5, 6, 7),
                    output_ids=(8, 9),
                    text=_ANSWER.format(n=n),
                    created_at=2.0 + n,
                )
            )


@asynccontextmanager
async def opened(
    tokenizer: Tokenizer, database: Path
) -> AsyncIterator[tuple[ChatApp, Pilot[None]]]:
    """The terminal with the long conversation chosen from the list."""
    sampling = SamplingParams(temperature=0.0, max_output_tokens=4, ignore_eos=True)
    async with (
        serving(tokenizer, database, sampling=sampling, max_context=512) as chat,
        serving_port(chat.service, insecure_no_auth=True) as server,
    ):
        app = ChatApp(f"ws://127.0.0.1:{server.port}", typing_ahead=False)
        async with app.run_test(size=(90, 40), notifications=True) as pilot:
            await until(lambda: state(app) == MODEL)
            await pilot.press("ctrl+o")
            await until(lambda: isinstance(app.focused, OptionList) or app.screen.query(OptionList))
            await until(lambda: "501 turns" in screen_text(app))
            # To look for garbage in a process that has a model in it is not the terminal's work.
            gc.disable()
            try:
                app.post_message(events.Key("enter", "\r"))
                yield app, pilot
            finally:
                gc.enable()


async def waits_ms(app: ChatApp, num_keys: int, *, pause_s: float = 0.01) -> list[float]:
    """What this thread did from each of some key presses until the prompt had it.

    In the thread's own time: what else the machine does meanwhile is not the terminal's.
    """
    await until(lambda: isinstance(app.focused, Prompt))
    prompt = app.query_one(Prompt)
    waits = []
    for _ in range(num_keys):
        length = len(prompt.text)
        start_s = time.thread_time()
        app.post_message(events.Key("x", "x"))
        await until(partial(is_longer, app, length), pause_s=0.001)
        waits.append((time.thread_time() - start_s) * 1000)
        await asyncio.sleep(pause_s)
    return sorted(waits)


def is_longer(app: ChatApp, length: int) -> bool:
    return len(prompt_text(app)) > length


async def test_a_conversation_of_500_turns_opens_and_keys_are_handled_within_50_ms(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    database = tmp_path / "chat.db"
    fill(database, NO_KEY_ID)
    async with opened(tokenizer, database) as (app, pilot):
        await until(lambda: app.query(Transcript))
        transcript = app.query_one(Transcript)
        started_s = time.perf_counter()
        waits = await waits_ms(app, 40)
        await until(lambda: "The end of answer 500." in screen_text(app))
        assert time.perf_counter() - started_s < 5 * TIME_SCALE
        # One of forty may meet a pause of the machine itself.
        assert waits[-2] < 50 * TIME_SCALE
        await until(lambda: len(transcript.views) == FIRST_TURNS)
        assert transcript.num_hidden == 491 - FIRST_TURNS
        app.query_one(Prompt).show("")

        # To the long branch and back: local, whatever its length.
        await say(pilot, "/branch previous")
        await until(lambda: "The end of answer 499." in screen_text(app))
        assert transcript.num_hidden + len(transcript.views) == NUM_TURNS
        assert (await waits_ms(app, 20))[-2] < 50 * TIME_SCALE


async def test_older_turns_come_as_one_scrolls_up_and_what_one_reads_stays(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    database = tmp_path / "chat.db"
    fill(database, NO_KEY_ID)
    async with opened(tokenizer, database) as (app, pilot):
        await until(lambda: app.query(Transcript))
        transcript = app.query_one(Transcript)
        await until(lambda: len(transcript.views) == FIRST_TURNS)
        await pilot.press("pageup")
        await until(lambda: transcript.scroll_y < transcript.max_scroll_y)
        before = {view: view.region.y for view in transcript.views}
        transcript.load_older()
        await until(lambda: not transcript._is_extending)
        await until(lambda: len(transcript.views) > FIRST_TURNS)
        # What is read stays where it is, whatever comes above it.
        await until(lambda: {view: view.region.y for view in before} == before)
        num_turns = len(transcript.views)
        while len(transcript.views) == num_turns:
            await pilot.press("pageup")
            await pilot.pause()
        await until(lambda: not transcript._is_extending)
        while len(transcript.views) <= MOST_TURNS:
            transcript.load_older()
            await until(lambda: not transcript._is_extending)
        await until(lambda: len(transcript.views) > MOST_TURNS)
        numbers = [int(view.turn.question.split()[1]) for view in transcript.views[:-1]]
        assert numbers == list(range(numbers[0], NUM_TURNS - 10))
        await until(lambda: not transcript._is_extending)
        assert (await waits_ms(app, 20))[-2] < 50 * TIME_SCALE
        # At the end again, the next answer lets go of them.
        await pilot.press("ctrl+end")
        app.query_one(Prompt).show("")
        await say(pilot, "more")
        await until(lambda: len(app.query(TurnView)) <= MOST_TURNS)
        assert "more" in screen_text(app)


def whole(transcript: Transcript) -> list[int]:
    """The numbers of the turns that are laid out."""
    return [int(view.turn.question.split()[1]) for view in transcript.views if not view.is_folded]


def is_read(app: ChatApp) -> bool:
    """Whether there is text in each line of the transcript that should have some."""
    lines = screen_text(app).splitlines()[: app.query_one(Transcript).size.height]
    empty = max(
        len(run) for run in "".join("." if line.strip() else "x" for line in lines).split(".")
    )
    return empty < 4


async def test_however_far_one_reads_back_only_turns_around_it_are_laid_out(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    database = tmp_path / "chat.db"
    fill(database, NO_KEY_ID)
    async with opened(tokenizer, database) as (app, pilot):
        await until(lambda: app.query(Transcript))
        transcript = app.query_one(Transcript)
        await until(lambda: len(transcript.views) == FIRST_TURNS)
        while len(transcript.views) < 80:
            transcript.scroll_home(animate=False)
            transcript.load_older()
            await until(lambda: not transcript._is_extending)
        await until(lambda: not transcript._is_folding and len(whole(transcript)) < 40)
        (*around, newest) = whole(transcript)
        assert newest == NUM_TURNS
        assert around == list(range(around[0], around[0] + len(around)))
        await until(lambda: is_read(app))
        # Down again: what one comes to is there, and nothing moves but what one reads.
        while transcript.scroll_y < transcript.max_scroll_y - 200:
            before = transcript.scroll_y
            await pilot.press("pagedown")
            await until(lambda y=before: transcript.scroll_y > y)  # type: ignore[misc]
            await until(lambda: is_read(app))
        assert len(whole(transcript)) < 40
        assert (await waits_ms(app, 20))[-2] < 50 * TIME_SCALE
        await pilot.press("ctrl+end")
        await until(lambda: "The end of answer 500." in screen_text(app) and is_read(app))
        # In a narrower terminal other heights are needed: one still sees the turn one selected.
        await pilot.press(*["ctrl+up"] * 30)
        await pilot.resize_terminal(60, 40)
        await until(lambda: app._chat.selected is not None and not app._chat.selected.is_folded)
        await until(lambda: is_read(app))
        view = app._chat.selected
        assert view is not None
        await until(lambda: view.region.overlaps(transcript.region))
        assert view.turn.question in screen_text(app)
        # One above, which is higher in the narrow terminal, does not move it.
        await until(lambda: not transcript._is_folding)
        await pilot.pause(0.2)
        above = [one for one in transcript.views if one.is_folded and one.region.y < view.region.y]
        placed = transcript._regions()[above[-1]]
        where = view.region.y
        async with transcript._changes:
            await transcript._unfold(above[-1], placed)
        assert transcript._regions()[above[-1]].height > placed.height
        await until(lambda: view.region.y == where)
