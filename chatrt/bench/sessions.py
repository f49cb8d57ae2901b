"""Plays conversations against a server, all at once, and takes one sample for each turn.

Knows: the client, planned sessions, which figures of an answer make a sample.
Does not know: where the server is from, percentiles, how a report looks. Never imports torch.
Invariant: each turn that was sent gives one sample, failed ones too; a session ends with its first
failure, since nothing can follow it. The conversations are deleted again at the end.
Cost: this process shares the machine with the server, and its share of the cores is in the figures.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from chatrt.bench.turn_figures import TurnFigures
from chatrt.client import ChatClient, ResponseRequest
from chatrt.client.messages import message_item
from chatrt.errors import ChatrtError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatrt.bench.workload import PlannedSession, PlannedTurn
    from chatrt.client import TurnResult

Kind: TypeAlias = Literal["cold", "warm", "forked"]
KINDS: tuple[Kind, ...] = ("cold", "warm", "forked")

MAX_CONNECTIONS = 32  # each carries up to 16 answers at once; a server takes 64 of one key
_TITLE = "chatrt bench"


@dataclass(frozen=True, slots=True)
class TurnSample:
    """One turn as it was measured.

    `kind` is `cold` for a session's first turn, `warm` for a follow-up on its tip, `forked` for one
    behind an earlier answer. `started_ms` counts from the start of the run. `history_tokens` are
    those of the parent's whole sequence. `ttft_ms` and `gaps_ms` are the client's,
    `server_ttft_ms`, `stages_ms` and `tpot_ms` the server's. `error` is None for a turn that
    ended well.
    """

    session_index: int
    turn_index: int
    kind: Kind
    started_ms: float
    status: str
    history_tokens: int
    input_tokens: int = 0
    cached_tokens: int = 0
    typed_ahead_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: float | None = None
    server_ttft_ms: float | None = None
    stages_ms: dict[str, float] = field(default_factory=dict)
    tpot_ms: float | None = None
    gaps_ms: tuple[float, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """How every turn is asked for: its length in tokens, and the seed that sampling starts from.

    Answers run to their full length (`ignore_eos`), so that runs are comparable.
    """

    max_output_tokens: int = 32
    seed: int = 0

    def sampling(self, session_index: int) -> dict[str, Any]:
        """The sampling fields of a session's requests."""
        return {
            "max_output_tokens": self.max_output_tokens,
            "ignore_eos": True,
            "seed": self.seed + session_index,
        }


@dataclass(frozen=True, slots=True)
class _Parent:
    """The answer that a turn continues: its id, and the tokens of its whole sequence."""

    response_id: str
    num_tokens: int


async def run_sessions(
    url: str,
    sessions: Sequence[PlannedSession],
    options: TurnOptions,
    on_sample: Callable[[TurnSample], None],
    *,
    api_key: str | None = None,
    warm_up: PlannedSession | None = None,
) -> None:
    """Play `warm_up` alone and unmeasured, then all `sessions` at once.

    `on_sample` hears of each turn as it ends, so a run that is cut short has its samples.

    Raises:
        ChatrtError: The server cannot be reached, or a turn of the warm-up failed.
    """
    num_clients = min(len(sessions), MAX_CONNECTIONS)
    async with AsyncExitStack() as stack:
        clients: list[ChatClient] = []
        for _ in range(max(num_clients, 1)):
            client = await ChatClient.connect(url, api_key=api_key)
            clients.append(await stack.enter_async_context(client))
        if warm_up is not None:
            await _warm_up(clients[0], warm_up, options)
        started_ns = time.perf_counter_ns()
        async with asyncio.TaskGroup() as group:
            for index, planned in enumerate(sessions):
                client = clients[index % num_clients]
                player = _Player(client, index, options, on_sample, started_ns)
                group.create_task(player.play(planned))


async def _warm_up(client: ChatClient, planned: PlannedSession, options: TurnOptions) -> None:
    samples: list[TurnSample] = []
    await _Player(client, 0, options, samples.append, time.perf_counter_ns()).play(planned)
    for sample in samples:
        if sample.error is not None:
            raise ChatrtError(f"a turn of the warm-up failed: {sample.error}")


class _Player:
    """Sends one session's turns, one after the other."""

    def __init__(
        self,
        client: ChatClient,
        index: int,
        options: TurnOptions,
        on_sample: Callable[[TurnSample], None],
        started_ns: int,
    ) -> None:
        self._client = client
        self._index = index
        self._sampling = options.sampling(index)
        self._on_sample = on_sample
        self._started_ns = started_ns
        self._num_sent = 0

    async def play(self, planned: PlannedSession) -> None:
        """Play the session in a conversation of its own, which is deleted at the end."""
        try:
            conversation_id = await self._client.create_conversation(_TITLE)
        except ChatrtError as error:
            self._on_sample(self._failed("cold", 0, error))
            return
        try:
            await self._turns(planned, conversation_id)
        finally:
            await self._delete(conversation_id)

    async def _turns(self, planned: PlannedSession, conversation_id: str) -> None:
        first = tip = await self._cold(planned, conversation_id)
        for turn in planned.turns[1:]:
            if tip is None:
                return
            tip = await self._follow_up("warm", turn, tip)
        if planned.fork is not None and first is not None and tip is not None:
            await self._follow_up("forked", planned.fork, first)

    async def _cold(self, planned: PlannedSession, conversation_id: str) -> _Parent | None:
        items = [
            message_item("system", planned.system),
            message_item("user", planned.turns[0].text),
        ]
        request = ResponseRequest(
            input=items, conversation=conversation_id, sampling=self._sampling
        )
        return await self._turn("cold", request, 0)

    async def _follow_up(self, kind: Kind, turn: PlannedTurn, parent: _Parent) -> _Parent | None:
        await asyncio.sleep(turn.think_ms / 1e3)
        request = ResponseRequest(
            input=turn.text, previous_response_id=parent.response_id, sampling=self._sampling
        )
        return await self._turn(kind, request, parent.num_tokens)

    async def _turn(
        self, kind: Kind, request: ResponseRequest, history_tokens: int
    ) -> _Parent | None:
        """Send one turn and take its sample; the answer to continue, None after a failure."""
        try:
            answer = await self._client.send(request)
            result = await answer.collect()
        except ChatrtError as error:
            self._on_sample(self._failed(kind, history_tokens, error))
            self._num_sent += 1
            return None
        sample = self._sample(kind, result, history_tokens, answer.sent_ns)
        self._on_sample(sample)
        self._num_sent += 1
        if sample.error is not None or result.response_id is None:
            return None
        return _Parent(result.response_id, sample.input_tokens + sample.output_tokens)

    def _sample(
        self, kind: Kind, result: TurnResult, history_tokens: int, sent_ns: int
    ) -> TurnSample:
        figures = TurnFigures.of(result)
        ended_well = result.status in ("completed", "incomplete")
        return TurnSample(
            session_index=self._index,
            turn_index=self._num_sent,
            kind=kind,
            started_ms=(sent_ns - self._started_ns) / 1e6,
            status=result.status,
            history_tokens=history_tokens,
            input_tokens=figures.input_tokens,
            cached_tokens=figures.cached_tokens,
            typed_ahead_tokens=figures.typed_ahead_tokens,
            output_tokens=figures.output_tokens,
            ttft_ms=figures.ttft_ms,
            server_ttft_ms=figures.server_ttft_ms,
            stages_ms=figures.stages_ms,
            tpot_ms=figures.tpot_ms,
            gaps_ms=result.gaps_ms,
            error=None if ended_well else f"the turn ended as {result.status}",
        )

    def _failed(self, kind: Kind, history_tokens: int, error: ChatrtError) -> TurnSample:
        return TurnSample(
            session_index=self._index,
            turn_index=self._num_sent,
            kind=kind,
            started_ms=(time.perf_counter_ns() - self._started_ns) / 1e6,
            status="failed",
            history_tokens=history_tokens,
            error=f"{error.code}: {error.message}",
        )

    async def _delete(self, conversation_id: str) -> None:
        # A server that is gone, or cannot forget, is no reason to lose the other sessions.
        with suppress(ChatrtError):
            await self._client.http.delete_conversation(conversation_id)
