"""A scripted service: answers by a function of the request, without a model.

Knows: the server's interface, the wire's events. Does not know: sockets, tokens, torch.
Invariant: it keeps the service's contract (parents are checked, keys are apart, pause stops the
words, cancel ends the log), and records what it was told.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from chatrt.errors import NotFound
from chatrt.params import SamplingParams
from chatrt.wire.events import AnswerEvents, ResponseFields, Usage
from chatrt.wire.ids import new_conversation_id, new_response_id
from chatrt.wire.live import LiveFigures, LiveServer, LiveTurn, Sockets
from chatrt.wire.log import ResponseLog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatrt.server.service import CallContext, OnLog
    from chatrt.wire.messages import (
        ConversationCreate,
        ConversationSubscribe,
        ConversationUpdate,
        ResponseCreate,
    )

Script: TypeAlias = "Callable[[ResponseCreate], Sequence[str]]"
"""The deltas that answer a request. May raise a `ChatrtError`, which refuses it."""

MODEL = "scripted"


def echo_words(message: ResponseCreate) -> list[str]:
    """The words of the last message, each with the space before it."""
    words = message.input[-1].content.split(" ") if message.input else []
    return [word if index == 0 else f" {word}" for index, word in enumerate(words)]


@dataclass(slots=True)
class ScriptedResponse:
    """One response and what may be done to it while it runs."""

    message: ResponseCreate
    context: CallContext
    log: ResponseLog
    events: AnswerEvents
    parent_id: str | None
    unpaused: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Conversation:
    key_id: str
    body: dict[str, Any]
    viewers: list[tuple[str, OnLog]] = field(default_factory=list)


class ScriptedService:
    """Implements `chatrt.server.service.Service`.

    `delay_s` passes before each delta. `responses` are all that were created, in order; `paused`,
    `resumed`, `abandoned` the ids of those calls, in order. `figures`, if there are any, are what
    `live` tells.
    """

    def __init__(
        self,
        script: Script = echo_words,
        *,
        delay_s: float = 0.0,
        is_ready: bool = True,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.responses: dict[str, ScriptedResponse] = {}
        self.paused: list[str] = []
        self.resumed: list[str] = []
        self.left: list[str] = []
        self.abandoned: list[str] = []
        self.is_ready = is_ready
        self.figures: LiveFigures | None = None
        self._script = script
        self._delay_s = delay_s
        self._clock = clock
        self._conversations: dict[str, _Conversation] = {}
        self._typed_ahead: dict[str, ScriptedResponse] = {}

    async def create(self, message: ResponseCreate, context: CallContext) -> ResponseLog:
        """Begin an answer by the script."""
        parent_id = message.previous_response_id
        if parent_id is not None and not self._owns(parent_id, context.key_id):
            raise NotFound(
                f"no response {parent_id}",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        deltas = self._script(message) if message.generate else ()
        response = self._open(message, context)
        self.responses[response.log.response_id] = response
        self._supersede(response)
        if response.log.conversation_id is not None:
            self._tell_viewers(response)
        response.events.start()
        response.task = asyncio.create_task(self._answer(response, deltas))
        return response.log

    async def cancel(self, response_id: str, key_id: str) -> bool:
        """End a response after its current word."""
        response = self._find(response_id, key_id)
        running = not response.log.finished
        response.cancelled.set()
        response.unpaused.set()
        return running

    def find_log(self, response_id: str, key_id: str) -> ResponseLog:
        """The log of any response that was not deleted, however long ago it ended."""
        if not self._owns(response_id, key_id):
            raise NotFound(
                f"response {response_id} cannot be resumed",
                param="response_id",
                code="response_not_found",
            )
        return self.responses[response_id].log

    def pause(self, response_id: str) -> None:
        """Stop the words."""
        self.paused.append(response_id)
        self.responses[response_id].unpaused.clear()

    def resume(self, response_id: str) -> None:
        """Go on with the words."""
        self.resumed.append(response_id)
        self.responses[response_id].unpaused.set()

    def abandon(self, response_id: str) -> None:
        """End a response that nobody reads."""
        self.abandoned.append(response_id)
        self.responses[response_id].cancelled.set()
        self.responses[response_id].unpaused.set()

    def leave(self, lane_key: str) -> None:
        """Remember that the lane's connection is gone."""
        self.left.append(lane_key)

    async def response(self, response_id: str, key_id: str) -> dict[str, Any]:
        """The response object."""
        return self._find(response_id, key_id).events.snapshot()

    async def delete_response(self, response_id: str, key_id: str) -> None:
        """Forget a response."""
        self._find(response_id, key_id)
        del self.responses[response_id]

    async def conversation_create(
        self, message: ConversationCreate, context: CallContext
    ) -> dict[str, Any]:
        """A new, empty conversation."""
        conversation_id = new_conversation_id()
        body = {
            "id": conversation_id,
            "title": message.title,
            "created_at": int(time.time()),
            "updated_at": int(time.time()),
            "num_turns": 0,
            "last_response_id": None,
        }
        self._conversations[conversation_id] = _Conversation(context.key_id, body)
        return dict(body)

    async def conversation_update(
        self, message: ConversationUpdate, context: CallContext
    ) -> dict[str, Any]:
        """Set the title."""
        conversation = self._conversation(message.id, context.key_id)
        conversation.body["title"] = message.title
        return dict(conversation.body)

    async def conversation_subscribe(
        self, message: ConversationSubscribe, context: CallContext, on_log: OnLog
    ) -> Callable[[], None]:
        """View a conversation."""
        conversation = self._conversation(message.id, context.key_id)
        viewer = (context.connection_id, on_log)
        conversation.viewers.append(viewer)
        for response in self.responses.values():
            ours = response.context.connection_id == context.connection_id
            log = response.log
            if log.conversation_id == message.id and not log.finished and not ours:
                on_log(log)
        return lambda: conversation.viewers.remove(viewer)

    async def conversation_delete(self, conversation_id: str, key_id: str) -> None:
        """Forget a conversation and its responses."""
        self._conversation(conversation_id, key_id)
        del self._conversations[conversation_id]
        for response in self._turns(conversation_id):
            del self.responses[response.log.response_id]

    async def conversation_items(self, conversation_id: str, key_id: str) -> list[dict[str, Any]]:
        """Inputs and outputs of all its responses, in order."""
        turns = await self.conversation_turns(conversation_id, key_id)
        return [item for turn in turns for item in (*turn["input"], *turn["output"])]

    async def conversation_turns(self, conversation_id: str, key_id: str) -> list[dict[str, Any]]:
        """All its responses that have ended, in order."""
        self._conversation(conversation_id, key_id)
        turns = [r for r in self._turns(conversation_id) if not r.message.partial]
        bodies = [_turn_body(response) for response in turns]
        return [body for body in bodies if body["status"] != "in_progress"]

    async def conversation_list(self, query: str | None, key_id: str) -> list[dict[str, Any]]:
        """Conversations of the key whose title holds `query`, newest first."""
        found = [c.body for c in self._conversations.values() if c.key_id == key_id]
        if query is not None:
            found = [body for body in found if query in (body["title"] or "")]
        return found[::-1]

    def ready(self) -> bool:
        """What `is_ready` says."""
        return self.is_ready

    def models(self) -> list[dict[str, Any]]:
        """The one model."""
        return [{"id": MODEL, "object": "model", "created": 0, "owned_by": "chatrt"}]

    async def live(self, key_id: str, sockets: Sockets) -> LiveFigures:
        """What `figures` say, or the key's responses that run."""
        if self.figures is not None:
            return self.figures
        running = [r.log for r in self.responses.values() if not r.log.finished]
        turns = tuple(LiveTurn(response_id=r.response_id) for r in running if r.key_id == key_id)
        server = LiveServer(model=MODEL, num_running=len(running), sockets=sockets)
        return LiveFigures(server=server, turns=turns)

    async def metrics(self, sockets: Sockets) -> bytes:
        """One counter."""
        return f"chatrt_responses_total {len(self.responses)}\n".encode()

    async def _answer(self, response: ScriptedResponse, deltas: Sequence[str]) -> None:
        num_sent = 0
        response.unpaused.set()
        for text in deltas:
            await asyncio.sleep(self._delay_s)
            await response.unpaused.wait()
            if response.cancelled.is_set():
                break
            response.events.delta(text)
            num_sent += 1
        usage = Usage(input_tokens=len(response.message.input), output_tokens=num_sent)
        self._count(response)
        events, figures = response.events, self._figures(response)
        if response.cancelled.is_set() and num_sent < max(len(deltas), 1):
            events.cancelled(usage, figures)
        else:
            events.complete(usage, figures)

    def _figures(self, response: ScriptedResponse) -> Callable[[int | None], dict[str, Any]]:
        received_ns = response.context.received_ns

        def figures(first_sent_ns: int | None) -> dict[str, Any]:
            ttft_ms = None if first_sent_ns is None else (first_sent_ns - received_ns) / 1e6
            clock = {"received_ns": received_ns, "first_sent_ns": first_sent_ns}
            return {"ttft_ms": ttft_ms, "stages": {"send_ms": ttft_ms}, "clock": clock}

        return figures

    def _open(self, message: ResponseCreate, context: CallContext) -> ScriptedResponse:
        parent_id = message.previous_response_id
        conversation_id = message.conversation
        if parent_id is not None:
            conversation_id = self.responses[parent_id].log.conversation_id
        elif conversation_id is not None:
            self._conversation(conversation_id, context.key_id)
        log = ResponseLog(new_response_id(), context.key_id, conversation_id)
        fields = ResponseFields.of(
            message,
            message.sampling(SamplingParams()),
            model=message.model or MODEL,
            created_at=int(time.time()),
            conversation_id=conversation_id,
        )
        events = AnswerEvents(log, fields, generates=message.generate)
        return ScriptedResponse(message, context, log, events, parent_id)

    def _supersede(self, response: ScriptedResponse) -> None:
        before = self._typed_ahead.pop(response.context.lane_key, None)
        if before is not None:
            before.cancelled.set()
        if response.message.partial:
            self._typed_ahead[response.context.lane_key] = response

    def _tell_viewers(self, response: ScriptedResponse) -> None:
        assert response.log.conversation_id is not None
        conversation = self._conversations[response.log.conversation_id]
        for connection_id, on_log in tuple(conversation.viewers):
            if connection_id != response.context.connection_id:
                on_log(response.log)

    def _count(self, response: ScriptedResponse) -> None:
        """A turn ended: its conversation has one more, unless that was deleted meanwhile."""
        conversation = self._conversations.get(response.log.conversation_id or "")
        if conversation is not None and not response.message.partial:
            conversation.body["num_turns"] += 1
            conversation.body["last_response_id"] = response.log.response_id

    def _turns(self, conversation_id: str) -> list[ScriptedResponse]:
        return [r for r in self.responses.values() if r.log.conversation_id == conversation_id]

    def _owns(self, response_id: str, key_id: str) -> bool:
        response = self.responses.get(response_id)
        return response is not None and response.log.key_id == key_id

    def _find(self, response_id: str, key_id: str) -> ScriptedResponse:
        if not self._owns(response_id, key_id):
            raise NotFound(f"no response {response_id}", param="response_id")
        return self.responses[response_id]

    def _conversation(self, conversation_id: str, key_id: str) -> _Conversation:
        conversation = self._conversations.get(conversation_id)
        if conversation is None or conversation.key_id != key_id:
            raise NotFound(f"no conversation {conversation_id}", param="conversation")
        return conversation


def _turn_body(response: ScriptedResponse) -> dict[str, Any]:
    response_id, asked = response.log.response_id, []
    for index, entry in enumerate(response.message.input):
        part = {"type": "input_text", "text": entry.content}
        item = {"type": "message", "role": entry.role, "content": [part]}
        asked.append({"id": f"{response_id}_{index}", **item})
    snapshot = response.events.snapshot()
    return {
        "id": response_id,
        "previous_response_id": response.parent_id,
        "created_at": snapshot["created_at"],
        "status": snapshot["status"],
        "input": asked,
        "output": snapshot["output"],
    }
