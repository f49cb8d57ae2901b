"""The chat itself: prompt, transcript and status line around one conversation.

Knows: which conversation and which tip a question continues, what is typed ahead of it, the turn
that runs, ours or another client's, what each event of the client's thread means for the widgets.
Does not know: sockets, how a widget paints.
Invariant: a question always continues the tip shown at the end of the transcript; a conversation is
left only by the person's own key, never because a connection was lost. Of others' turns those are
shown that follow this tip: nothing shown ever gives way to another branch.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from textual import on, work
from textual.containers import Vertical
from textual.widgets import TextArea

from chatrt.client import ClientThread, ResponseRequest, TurnResult
from chatrt.client.batches import (
    ConnectionState,
    ConversationMade,
    OtherTurnBegan,
    OtherTurnDone,
    OtherTurnText,
    ThreadEvent,
    TurnDone,
    TurnEvent,
    TurnInterrupted,
    Watching,
)
from chatrt.errors import ChatrtError
from chatrt_tui import figures
from chatrt_tui.clean import clean_line
from chatrt_tui.connection import ServerBatch, client_for
from chatrt_tui.items import item_text, items_behind, newest_id, questions_of
from chatrt_tui.prompt import Prompt
from chatrt_tui.status import Banner, StatusLine
from chatrt_tui.transcript import AnswerView, Transcript
from chatrt_tui.turns import Conversation, OtherTurn, RunningTurn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from textual.app import ComposeResult

    from chatrt_tui.conversations import ConversationRow

TITLE_CHARS = 60
SHOWN_ITEMS = 200
_FOOTER_S = 0.1
_UNSENT = "will be sent when the server is back"
_WELCOME = "A new conversation. What would you like to know?"
_ASKED_ELSEWHERE = "(asked by another client; its words come with the end of the answer)"
_BRANCHED = "Another client goes on in a branch of its own, which is not shown here."


class Chat(Vertical):
    """One conversation at a time, over one connection."""

    DEFAULT_CSS = """
    Chat { height: 1fr; & > Prompt { margin: 0 1; } }
    """

    def __init__(
        self, url: str, api_key: str | None, *, model: str | None, typing_ahead: bool
    ) -> None:
        super().__init__()
        self.client: ClientThread = client_for(self, url, api_key)
        self.typing_ahead = typing_ahead
        self._model = model
        self._num_context: int | None = None
        self._conversation = Conversation()
        self._turn: RunningTurn | None = None
        self._other: OtherTurn | None = None
        self._num_turns = 0
        self._could_stop = False
        self._connection = ConnectionState("connecting", "connecting")

    @property
    def conversation_id(self) -> str | None:
        """The conversation shown, None before its first turn."""
        return self._conversation.id

    @property
    def answering(self) -> bool:
        """Whether a turn of ours runs."""
        return self._turn is not None

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield Banner()
        yield Transcript()
        yield StatusLine()
        yield Prompt()

    async def on_mount(self) -> None:
        """Paint first, connect then."""
        await self.query_one(Transcript).clear(_WELCOME)
        self.query_one(Prompt).focus()
        self._show_state()
        self.call_after_refresh(self.client.start)

    async def on_unmount(self) -> None:
        """End the client's thread."""
        await asyncio.to_thread(self.client.close)

    @on(Prompt.Submitted)
    async def ask(self, event: Prompt.Submitted) -> None:
        """Send the prompt as the next turn; it is on its way before anything is painted."""
        if self._other is not None:  # it began as Enter was pressed
            self.query_one(Prompt).give_back(event.text)
            self._say_not_now()
            return
        self._num_turns += 1
        title = clean_line(event.text)[:TITLE_CHARS]
        self.client.ask(self._num_turns, self._request(event.text), title=title)
        unsent = self._connection.kind in ("connecting", "lost")
        view = AnswerView()
        self._turn = RunningTurn(self._num_turns, event.text, view, unsent)
        transcript = self.query_one(Transcript)
        await transcript.add_turn(event.text, view)
        transcript.anchor()
        if unsent:
            view.tell(_UNSENT)
        self.query_one(StatusLine).show_figures("")  # they are the last turn's, not this one's
        self._show_state()

    def _request(self, text: str) -> ResponseRequest:
        here = self._conversation
        return ResponseRequest(
            input=text,
            model=self._model,
            previous_response_id=here.tip_id,
            conversation=None if here.tip_id else here.id,
            truncation="auto",
        )

    @on(TextArea.Changed)
    def _type_ahead(self) -> None:
        """Let the server read along; while an answer runs, what follows it cannot be computed."""
        text = self.query_one(Prompt).text.lstrip()
        is_free = self._turn is None and self._other is None
        if self.typing_ahead and is_free and text and not text.startswith("/"):
            self.client.type_ahead(self._request(self.query_one(Prompt).text))
        else:
            self.client.drop_typing()

    def toggle_typing_ahead(self) -> None:
        """Send what is typed before Enter from now on, or only then."""
        self.typing_ahead = not self.typing_ahead
        self._type_ahead()
        told = "on." if self.typing_ahead else "off: nothing is sent before Enter."
        self.notify(f"Typing ahead is {told}")

    @on(Prompt.NotNow)
    def _say_not_now(self) -> None:
        if self._other is None:
            told = "The answer is still coming. Esc stops it; your text stays here."
        else:
            told = "Another client is being answered here. Yours can follow; your text stays."
        self.notify(told)

    def stop(self) -> None:
        """Stop the answer that runs; its part stays, and so does the prompt."""
        if self._turn is not None:
            self.client.stop(self._turn.id)
            self._turn.stopping = True
            self._show_state()

    async def start_new(self) -> None:
        """Leave this conversation and begin another."""
        self._leave()
        await self.query_one(Transcript).clear(_WELCOME)
        self.query_one(StatusLine).show_figures("")
        self._show_state()
        self._type_ahead()

    def open(self, row: ConversationRow) -> None:
        """Show an old conversation, to go on with it."""
        if row.id != self._conversation.id:
            self._fetch(row)

    @work(exclusive=True, group="open")
    async def _fetch(self, row: ConversationRow) -> None:
        try:
            items = await self.client.http.items(row.id)
        except ChatrtError as error:
            self.notify(clean_line(error.message), severity="error", markup=False)
            return
        # Back on this widget's own queue, so that no turn begins or ends in between.
        self.call_later(self._show_old, row, items)

    async def _show_old(self, row: ConversationRow, items: list[dict[str, Any]]) -> None:
        self._leave()
        self._conversation = Conversation(row.id, newest_id(items) or row.last_response_id)
        transcript = self.query_one(Transcript)
        await transcript.clear()
        if len(items) > SHOWN_ITEMS:
            await transcript.add_note(f"{len(items) - SHOWN_ITEMS} earlier messages not shown")
        for item in items[-SHOWN_ITEMS:]:
            await self._show_item(transcript, item)
        self.query_one(StatusLine).show_figures("")
        self.client.watch(row.id)
        self._show_state()
        self._type_ahead()

    async def _show_item(self, transcript: Transcript, item: Mapping[str, Any]) -> None:
        text = item_text(item)
        self._conversation.shown_ids.add(str(item.get("response_id")))
        if item.get("role") == "user":
            self.query_one(Prompt).remember(text)
            await transcript.add_question(text)
        elif item.get("role") == "assistant":
            view = await transcript.add_answer(AnswerView())
            await view.append(text)
            await view.finish_old(stopped=item.get("status") == "incomplete")

    def _leave(self) -> None:
        if self._turn is not None:
            what = "question was not sent" if self._turn.unsent else "answer was stopped"
            self.notify(f"You left: the {what}.")
        self.stop()
        self._turn = self._other = None
        self.client.watch(None)
        self.query_one(Prompt).allow_sending()
        self._conversation = Conversation()

    @on(ServerBatch)
    async def _take_batch(self, batch: ServerBatch) -> None:
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
        match event:
            case TurnEvent(turn_id, inner) if inner.delta:
                return inner.delta if self._is_running(turn_id) else ""
            case OtherTurnText(response_id, text):
                return text if self._is_other(response_id) else ""
            case _:
                return None

    async def _take(self, event: ThreadEvent) -> None:
        match event:
            case ConnectionState():
                self._take_connection(event)
            case ConversationMade(turn_id, conversation_id) if self._is_running(turn_id):
                self._conversation.id = conversation_id
                self.client.watch(conversation_id)
            case TurnInterrupted(turn_id) if self._turn is not None and self._is_running(turn_id):
                self._turn.cut_off = True
                self._show_state()
            case TurnDone(turn_id, result) if self._is_running(turn_id):
                await self._end_turn(result)
            case Watching(conversation_id, items) if conversation_id == self._conversation.id:
                await self._catch_up(items)
            case OtherTurnBegan(conversation_id) if conversation_id == self._conversation.id:
                await self._begin_other(event)
            case OtherTurnDone(response_id) if self._is_other(response_id):
                await self._end_other(event)
            case _:
                pass  # an event that paints nothing, or a turn that was left

    def _is_running(self, turn_id: int) -> bool:
        return self._turn is not None and self._turn.id == turn_id

    def _is_other(self, response_id: str) -> bool:
        return self._other is not None and self._other.response_id == response_id

    async def _append(self, text: str) -> None:
        growing = self._turn or self._other
        if text and growing is not None:
            await growing.view.append(text)

    async def _end_turn(self, result: TurnResult) -> None:
        turn, self._turn = self._turn, None
        assert turn is not None
        if not result.usable_as_parent:
            self.query_one(Prompt).give_back(turn.question)
        await self._finish(turn.view, result)

    async def _catch_up(self, items: Sequence[Mapping[str, Any]]) -> None:
        """Show what others asked while nothing was heard of them; what still runs comes again."""
        other, self._other = self._other, None
        if other is not None:
            await other.remove()
            self.query_one(Prompt).allow_sending()
        if self._turn is not None:
            return
        behind = items_behind(items, self._conversation.tip_id)
        if behind is None:
            await self._tell_of_branch()
        for item in behind or ():
            await self._show_item(self.query_one(Transcript), item)
        self._conversation.tip_id = newest_id(behind or ()) or self._conversation.tip_id
        self._show_state()
        self._type_ahead()

    async def _begin_other(self, event: OtherTurnBegan) -> None:
        here = self._conversation
        if event.response_id in here.shown_ids:
            return  # it was over before it was told
        if self._turn or self._other or not here.is_followed_by(event):
            await self._tell_of_branch()
            return
        transcript = self.query_one(Transcript)
        question = await transcript.add_question(_ASKED_ELSEWHERE)
        view = await transcript.add_answer(AnswerView())
        self._other = OtherTurn(event.response_id, question, view)
        self.query_one(Prompt).hold_sending()
        self.query_one(StatusLine).show_figures("")
        self._show_state()
        self._type_ahead()

    async def _end_other(self, event: OtherTurnDone) -> None:
        other, self._other = self._other, None
        assert other is not None
        questions = questions_of(event.items, event.response_id)
        if questions:
            self.query_one(Prompt).remember(*questions)
            other.question.show("\n\n".join(questions))
        await self._finish(other.view, event.result)

    async def _tell_of_branch(self) -> None:
        if not self._conversation.has_branched:
            self._conversation.has_branched = True
            await self.query_one(Transcript).add_note(_BRANCHED)

    async def _finish(self, view: AnswerView, result: TurnResult) -> None:
        """A turn has ended: the next question may follow it."""
        self.query_one(Prompt).allow_sending()
        self._conversation.go_on(result)
        # More than was streamed where the server kept what a lost connection did not bring.
        await view.append(result.text[view.num_received :])
        await view.finish(result)
        self.query_one(StatusLine).show_figures(figures.status(result, self._num_context))
        self._show_state()
        self._type_ahead()

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
                wait = f"trying again in {state.retry_in_s:.1f} s (attempt {state.attempt + 1})"
                banner.tell(f"{state.message}; {wait}")
            case "refused":
                banner.tell(state.message)
            case "connecting":
                pass  # a banner that is there stays until the connection is
        self._show_state()

    @work(exclusive=True, group="model")
    async def _read_model(self) -> None:
        try:
            models = await self.client.http.models()
        except ChatrtError:
            return  # the figures then go without the size of the context
        served = next((m for m in models if m.get("id") == self._model), None) or (
            models[0] if models else {}
        )
        self._num_context = served.get("max_context")
        self._model = self._model or served.get("id")
        self._show_state()

    def _show_state(self) -> None:
        is_connected = self._connection.kind == "connected"
        if self._turn is not None and (self._turn.cut_off or is_connected):
            text = self._turn.state
        elif self._other is not None and is_connected:
            text = "another client is being answered"
        elif is_connected:
            text = clean_line(self._model or "")
        else:
            text = "refused" if self._connection.kind == "refused" else "connecting …"
        # none where the server's answer comes while the screen is being taken down
        for line in self.query(StatusLine):
            line.show_state(text)
        if self.answering != self._could_stop:
            self._could_stop = self.answering
            # Not now: a footer is made anew, and the first text of an answer would wait for it.
            self.set_timer(_FOOTER_S, self.app.refresh_bindings)
