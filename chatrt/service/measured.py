"""What a service counts: turns told to observers, and the page that a scrape reads.

Knows: observers, metrics, where the figures of a scrape come from. Does not know: HTTP, keys.
Invariant: each turn is told once; scrapes that come while one is written get that one, so that
any number of them costs as one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from chatrt.metrics import EndedTurn, EngineFigures
from chatrt.turn import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt.archive import Archive
    from chatrt.engine import Engine
    from chatrt.host import EngineHost
    from chatrt.metrics import Metrics
    from chatrt.service.answer import Answer
    from chatrt.turn import FinishedEvent
    from chatrt.wire.live import Sockets


class Measured:
    """Metrics of one service, and what else observes its turns. `clock` gives nanoseconds."""

    def __init__(
        self,
        metrics: Metrics,
        host: EngineHost,
        archive: Archive | None,
        clock: Callable[[], int],
    ) -> None:
        self._metrics = metrics
        self._host = host
        self._archive = archive
        self._clock = clock
        self._scrape: asyncio.Task[bytes] | None = None

    def cancelling(self, answer: Answer | None) -> None:
        """Somebody asks for the end of an answer, if it runs; the first time counts."""
        if answer is not None and answer.cancel_asked_ns is None:
            answer.cancel_asked_ns = self._clock()

    def ended(self, answer: Answer, event: FinishedEvent) -> None:
        """Tell of a turn whose terminal event goes into its log now."""
        turn = EndedTurn(answer.request, event, self._clock(), answer.cancel_asked_ns)
        for observer in self._metrics.observers:
            observer.ended(turn)
        if event.reason is not FinishReason.FAILED and answer.delta_times_ns:
            answer.log.when_sent(lambda time_ns: self._first_sent(turn, time_ns))

    async def text(self, sockets: Sockets) -> bytes:
        """Metrics in Prometheus' text format; pages are counted between two steps.

        Raises:
            ServerUnavailable: The engine has stopped.
        """
        if self._scrape is None:
            self._scrape = asyncio.create_task(self._write(sockets))
            self._scrape.add_done_callback(self._written)
        return await asyncio.shield(self._scrape)

    def _first_sent(self, turn: EndedTurn, time_ns: int) -> None:
        for observer in self._metrics.observers:
            observer.first_sent(turn, time_ns)

    async def _write(self, sockets: Sockets) -> bytes:
        engine = await self._host.call(self._figures)
        archive = None if self._archive is None else self._archive.figures()
        self._metrics.update(engine, sockets, archive)
        return await self._metrics.render()

    def _figures(self, engine: Engine) -> EngineFigures:
        """On the engine's thread."""
        return EngineFigures(
            engine.sessions.figures(),
            num_running=len(engine.turns.answers()),
            num_waiting=engine.admission.num_answers,
            num_steps=self._host.steps.num_steps,
            step_ns=self._host.steps.step_ns,
            num_out_of_memory=self._host.num_out_of_memory,
            compilations=self._host.compilations.late,
        )

    def _written(self, scrape: asyncio.Task[bytes]) -> None:
        self._scrape = None
        if not scrape.cancelled():
            scrape.exception()  # whoever still waits gets it; nobody may
