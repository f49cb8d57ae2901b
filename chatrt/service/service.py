"""The real service behind the server: requests to turns, events to logs, turns to the store.

Knows: the engine's host, the history, the prompt planner, running answers.
Does not know: sockets and frames; tensors.
Invariant: a turn is stored (or known to be unstorable, and said so) before its terminal event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from chatrt.errors import ChatrtError, InvalidValue, NotFound, StoreError
from chatrt.service.answer import Answer
from chatrt.service.conversations import Conversations
from chatrt.service.history import History
from chatrt.service.live import LiveBoard
from chatrt.service.measured import Measured
from chatrt.service.placing import place
from chatrt.service.prompts import PromptPlanner
from chatrt.service.recent import RecentLogs
from chatrt.service.requests import RequestReader, num_drafts
from chatrt.service.responses import stored_response
from chatrt.service.upkeep import Upkeep
from chatrt.text.prompt import PromptBuilder
from chatrt.turn import FinishedEvent, FinishReason, Stamps, TurnKind, TurnRequest
from chatrt.wire.events import ResponseFields
from chatrt.wire.ids import new_response_id
from chatrt.wire.log import ResponseLog

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from chatrt.archive import Archive
    from chatrt.host import EngineHost
    from chatrt.metrics import Metrics
    from chatrt.server.service import CallContext, OnLog
    from chatrt.service.prompts import Ask, PlannedPrompt
    from chatrt.service.requests import ServiceSettings
    from chatrt.store import Store, StoredTurn
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.wire.live import LiveFigures, Sockets
    from chatrt.wire.messages import (
        ConversationCreate,
        ConversationSubscribe,
        ConversationUpdate,
        ResponseCreate,
    )

_log = logging.getLogger(__name__)
_INLINE_CHARS = 4096  # longer prompts are tokenised off the event loop


class ChatService:
    """Implements `chatrt.server.service.Service`.

    `store` None keeps nothing on disk because nobody wants it; an error there says why nothing can
    be kept, which each turn then reports. `archive` is where KV pages are kept that left the
    device.
    """

    def __init__(
        self,
        host: EngineHost,
        tokenizer: Tokenizer,
        store: Store | StoreError | None,
        metrics: Metrics,
        settings: ServiceSettings,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
        now: Callable[[], float] = time.time,
        archive: Archive | None = None,
    ) -> None:
        self._host = host
        self._tokenizer = tokenizer
        self._unstorable = store if isinstance(store, StoreError) else None
        self._store = None if isinstance(store, StoreError) else store
        self._settings = settings
        self._clock = clock
        self._now = now
        self._requests = RequestReader(settings, tokenizer.vocab_size)
        self._builder = PromptBuilder(tokenizer)
        self._planner = PromptPlanner(
            self._builder, model=settings.model, max_context=settings.max_context
        )
        self._history = History(self._store)
        self._archive = archive
        self._upkeep = Upkeep(host, self._planner, self._history, archive)
        self._live = LiveBoard(settings.model, host, archive, clock=clock)
        self._measured = Measured(metrics, host, archive, clock)
        self._on_gap = metrics.on_gap
        self._answers: dict[str, Answer] = {}
        self._recent = RecentLogs(window_s=settings.resume_window_s)
        self._conversations = Conversations(self._store, self._history, now=now)
        self._tasks: set[asyncio.Task[None]] = set()

    # Turns ---------------------------------------------------------------------------------------

    async def create(self, message: ResponseCreate, context: CallContext) -> ResponseLog:
        """Begin a turn; returns as soon as its log exists, events follow in the log."""
        self._requests.check_model(message.model)
        sampling = self._requests.sampling(message)
        conversation_id, chain = await place(
            message, context.key_id, self._conversations, self._history, self._answers.values()
        )
        ask = self._requests.ask(message, sampling)
        planned = await self._plan(ask, chain)
        response_id = new_response_id()
        request = TurnRequest(
            response_id=response_id,
            kind=ask.kind,
            token_ids=planned.token_ids,
            num_history=planned.num_history,
            sampling=sampling,
            parent_id=planned.tip_id,
            salt=self._salt(context.key_id),
            owner=context.key_id,
            priority=message.chatrt.priority,
            typed_ahead_key=context.lane_key,
            speculation_tokens=num_drafts(message),
            archived=message.store and self._store is not None,
            pin_ms=message.chatrt.pin_s * 1e3,
            stamps=Stamps(received_ns=context.received_ns, tokenized_ns=self._clock()),
        )
        fields = ResponseFields.of(
            message,
            sampling,
            model=self._settings.model,
            created_at=int(self._now()),
            conversation_id=conversation_id,
        )
        answer = Answer(
            request=request,
            planned=planned,
            fields=fields,
            log=ResponseLog(response_id, context.key_id, conversation_id, self._on_gap),
            tokenizer=self._tokenizer,
            token_timing=message.chatrt.timing == "token",
            on_finished=self._finished,
            builder=self._builder,
        )
        self._answers[response_id] = answer
        answer.events.start()
        if ask.kind is not TurnKind.TYPED_AHEAD:
            self._conversations.announce(answer.log, context.connection_id)
        self._host.submit(request, answer.on_event)
        return answer.log

    async def cancel(self, response_id: str, key_id: str) -> bool:
        """Ask a running response to end; False if it had ended already."""
        answer = self._answers.get(response_id)
        if answer is None or answer.log.key_id != key_id:
            if self._recent.response(response_id, key_id) is None:
                await self._history.turn(response_id, key_id)
            return False
        self._measured.cancelling(self._answers.get(response_id))
        return await self._host.call(lambda engine: engine.cancel(response_id))

    def find_log(self, response_id: str, key_id: str) -> ResponseLog:
        """The log of a response that runs or ended a moment ago."""
        answer = self._answers.get(response_id)
        if answer is not None and answer.log.key_id == key_id:
            return answer.log
        return self._recent.find(response_id, key_id)

    def pause(self, response_id: str) -> None:
        """The client lags: decode no further."""
        self._host.post(lambda engine: engine.pause(response_id))

    def resume(self, response_id: str) -> None:
        """The client caught up."""
        self._host.post(lambda engine: engine.resume(response_id))

    def abandon(self, response_id: str) -> None:
        """Nobody reads this response any more: cancel it."""
        self._measured.cancelling(self._answers.get(response_id))
        self._host.post(lambda engine: engine.cancel(response_id))

    def leave(self, lane_key: str) -> None:
        """The lane's connection is gone: drop what was typed ahead on it."""
        self._host.post(lambda engine: engine.drop_lane(lane_key))

    async def response(self, response_id: str, key_id: str) -> dict[str, Any]:
        """The response object, running or stored."""
        answer = self._answers.get(response_id)
        if answer is not None and answer.log.key_id == key_id:
            return answer.events.snapshot()
        recent = self._recent.response(response_id, key_id)
        return recent or stored_response(await self._history.turn(response_id, key_id))

    async def delete_response(self, response_id: str, key_id: str) -> None:
        """Forget a response: its text, its ids, its KV pages with those of turns that build on it.

        These can be read but not continued from now on, and their pages spell the deleted text.
        Those that are being answered end as cancelled.
        """
        await self._end({response_id}, key_id)
        self._live.forget(response_id, key_id)
        recent = self._recent.response(response_id, key_id)
        if recent is not None:
            self._recent.forget([response_id])
            if recent["status"] == "failed":
                return  # no history ever had it
        turn = await self._history.turn(response_id, key_id)
        wiped = {response_id, *await self._history.descendants(response_id, key_id)}
        if await self._end(wiped, key_id):
            wiped.update(await self._history.descendants(response_id, key_id))
        sequences = await self._upkeep.sequences(wiped, key_id, self._salt(key_id))
        if self._store is not None and await self._history.is_on_disk(response_id, key_id):
            await asyncio.wrap_future(self._store.delete_turn(response_id, key_id))
        self._history.forget([response_id])
        self._history.keep_own(wiped)
        await self._conversations.deleted(turn)
        await self._upkeep.wipe(sorted(wiped), sequences)

    async def _end(self, response_ids: Collection[str], key_id: str) -> bool:
        """Cancel what runs of these responses, or builds on one; when all is over, if any did."""
        ended = False
        for answer in list(self._answers.values()):
            about = {answer.log.response_id, answer.planned.parent_id, answer.planned.tip_id}
            if answer.log.key_id == key_id and not about.isdisjoint(response_ids):
                self.abandon(answer.log.response_id)
                await answer.log_closed.wait()
                ended = True
        return ended

    # Conversations -------------------------------------------------------------------------------

    async def conversation_create(
        self, message: ConversationCreate, context: CallContext
    ) -> dict[str, Any]:
        """A new conversation."""
        return await self._conversations.create(message.title, context.key_id)

    async def conversation_update(
        self, message: ConversationUpdate, context: CallContext
    ) -> dict[str, Any]:
        """The conversation with its new title."""
        return await self._conversations.rename(message.id, message.title, context.key_id)

    async def conversation_subscribe(
        self, message: ConversationSubscribe, context: CallContext, on_log: OnLog
    ) -> Callable[[], None]:
        """Call `on_log` for each response of the conversation; returns what ends that."""

        def running() -> list[ResponseLog]:
            return [
                answer.log
                for answer in self._answers.values()
                if answer.log.conversation_id == message.id
                and answer.request.kind is not TurnKind.TYPED_AHEAD
            ]

        return await self._conversations.subscribe(
            message.id, context.key_id, context.connection_id, on_log, running
        )

    async def conversation_delete(self, conversation_id: str, key_id: str) -> None:
        """Forget a conversation with all its turns; a running response of it is cancelled."""
        await self._conversations.require(conversation_id, key_id)
        running = [a for a in self._answers.values() if a.log.conversation_id == conversation_id]
        for answer in running:
            self.abandon(answer.log.response_id)
            await answer.log_closed.wait()
        turn_ids = await self._conversations.turn_ids(conversation_id, key_id)
        sequences = await self._upkeep.sequences(turn_ids, key_id, self._salt(key_id))
        response_ids = await self._conversations.delete(conversation_id, key_id)
        self._recent.forget_conversation(conversation_id)
        self._live.forget(conversation_id, key_id)
        await self._upkeep.wipe(response_ids, sequences)

    async def conversation_items(self, conversation_id: str, key_id: str) -> list[dict[str, Any]]:
        """The messages along the newest branch, oldest first."""
        return await self._conversations.items(conversation_id, key_id)

    async def conversation_turns(self, conversation_id: str, key_id: str) -> list[dict[str, Any]]:
        """All turns of all branches, the oldest first, each with the turn that it follows."""
        return await self._conversations.turns(conversation_id, key_id)

    async def conversation_list(self, query: str | None, key_id: str) -> list[dict[str, Any]]:
        """Conversations, newest first."""
        return await self._conversations.listed(query, key_id)

    async def close(self) -> None:
        """Wait for turns that are being stored, then close the store."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    # The server's own ----------------------------------------------------------------------------

    def ready(self) -> bool:
        """A service exists only once the model is loaded and warm."""
        return True

    def models(self) -> list[dict[str, Any]]:
        """The one model that is served, with the context that it holds."""
        return self._requests.models()

    async def metrics(self, sockets: Sockets) -> bytes:
        """Metrics in Prometheus' text format."""
        return await self._measured.text(sockets)

    async def live(self, key_id: str, sockets: Sockets) -> LiveFigures:
        """What runs now and ended a moment ago; turns of this key only."""
        return await self._live.read(key_id, self._answers.values(), sockets)

    # Steps of a turn -----------------------------------------------------------------------------

    async def _plan(self, ask: Ask, chain: Sequence[StoredTurn]) -> PlannedPrompt:
        if self._planner.num_chars(ask, chain) <= _INLINE_CHARS:
            planned = self._planner.plan(ask, chain)
        else:
            planned = await asyncio.to_thread(self._planner.plan, ask, chain)
        limit = self._settings.max_input_tokens
        if limit is not None and len(planned.token_ids) > limit:
            raise InvalidValue(
                f"the input has {len(planned.token_ids)} tokens, this server takes {limit}",
                param="input",
            )
        return planned

    def _salt(self, key_id: str) -> str:
        """Separates the KV pages of keys, unless they share prefixes."""
        return "" if self._settings.share_prefixes else key_id

    def _finished(self, answer: Answer, event: FinishedEvent) -> None:
        task = asyncio.ensure_future(self._close(answer, event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self, answer: Answer, event: FinishedEvent) -> None:
        """Keep the turn, then say that it ended."""
        store_error = None
        try:
            if event.reason is not FinishReason.FAILED and (
                answer.request.kind is not TurnKind.TYPED_AHEAD
            ):
                store_error = await self._keep(answer, event)
            self._measured.ended(answer, event)
        finally:
            answer.close(event, store_error=store_error)
            del self._answers[answer.request.response_id]
            # Of a half-typed prompt nobody asks again, and a deleted conversation has no answers.
            if answer.request.kind is not TurnKind.TYPED_AHEAD and not isinstance(
                store_error, NotFound
            ):
                self._recent.keep(answer.log)
                self._live.ended(answer, event)
            answer.log_closed.set()
        if answer.turn is not None:
            await self._upkeep.prepare(answer.turn, salt=answer.request.salt)

    async def _keep(self, answer: Answer, event: FinishedEvent) -> ChatrtError | None:
        turn = answer.stored(event)
        wanted = self._store is not None and answer.fields.store
        parent_id, key_id = turn.parent_id, turn.key_id
        if (
            wanted
            and parent_id is not None
            and not (await self._history.is_on_disk(parent_id, key_id))
        ):
            turn = answer.stored_whole(event, await self._history.known_chain(parent_id, key_id))
        self._history.add(turn, on_disk=False)
        self._conversations.ended(turn)
        answer.turn = turn
        try:
            if parent_id is not None:
                await self._history.turn(parent_id, key_id)
            if wanted and self._store is not None:
                await asyncio.wrap_future(self._store.save_turn(turn))
                self._history.add(turn, on_disk=True)
            elif turn.conversation_id is not None:
                await self._conversations.require(turn.conversation_id, key_id)
        except NotFound as error:  # the conversation or the turn before was deleted: so is this one
            answer.turn = None
            self._history.forget([turn.response_id])
            await self._conversations.deleted(turn)
            ids = [*answer.request.token_ids, *event.output_ids]
            await self._upkeep.wipe([turn.response_id], [(answer.request.salt, ids)])
            return error
        except ChatrtError as error:
            _log.warning("a turn is kept in memory only: %s", error)
            return error
        return self._unstorable if answer.fields.store else None
