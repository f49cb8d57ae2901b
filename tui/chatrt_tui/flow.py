"""The flow of a turn of ours: from Enter to the end of its answer, over one connection.

Knows: which turn runs, what each event of the client's thread means for the widgets.
Does not know: other clients' turns, branches, commands: `SharedFlow` and `Chat` add them.
Invariant: a question always continues the tip shown at the end of the transcript; a conversation is
left only by the person's own key, never because a connection was lost.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from textual import on, work
from textual.containers import Vertical
from textual.widgets import TextArea

from chatrt.client.batches import (
    ConnectionState,
    ConversationMade,
    ThreadEvent,
    TurnDone,
    TurnEvent,
    TurnInterrupted,
)
from chatrt.client.messages import CREATED_TYPE
from chatrt.errors import ChatrtError
from chatrt_tui import figures
from chatrt_tui.clean import clean_line
from chatrt_tui.commands import as_prompt
from chatrt_tui.connection import ServerBatch
from chatrt_tui.pace import PaintPace
from chatrt_tui.prompt import Prompt
from chatrt_tui.status import Banner, StatusLine
from chatrt_tui.transcript import Transcript
from chatrt_tui.turns import Conversation, RunningTurn, settle

if TYPE_CHECKING:
    from chatrt.client import ClientThread, TurnResult
    from chatrt_tui.branches import Turn
    from chatrt_tui.connection import Connect
    from chatrt_tui.turn_view import TurnView

TITLE_CHARS = 60
WELCOME = "A new conversation. What would you like to know?"
_FOOTER_S = 0.1
_START = ". `chatrt serve` starts one."
_UNSENT = "will be sent when the server is back"


class TurnFlow(Vertical):
    """One conversation at a time; a subclass composes its widgets.

    They are a `Banner`, a `Transcript`, a `StatusLine` and a `Prompt`.
    """

    def __init__(self, connect: Connect, *, typing_ahead: bool) -> None:
        super().__init__()
        self.client: ClientThread = connect(self)
        self._pace = PaintPace() if self.client.is_local else None
        self.typing_ahead = typing_ahead
        self.models: list[str] = []
        self._num_context: int | None = None
        self._conversation = Conversation()
        self._turn: RunningTurn | None = None
        self._num_asked = 0
        self._could_stop = False
        self._connection = ConnectionState("connecting", "connecting")

    @property
    def conversation(self) -> Conversation:
        """The conversation shown; its id is None before its first turn."""
        return self._conversation

    @property
    def answering(self) -> bool:
        """Whether a turn of ours runs."""
        return self._turn is not None

    @property
    def is_busy(self) -> bool:
        """Whether a turn runs that the next question would follow."""
        return self._turn is not None

    @property
    def _next_parent(self) -> Turn:
        """The turn that a question asked now follows."""
        return self._conversation.tree.tip

    async def on_mount(self) -> None:
        """Paint first, connect then."""
        await self.query_one(Transcript).show_path([], welcome=WELCOME)
        self.query_one(Prompt).take_keys()
        self._show_state()
        self.call_after_refresh(self.client.start)

    async def on_unmount(self) -> None:
        """End the client's thread."""
        await asyncio.to_thread(self.client.close)

    async def _ask(self, text: str, parent: Turn, *, seed: int | None = None) -> None:
        """Ask behind `parent`; the question is on its way before anything is painted."""
        self._num_asked += 1
        here = self._conversation
        title = clean_line(text)[:TITLE_CHARS]
        self.client.ask(self._num_asked, here.request(text, parent, seed=seed), title=title)
        here.title = here.title or title
        unsent = self._connection.kind in ("connecting", "lost")
        transcript = self.query_one(Transcript)
        tip_before = here.tree.tip
        if parent is not tip_before:
            here.tree.tip = parent
            await transcript.show_path(here.tree.path)
        turn = here.new_turn(text, parent)
        view = await transcript.add_turn(turn)
        self._turn = RunningTurn(self._num_asked, turn, view, unsent, tip_before)
        transcript.anchor()
        if unsent:
            view.tell(_UNSENT)
        self.query_one(StatusLine).show_figures("")  # they are the last turn's, not this one's
        self._show_state()

    @on(TextArea.Changed)
    def _type_ahead(self) -> None:
        """Let the server read along; while an answer runs, what follows it cannot be computed."""
        text = self.query_one(Prompt).text
        bare = text.lstrip()
        if self.typing_ahead and not self.is_busy and bare and not bare.startswith("/"):
            self.client.type_ahead(self._conversation.request(text, self._next_parent))
        else:
            self.client.drop_typing()

    def toggle_typing_ahead(self) -> None:
        """Send what is typed before Enter from now on, or only then."""
        self.typing_ahead = not self.typing_ahead
        self._type_ahead()
        told = "on." if self.typing_ahead else "off: nothing is sent before Enter."
        self.notify(f"Typing ahead is {told}")

    def stop(self) -> None:
        """Stop the answer that runs; its part stays, and so does the prompt."""
        if self._turn is not None:
            self.client.stop(self._turn.number)
            self._turn.stopping = True
            self._show_state()

    @on(ServerBatch)
    async def _take_batch(self, batch: ServerBatch) -> None:
        if self._pace is not None:
            self.client.gather_text_for(self._pace.pause_s())
        text = ""
        for event in batch.events:
            added = self._text_of(event)
            if added is not None:
                text += added
                continue
            await self._append(text)
            text = ""
            await self._take(event)
        await self._append(text)

    def _text_of(self, event: ThreadEvent) -> str | None:
        """What an event adds to the answer that grows; None for one that is no text."""
        if isinstance(event, TurnEvent) and event.event.delta:
            return event.event.delta if self._is_running(event.turn_id) else ""
        return None

    async def _take(self, event: ThreadEvent) -> None:
        match event:
            case ConnectionState():
                self._take_connection(event)
            case ConversationMade(number, conversation_id) if self._is_running(number):
                self._conversation.id = conversation_id
                self.client.watch(conversation_id)
            case TurnEvent(number, inner) if inner.type == CREATED_TYPE:
                if self._turn is not None and self._is_running(number):
                    self._conversation.tree.name(self._turn.turn, inner.data["response"]["id"])
            case TurnInterrupted(number) if self._turn is not None and self._is_running(number):
                self._turn.cut_off = True
                self._show_state()
            case TurnDone(number, result) if self._is_running(number):
                await self._end_turn(result)
            case _:
                pass  # an event that paints nothing, or a turn that was left

    def _is_running(self, number: int) -> bool:
        return self._turn is not None and self._turn.number == number

    @property
    def _growing(self) -> TurnView | None:
        """The turn whose answer grows."""
        return None if self._turn is None else self._turn.view

    async def _append(self, text: str) -> None:
        growing = self._growing
        if text and self._turn is not None:
            self._turn.received.append(text)
        if text and growing is not None:
            await growing.append(text)

    async def _end_turn(self, result: TurnResult) -> None:
        running, self._turn = self._turn, None
        assert running is not None
        if not result.usable_as_parent:
            self.query_one(Prompt).give_back(as_prompt(running.turn.question))
        await self._finish(running.turn, running.view, result)
        tree = self._conversation.tree
        if not result.usable_as_parent and running.tip_before is not tree.tip:
            # What an edit was to take the place of is still there.
            tree.tip = running.tip_before
            await self.query_one(Transcript).show_path(tree.path, told=figures.ending(result))

    async def _finish(self, turn: Turn, view: TurnView, result: TurnResult) -> None:
        """A turn has ended: the next question may follow it, if any can."""
        self.query_one(Prompt).allow_sending()
        settle(turn, result)
        if result.response_id is not None and result.usable_as_parent:
            self._conversation.tree.name(turn, result.response_id)
        else:
            self._conversation.tree.drop(turn)
            self.query_one(Transcript).let_go(turn)
        # More than was streamed where the server kept what a lost connection did not bring.
        await view.append(result.text[view.num_received :])
        await view.finish(result)
        self.query_one(StatusLine).show_figures(figures.status(result, self._num_context))
        self._show_state()
        self._type_ahead()
        self._changed()
        await self.query_one(Transcript).trim()

    def _changed(self) -> None:
        """Other turns are shown, or one has ended; a subclass that shows more of them follows."""

    def _take_connection(self, state: ConnectionState) -> None:
        self._connection = state
        banner = self.query_one(Banner)
        match state.kind:
            case "connected":
                banner.hide()
                self._read_model()
                self._type_ahead()
                if self._turn is not None:
                    self._turn.unsent = self._turn.cut_off = False
                    self._turn.view.tell("…")
            case "lost":
                told = state.message.partition(";")[0]
                wait = f"trying again in {state.retry_in_s:.1f} s (attempt {state.attempt + 1})"
                start = _START if state.nobody and self.client.is_local else ""
                banner.tell(f"{told}; {wait}{start}")
            case "refused":
                banner.tell(state.message)
            case "connecting":
                pass  # a banner that is there stays until the connection is
        self._show_state()

    @work(exclusive=True, group="model")
    async def _read_model(self) -> None:
        try:
            models: list[dict[str, Any]] = await self.client.http.models()
        except ChatrtError:
            return  # the figures then go without the size of the context
        self.models = [str(model["id"]) for model in models if model.get("id")]
        self._num_context = models[0].get("max_context") if models else None
        self._show_state()

    def _state(self) -> str:
        """What is going on, in a few words."""
        is_connected = self._connection.kind == "connected"
        if self._turn is not None and (self._turn.cut_off or is_connected):
            return self._turn.state
        if is_connected:
            chosen = self._conversation.settings.model
            return clean_line(chosen or (self.models[0] if self.models else ""))
        return "refused" if self._connection.kind == "refused" else "connecting …"

    def _show_state(self) -> None:
        # none where the server's answer comes while the screen is being taken down
        for line in self.query(StatusLine):
            line.show_state(self._state())
        if self.answering != self._could_stop:
            self._could_stop = self.answering
            # Not now: a footer is made anew, and the first text of an answer would wait for it.
            self.set_timer(_FOOTER_S, self.app.refresh_bindings)
