"""Plays conversations against a server: all at once, or as they arrive; one sample for each turn.

    open all ── warm up ── play all ──┐ the server is killed and started again
                                      └── play_restored ── delete

Knows: connections, which sessions share one, the order above.
Does not know: where the server is from, how one session is played, percentiles, reports. Never
imports torch.
Invariant: no session waits for another. A person who leaves has a connection of their own, since
it is the connection that goes. The conversations are deleted when all is over, so that nothing of
a session is taken away while others are measured.
Cost: one connection for each session up to 32, which the others share; one more for each session
that is left, from shortly before it arrives until it is left.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from chatrt.bench.player import Player, TurnOptions
from chatrt.bench.turn_sample import KINDS, Kind, TurnSample
from chatrt.client import ChatClient, HttpRoutes
from chatrt.errors import ChatrtError, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from chatrt.bench.workload import PlannedSession
    from chatrt.launch import Endpoint

__all__ = ["KINDS", "Kind", "SessionsBench", "TurnOptions", "TurnSample", "run_sessions"]

MAX_CONNECTIONS = 32  # each carries up to 16 answers at once; a server takes 64 of one key
_LEAD_S = 0.25  # to connect in, for a session that has a connection of its own


class SessionsBench:
    """The sessions of a run.

    Args:
        sessions: What is played.
        options: How every turn is asked for.
        on_sample: Hears of each turn as it ends, so a run that is cut short has its samples.
    """

    def __init__(
        self,
        sessions: Sequence[PlannedSession],
        options: TurnOptions,
        on_sample: Callable[[TurnSample], None],
    ) -> None:
        self._sessions = sessions
        self._options = options
        self._on_sample = on_sample
        self._players: list[Player] = []

    async def run(self, endpoint: Endpoint, *, warm_up: PlannedSession | None = None) -> None:
        """Play `warm_up` alone and unmeasured, then all sessions, each when it arrives.

        Raises:
            ChatrtError: The server cannot be reached, or a turn of the warm-up failed.
        """
        async with AsyncExitStack() as stack:
            num_staying = sum(not planned.leaves for planned in self._sessions)
            clients = await _connect(stack, endpoint, num_staying)
            if warm_up is not None:
                await self._warm_up(clients[0], warm_up)
            players = [
                Player(index, planned, self._options, self._on_sample)
                for index, planned in enumerate(self._sessions)
            ]
            self._players += players
            leaving = [player for player in players if player.leaves]
            staying = [player for player in players if not player.leaves]
            await _together(
                *(player.open(clients[at % len(clients)]) for at, player in enumerate(staying))
            )
            started_ns = time.perf_counter_ns() + (round(_LEAD_S * 1e9) if leaving else 0)
            await _together(
                *(player.play(started_ns) for player in staying),
                *(_play_alone(player, endpoint, started_ns) for player in leaving),
            )

    async def run_restored(self, endpoint: Endpoint) -> None:
        """Continue the sessions on a server that was started again on the same folders.

        Raises:
            ChatrtError: The server cannot be reached.
        """
        async with AsyncExitStack() as stack:
            clients = await _connect(stack, endpoint, len(self._sessions))
            await _together(
                *(
                    player.play_restored(clients[index % len(clients)])
                    for index, player in enumerate(self._players)
                )
            )

    async def delete(self, endpoint: Endpoint) -> None:
        """Delete the conversations, for a server that is not this run's own.

        A server that cannot forget is no failure; one that is gone is asked once, not for each.
        """
        http = HttpRoutes(endpoint.url, api_key=endpoint.api_key)
        while self._players:
            try:
                await self._players.pop().delete(http)
            except ServerUnavailable:
                self._players.clear()
            except ChatrtError:
                continue

    async def _warm_up(self, client: ChatClient, planned: PlannedSession) -> None:
        samples: list[TurnSample] = []
        # Its sampling begins with the seed itself, as that of the first session does.
        player = Player(0, planned, self._options, samples.append)
        self._players.append(player)
        await player.open(client)
        await player.play(time.perf_counter_ns())
        for sample in samples:
            if sample.error is not None:
                raise ChatrtError(f"a turn of the warm-up failed: {sample.error}")


async def run_sessions(
    endpoint: Endpoint,
    sessions: Sequence[PlannedSession],
    options: TurnOptions,
    on_sample: Callable[[TurnSample], None],
    *,
    warm_up: PlannedSession | None = None,
) -> None:
    """Play `sessions` as `SessionsBench.run` does, and delete their conversations again.

    Raises:
        ChatrtError: The server cannot be reached, or a turn of the warm-up failed.
    """
    bench = SessionsBench(sessions, options, on_sample)
    try:
        await bench.run(endpoint, warm_up=warm_up)
    finally:
        await bench.delete(endpoint)


async def _connect(
    stack: AsyncExitStack, endpoint: Endpoint, num_sessions: int
) -> list[ChatClient]:
    """As many connections as so many sessions need, closed with `stack`."""
    clients: list[ChatClient] = []
    for _ in range(max(1, min(num_sessions, MAX_CONNECTIONS))):
        client = await ChatClient.connect(endpoint.url, api_key=endpoint.api_key)
        clients.append(await stack.enter_async_context(client))
    return clients


async def _play_alone(player: Player, endpoint: Endpoint, started_ns: int) -> None:
    """Play a session over a connection of its own, made shortly before it arrives."""
    connects_ns = started_ns + round(player.arrives_ms * 1e6 - _LEAD_S * 1e9)
    await asyncio.sleep(max(0.0, (connects_ns - time.perf_counter_ns()) / 1e9))
    try:
        client = await ChatClient.connect(endpoint.url, api_key=endpoint.api_key)
    except ChatrtError as error:
        player.refuse(error)
        return
    async with client:
        await player.open(client)
        await player.play(started_ns)


async def _together(*coroutines: Coroutine[None, None, None]) -> None:
    async with asyncio.TaskGroup() as group:
        for coroutine in coroutines:
            group.create_task(coroutine)
