"""One WebSocket connection: one reader, one writer, and the lanes between them.

Knows: frames, lanes, the service's interface. Does not know: models, tokens, other connections.
Invariant: a bad request closes nothing and touches no other; the reader never waits for an answer;
when the client is gone, each running response that nobody else reads gets its grace, but those that
nobody could resume (half-typed prompts, and what has no id at the client yet) are dropped at once.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from chatrt.errors import ChatrtError, Conflict, Overloaded, ServerUnavailable
from chatrt.server.frames import Rejected, decode_frame
from chatrt.server.lanes import Lane, Lanes, Resumed, Waiting
from chatrt.server.outbox import Outbox
from chatrt.server.service import CallContext, Service
from chatrt.wire.encode import encode
from chatrt.wire.errors import error_event, internal_error
from chatrt.wire.messages import (
    ClientMessage,
    ConversationCreate,
    ConversationMessage,
    ConversationSubscribe,
    ConversationUnsubscribe,
    ConversationUpdate,
    ResponseCancel,
    ResponseCreate,
    ResponseResume,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from websockets.asyncio.server import ServerConnection

    from chatrt.server.grace import Graces
    from chatrt.server.settings import ServerSettings
    from chatrt.wire.encode import Event
    from chatrt.wire.log import ResponseLog

logger = logging.getLogger(__name__)

_LARGE_FRAME_BYTES = 64 * 2**10  # decoding more than this would hold up the other connections


@dataclass(frozen=True, slots=True)
class Peer:
    """Whose connection it is; `model` is what its URL names, for creates that name none."""

    connection_id: str
    key_id: str
    model: str | None = None


class Connection:
    """Serves one open socket. `clock` gives nanoseconds."""

    def __init__(
        self,
        socket: ServerConnection,
        service: Service,
        settings: ServerSettings,
        peer: Peer,
        graces: Graces,
        clock: Callable[[], int],
    ) -> None:
        self._socket = socket
        self._service = service
        self._settings = settings
        self._peer = peer
        self._graces = graces
        self._clock = clock
        self._outbox = Outbox(service, settings.outbox_bytes)
        self._lanes = Lanes(
            self, max_names=settings.max_lanes, max_queued=settings.max_queued_per_lane
        )
        self._active = asyncio.Semaphore(settings.max_active_lanes)
        self._viewed: dict[str, Callable[[], None]] = {}
        self._half_typed: set[str] = set()  # responses that are only ever of use here
        self._draining = False
        self._closed = False

    @property
    def key_id(self) -> str:
        """Whose connection it is."""
        return self._peer.key_id

    @property
    def outbox_bytes(self) -> int:
        """Approximate bytes that wait to be sent."""
        return self._outbox.pending_bytes

    async def run(self) -> None:
        """Serve until the socket closes; then leave the responses as the grace period says."""
        reader, writer = asyncio.create_task(self._read()), asyncio.create_task(self._write())
        tasks = (reader, writer)
        try:
            # A reader that waits for room in the outbox does not see the socket close: the writer
            # does, and either one's end is the connection's.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await self._leave()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not reader.cancelled():
            reader.result()

    async def drain(self) -> None:
        """Refuse new turns from now on; returns when the running ones are sent."""
        self._draining = True
        workers = [lane.worker for lane in self._lanes if lane.worker is not None]
        if workers:
            await asyncio.wait(workers)
        await self._outbox.empty()

    async def close(self, code: int, reason: str) -> None:
        """Close the socket."""
        await self._socket.close(code, reason)

    async def answer(self, lane: Lane, waiting: Waiting) -> None:
        """Create the response and return when its last event was sent (`LaneHost`)."""
        holds_slot = await self._wait_for_slot(lane)
        try:
            log = await self._create(lane, waiting)
            if log is None:
                return
            sent = asyncio.Event()
            self._attach(log, lane.stream_id, sent.set)
            await self._until_sent(lane, Resumed(log, sent))
        finally:
            if holds_slot:
                self._active.release()

    async def follow(self, lane: Lane, resumed: Resumed) -> None:
        """Return when the last event of a resumed response was sent (`LaneHost`).

        It takes one of the active slots if there is one, but runs on for want of it.
        """
        holds_slot = not self._active.locked() and await self._active.acquire()
        try:
            await self._until_sent(lane, resumed)
        finally:
            if holds_slot:
                self._active.release()

    async def prefill(self, lane: Lane, waiting: Waiting) -> None:
        """Create a typed-ahead response and return at once (`LaneHost`)."""
        generation = lane.generation
        log = await self._create(lane, waiting)
        if log is None:
            return
        response_id = log.response_id
        self._half_typed.add(response_id)
        self._attach(log, lane.stream_id, lambda: self._half_typed.discard(response_id))
        if lane.generation != generation:  # the real turn overtook it
            await self._cancel(log.response_id, lane.stream_id)

    def refuse(self, lane: Lane, error: ChatrtError) -> None:
        """Tell the client that a create was refused (`LaneHost`)."""
        self._outbox.reply(error_event(error, lane.stream_id))

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._socket.recv(decode=False)
                received_ns = self._clock()
                await self._outbox.room()
                await self._handle(frame, received_ns)
        except ConnectionClosed as closed:
            code = closed.rcvd.code if closed.rcvd is not None else None
            logger.debug("connection %s: close code %s", self._peer.connection_id, code)

    async def _handle(self, frame: bytes, received_ns: int) -> None:
        decode = partial(decode_frame, frame, self._settings.wire)
        large = len(frame) > _LARGE_FRAME_BYTES
        message = await asyncio.to_thread(decode) if large else decode()
        try:
            await self._dispatch(message, received_ns)
        except ChatrtError as error:
            self._outbox.reply(error_event(error, message.stream_id))
        except Exception as error:
            self._report(error)
            self._outbox.reply(error_event(internal_error(), message.stream_id))

    async def _dispatch(self, message: ClientMessage | Rejected, received_ns: int) -> None:
        match message:
            case ResponseCreate():
                waiting = Waiting(self._with_model(message), received_ns)
                lane = self._lanes.open(message.stream_id)
                if message.partial:
                    lane.type_ahead(waiting)
                else:
                    lane.submit(waiting)
            case ResponseCancel():
                await self._cancel_asked(message)
            case ResponseResume():
                self._resume(message)
            case Rejected(is_create=True):
                self._lanes.open(message.stream_id).submit(message.error)
            case Rejected():
                raise message.error
            case _:
                await self._conversation(message, received_ns)

    async def _conversation(self, message: ConversationMessage, received_ns: int) -> None:
        context = self._context(message.stream_id, received_ns)
        match message:
            case ConversationCreate():
                made = await self._service.conversation_create(message, context)
                reply: Event = {"type": "chatrt.conversation.created", "conversation": made}
            case ConversationUpdate():
                made = await self._service.conversation_update(message, context)
                reply = {"type": "chatrt.conversation.updated", "conversation": made}
            case ConversationSubscribe():
                await self._view(message, context)
                reply = {"type": "chatrt.conversation.subscribed", "id": message.id}
            case ConversationUnsubscribe():
                self._viewed.pop(message.id, lambda: None)()
                reply = {"type": "chatrt.conversation.unsubscribed", "id": message.id}
        if message.stream_id is not None:
            reply["stream_id"] = message.stream_id
        self._outbox.reply(reply)

    async def _view(self, message: ConversationSubscribe, context: CallContext) -> None:
        limit = self._settings.max_subscriptions
        if message.id not in self._viewed and len(self._viewed) >= limit:
            raise Overloaded(
                f"this connection views {len(self._viewed)} conversations, at most {limit} may be"
            )

        def on_log(log: ResponseLog) -> None:
            if not self._outbox.sends(log):
                self._attach(log, message.stream_id, lambda: None)

        stop = await self._service.conversation_subscribe(message, context, on_log)
        before = self._viewed.pop(message.id, None)
        if before is not None:
            before()
        self._viewed[message.id] = stop

    def _resume(self, message: ResponseResume) -> None:
        """Send a response of before on a lane; nothing waits between the checks and the start."""
        log = self._service.find_log(message.response_id, self._peer.key_id)
        after = message.after_sequence_number
        if after is not None:
            log.check_number(after)
        if self._outbox.sends(log):
            raise Conflict(
                f"this connection receives response {log.response_id} already",
                param="response_id",
            )
        sent = asyncio.Event()
        self._lanes.open(message.stream_id).follow(Resumed(log, sent))
        self._outbox.attach(log, stream_id=message.stream_id, on_sent=sent.set, after=after)

    async def _create(self, lane: Lane, waiting: Waiting) -> ResponseLog | None:
        """The new response's log; None if it was refused, which the client is told."""
        if self._closed:
            return None
        context = self._context(lane.stream_id, waiting.received_ns)
        refused: ChatrtError
        try:
            if self._draining:
                raise ServerUnavailable("the server is shutting down")
            return await self._service.create(waiting.message, context)
        except ChatrtError as error:
            refused = error
        except Exception as error:
            self._report(error)
            refused = internal_error()
        self._outbox.reply(error_event(refused, lane.stream_id, partial=waiting.message.partial))
        return None

    async def _cancel_asked(self, message: ResponseCancel) -> None:
        if message.response_id is not None:
            await self._service.cancel(message.response_id, self._peer.key_id)
            return
        lane = self._lanes.find(message.stream_id)
        if lane is None or lane.worker is None:
            return  # it ended while the cancel was on its way
        if lane.log is None:
            lane.cancel_asked.set()  # its log does not exist yet
        else:
            await self._service.cancel(lane.log.response_id, self._peer.key_id)

    async def _until_sent(self, lane: Lane, resumed: Resumed) -> None:
        """Wait for the end of what the lane sends, which a cancel of the lane means until then."""
        lane.log = resumed.log
        if lane.cancel_asked.is_set():
            await self._cancel(resumed.log.response_id, lane.stream_id)
        await resumed.sent.wait()
        lane.log = None

    async def _wait_for_slot(self, lane: Lane) -> bool:
        """Take one of the active slots; False when the lane was cancelled before there was one."""
        if not self._active.locked():
            return await self._active.acquire()
        slot = asyncio.ensure_future(self._active.acquire())
        cancelled = asyncio.ensure_future(lane.cancel_asked.wait())
        try:
            await asyncio.wait((slot, cancelled), return_when=asyncio.FIRST_COMPLETED)
        finally:
            cancelled.cancel()
            if not slot.done():
                slot.cancel()
        return slot.done() and not slot.cancelled()

    async def _cancel(self, response_id: str, stream_id: str | None) -> None:
        try:
            await self._service.cancel(response_id, self._peer.key_id)
        except ChatrtError as error:
            self._outbox.reply(error_event(error, stream_id))
        except Exception as error:
            self._report(error)

    def _attach(self, log: ResponseLog, stream_id: str | None, on_sent: Callable[[], None]) -> None:
        if self._closed:  # the client left while the response was being created
            self._graces.drop(log)
            on_sent()
        else:
            self._outbox.attach(log, stream_id=stream_id, on_sent=on_sent)

    async def _write(self) -> None:
        try:
            while True:
                outgoing = self._outbox.next()
                if outgoing is None:
                    await self._outbox.changed()
                    continue
                frame = encode(outgoing.event)
                handed_ns = self._clock()  # a send that returns late is not the server's time
                async with asyncio.timeout(self._settings.slow_client_s):
                    await self._socket.send(frame, text=True)
                self._outbox.sent(outgoing, handed_ns)
        except ConnectionClosed:
            pass  # as the reader's: the connection ends
        except TimeoutError:
            logger.info("connection %s takes no data, closing", self._peer.connection_id)
            await self._socket.close(CloseCode.TRY_AGAIN_LATER, "the client reads too slowly")
        except Exception as error:
            self._report(error)
            await self._socket.close(CloseCode.INTERNAL_ERROR, "the server failed")

    async def _leave(self) -> None:
        self._closed = True
        for stop in self._viewed.values():
            stop()
        half_typed = set(self._half_typed)
        for log in self._outbox.close():
            if log.response_id in half_typed:
                self._graces.drop(log)
            else:
                self._graces.begin(log)
        tasks = [task for lane in self._lanes for task in lane.tasks]
        await asyncio.gather(*tasks, return_exceptions=True)
        for lane in self._lanes:
            self._service.leave(self._lane_key(lane.stream_id))

    def _context(self, stream_id: str | None, received_ns: int) -> CallContext:
        return CallContext(
            key_id=self._peer.key_id,
            connection_id=self._peer.connection_id,
            lane_key=self._lane_key(stream_id),
            received_ns=received_ns,
        )

    def _lane_key(self, stream_id: str | None) -> str:
        connection_id = self._peer.connection_id
        return connection_id if stream_id is None else f"{connection_id}/{stream_id}"

    def _with_model(self, message: ResponseCreate) -> ResponseCreate:
        if message.model is not None or self._peer.model is None:
            return message
        return msgspec.structs.replace(message, model=self._peer.model)

    def _report(self, error: Exception) -> None:
        report(error, f"connection {self._peer.connection_id}")


def report(error: Exception, where: str) -> None:
    """Log an unexpected error: its type and its place, not its words, which may hold a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: unexpected %s\n%s", where, type(error).__name__, frames)
