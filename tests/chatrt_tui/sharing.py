"""A real server that several clients share: terminals, and clients that are none."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatrt.client import ChatClient, ResponseRequest
from chatrt.params import SamplingParams
from chatrt.testing.serving import serving as serving_port
from chatrt_tui.answer_view import Note
from chatrt_tui.app import ChatApp
from chatrt_tui.chat import Chat as ChatWidget
from chatrt_tui.transcript import Transcript
from chatrt_tui.turn_view import UserMessage
from tests.chatrt.service_support import MODEL, Chat, serving
from tests.chatrt_tui.driving import say, screen_text, state, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from textual.pilot import Pilot

    from chatrt.client import Answer, TurnResult
    from chatrt.text.tokenizer import Tokenizer

SAMPLING = SamplingParams(temperature=0.0, max_output_tokens=40, ignore_eos=True)
HELD = {"max_output_tokens": 150}  # long enough to be held in the middle


@dataclass(frozen=True, slots=True)
class World:
    """A running server, and what is behind it."""

    chat: Chat
    url: str

    async def connected(self) -> ChatClient:
        """A client that is no terminal."""
        return await ChatClient.connect(self.url)

    async def begun(self, client: ChatClient, text: str, **fields: Any) -> Answer:
        """An answer that has begun, and is held where it is until `go_on`."""
        answering = await client.send(ResponseRequest(input=text, sampling=HELD, **fields))
        async for event in answering:
            if event.delta:
                break
        assert answering.response_id is not None
        self.chat.service.pause(answering.response_id)
        return answering

    async def go_on(self, answering: Answer) -> TurnResult:
        """The rest of a held answer."""
        assert answering.response_id is not None
        self.chat.service.resume(answering.response_id)
        return await answering.collect()


@asynccontextmanager
async def a_world(tokenizer: Tokenizer) -> AsyncIterator[World]:
    async with (
        serving(tokenizer, sampling=SAMPLING) as chat,
        serving_port(chat.service, insecure_no_auth=True) as server,
    ):
        yield World(chat, f"ws://127.0.0.1:{server.port}")


@asynccontextmanager
async def terminal(world: World) -> AsyncIterator[tuple[ChatApp, Pilot[None]]]:
    app = ChatApp(world.url, typing_ahead=False)
    async with app.run_test(size=(90, 40), notifications=True) as pilot:
        await until(lambda: is_idle(app))
        yield app, pilot


@asynccontextmanager
async def beside_another(
    tokenizer: Tokenizer, *questions: str
) -> AsyncIterator[tuple[World, ChatApp, Pilot[None], ChatClient]]:
    """A terminal that asked these and watches, and a client that is none."""
    async with (
        a_world(tokenizer) as world,
        terminal(world) as (app, pilot),
        await world.connected() as other,
    ):
        for text in questions:
            await ask(app, pilot, text)
        await until(lambda: is_watching(app))
        yield world, app, pilot, other


def is_idle(app: ChatApp) -> bool:
    return state(app) == MODEL


def transcript(app: ChatApp) -> list[str]:
    """All that was asked and answered, in the order shown."""
    views = app.query_one(Transcript).views
    return [
        said for view in views for said in (str(view.query_one(UserMessage).render()), view.text)
    ]


def num_notes(app: ChatApp, words: str) -> int:
    return sum(words in str(note.render()) for note in app.query(Note))


async def ask(app: ChatApp, pilot: Pilot[None], text: str) -> None:
    """One turn, from its question to its end."""
    num_shown = len(transcript(app))
    await say(pilot, text)
    await until(lambda: len(transcript(app)) == num_shown + 2 and is_idle(app))


async def open_first(app: ChatApp, pilot: Pilot[None]) -> None:
    """Open the newest conversation of the list, and wait until it is watched."""
    await pilot.press("ctrl+o")
    await until(lambda: "turn" in screen_text(app))
    await pilot.press("enter")
    await until(lambda: conversation_of(app) is not None and is_watching(app))


def conversation_of(app: ChatApp) -> str | None:
    return app.query(ChatWidget).first().conversation.id if app.query(ChatWidget) else None


def is_watching(app: ChatApp) -> bool:
    """Whether the server has confirmed that the conversation shown is watched."""
    connection = app._chat.client._client
    conversation_id = conversation_of(app)
    if connection is None or conversation_id is None:
        return False
    subscription = connection._subscriptions.get(conversation_id)
    return subscription is not None and subscription.is_confirmed
