"""The engine's thread, and the only place where it meets asyncio.

Knows: the engine's calls, one event loop. Does not know: sockets, conversations, tensors.
Invariant: the engine is touched by its own thread alone; every submitted turn's sink gets exactly
one FinishedEvent, on the loop's thread, whatever happens to the engine or to another sink.
Cost: one wake-up of the loop per step, however many turns it served.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from chatrt.engine.report import refused
from chatrt.engine.snapshot import StepLog
from chatrt.errors import ChatrtError, ServerUnavailable
from chatrt.turn import FinishedEvent, FinishReason
from chatrt_kernels.compilations import Compilations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from chatrt.engine import Engine
    from chatrt.turn import EngineEvent, TurnRequest

    Sink: TypeAlias = Callable[[EngineEvent], None]
    Command: TypeAlias = Callable[[Engine], object]

T = TypeVar("T")
_log = logging.getLogger(__name__)


class EngineHost:
    """Runs an engine on a thread of its own.

    `steps` are those that did something; read them in a `call`, and `num_out_of_memory`, which
    counts those that failed for want of the device's memory.

    Args:
        engine: Not to be touched by anyone else once `start` was called.
        compilations: What the engine's executor counts; of one that compiles nothing, none.
    """

    def __init__(self, engine: Engine, compilations: Compilations | None = None) -> None:
        self.compilations = compilations or Compilations()
        self.steps = StepLog()
        self.num_out_of_memory = 0
        self._engine = engine
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="chatrt-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; events will arrive on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Let the current step finish, cancel every turn, and end the thread.

        The turns' last events arrive before this returns. What is asked afterwards is refused.
        """
        if self._thread.is_alive():
            self._stopping = True
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)

    def submit(self, request: TurnRequest, sink: Sink) -> None:
        """Queue a turn; `sink` gets its events on the loop's thread.

        A request that the engine refuses ends with a FinishedEvent that carries the error.
        """
        self._sinks[request.response_id] = sink
        if self._stopping:
            asyncio.get_running_loop().call_soon(self._dispatch, [_failed(request, _ended())])
            return

        def command(engine: Engine) -> None:
            try:
                engine.submit(request)
            except Exception as error:  # the edge of the thread: its sink is told
                _log.exception("a turn could not be queued")
                self._deliver([_failed(request, _as_chatrt_error(error))])

        self._commands.put(command)

    def post(self, command: Command) -> None:
        """Run a call on the engine between two steps, without waiting for it."""
        self._commands.put(command)

    def wake(self) -> None:
        """Something has arrived for the engine from elsewhere: take a step. For any thread."""
        self._commands.put(_nothing)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a call on the engine between two steps and wait for what it returns.

        Raises:
            Whatever `function` raises; ServerUnavailable once the host was told to stop.
        """
        if self._stopping:
            raise _ended()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # None only with an error

        def command(engine: Engine) -> None:
            try:
                result = function(engine)
            except Exception as error:  # the edge of the engine's thread: hand it to the caller
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, result, None)

        self._commands.put(command)
        return await future

    def _run(self) -> None:
        worked = False
        while self._take_commands(wait=not worked):
            start_ns = time.perf_counter_ns()
            try:
                worked = self._engine.step()
            except Exception as error:  # the edge of the thread
                _log.exception("the engine's step failed; its turns end, the engine goes on")
                self.num_out_of_memory += _is_lack_of_memory(error)
                self._fail_all(_as_chatrt_error(error))
                worked = self._engine.num_waiting > 0
            if worked:
                self.steps.add(start_ns, time.perf_counter_ns())
            self._deliver(self._engine.take_events())
        self._engine.cancel_all()
        self._deliver(self._engine.take_events())
        self._engine.close()

    def _fail_all(self, error: ChatrtError) -> None:
        try:
            self._engine.fail_all(error)
        except Exception:  # what is broken may break this too; the turns were reported before
            _log.exception("sessions of failed turns could not be put away")

    def _take_commands(self, *, wait: bool) -> bool:
        """Run all queued commands, waiting for the first if asked; False when told to stop."""
        while True:
            try:
                command = self._commands.get(block=wait, timeout=self._engine.poll_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            wait = False
            try:
                command(self._engine)
            except Exception:  # the edge of the thread; commands report their own errors
                _log.exception("a call on the engine failed")

    def _deliver(self, events: Sequence[EngineEvent]) -> None:
        assert self._loop is not None
        if events:
            try:
                self._loop.call_soon_threadsafe(self._dispatch, events)
            except RuntimeError:
                _log.debug("the loop is closed; events of the last step are dropped")

    def _dispatch(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            if isinstance(event, FinishedEvent):
                sink = self._sinks.pop(event.response_id, None)
            else:
                sink = self._sinks.get(event.response_id)
            if sink is None:
                continue
            try:
                sink(event)
            except Exception:  # the edge of a callback: one turn's fault is not the others'
                _log.exception("a turn's event could not be taken")


def _nothing(engine: Engine) -> None:
    """A command that only ends the wait for one."""


def _failed(request: TurnRequest, error: ChatrtError) -> FinishedEvent:
    return refused(request, FinishReason.FAILED, error=error, time_ns=request.stamps.tokenized_ns)


def _ended() -> ServerUnavailable:
    return ServerUnavailable("the engine has stopped; start the server again")


def _is_lack_of_memory(error: Exception) -> bool:
    """Python's own, or torch's, whose class this layer does not know."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _as_chatrt_error(error: Exception) -> ChatrtError:
    if isinstance(error, ChatrtError):
        return error
    return ChatrtError(f"the engine failed: {type(error).__name__}: {error}")
