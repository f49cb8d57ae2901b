"""Plays one planned session: its turns one after the other, on time, and a sample of each.

Knows: the client, what a planned turn asks for, when it is due, how a person cancels or leaves.
Does not know: other sessions, where the server is from, percentiles. Never imports torch.
Invariant: each turn that was sent gives one sample, failed ones too; a session ends with its first
failure, since nothing can follow it. A turn is due its pause after the answer before it ended as
its bytes were read, or when its session arrives; how late it was sent stands in its sample.
Cost: this process shares the machine with the server, and its share of the cores is in the figures.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from chatrt.bench.turn_figures import TurnFigures
from chatrt.bench.turn_sample import ABANDONED, CANCELLED, Kind, TurnSample
from chatrt.bench.typist import half_typed, type_message
from chatrt.client import ResponseRequest
from chatrt.client.messages import DELTA_TYPE, message_item
from chatrt.errors import ChatrtError

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt.bench.workload import PlannedSession, PlannedTurn
    from chatrt.client import Answer, ChatClient, HttpRoutes, TurnResult, TypedAhead

TITLE = "chatrt bench"
# The average over fewer tokens is that of their chunks, of which the first may hold several.
LEAST_CANCELLED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """How every turn is asked for: the seed that sampling starts from, and how fast one types.

    Answers run to their full length (`ignore_eos`), so that runs are comparable. If `from_due`,
    TTFT counts from when a turn was due, not from when it was sent.
    """

    seed: int = 0
    type_ms: int = 100
    from_due: bool = False

    def sampling(self, session_index: int, max_output_tokens: int) -> dict[str, Any]:
        """The sampling fields of a session's request."""
        return {
            "max_output_tokens": max_output_tokens,
            "ignore_eos": True,
            "seed": self.seed + session_index,
        }


@dataclass(frozen=True, slots=True)
class _Parent:
    """The answer that a turn continues: its id, and the tokens of its whole sequence."""

    response_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Asked:
    """One turn on its way: what was planned, what it continues, when it was due."""

    turn: PlannedTurn
    kind: Kind
    parent: _Parent | None
    due_ns: int
    after_restart: bool = False


@dataclass(frozen=True, slots=True)
class _Heard:
    """How an answer ended: `cancel_ms` if it was cancelled, `left` if nobody read it to its end."""

    result: TurnResult
    sent_ns: int
    ended_ns: int
    cancel_ms: float | None = None
    left: bool = False


class Player:
    """Sends one session's turns.

    Args:
        index: The session's; its sampling starts from it.
        planned: What is sent.
        options: How it is asked for.
        on_sample: Hears of each turn as it ends.
    """

    def __init__(
        self,
        index: int,
        planned: PlannedSession,
        options: TurnOptions,
        on_sample: Callable[[TurnSample], None],
    ) -> None:
        self._client: ChatClient | None = None
        self._index = index
        self._planned = planned
        self._options = options
        self._on_sample = on_sample
        self._conversation_id: str | None = None
        self._answers: dict[int, _Parent] = {}  # by the index of their turns
        self._started_ns = 0
        self._ended_ns = 0  # of the newest answer
        self._num_sent = 0

    @property
    def leaves(self) -> bool:
        """Whether its person leaves in mid-answer, and takes the connection along."""
        return self._planned.leaves

    @property
    def arrives_ms(self) -> float:
        """When the session arrives, from the start of the run."""
        return self._planned.arrives_ms

    async def open(self, client: ChatClient) -> None:
        """Make the session's conversation over `client`, which is closed if its person leaves."""
        self._client = client
        try:
            self._conversation_id = await client.create_conversation(TITLE)
        except ChatrtError as error:
            self.refuse(error)

    def refuse(self, error: ChatrtError) -> None:
        """The session cannot begin: that is the failure of its first turn."""
        asked = _Asked(self._planned.turns[0], "cold", None, due_ns=0)
        failed = self._failed(asked, error, began_ns=0)
        self._on_sample(replace(failed, started_ms=0.0, ended_ms=0.0, late_ms=0.0))

    async def play(self, started_ns: int) -> None:
        """Send the turns in order, the first when the session arrives behind `started_ns`."""
        self._started_ns = started_ns
        self._ended_ns = started_ns + round(self._planned.arrives_ms * 1e6)
        if self._conversation_id is None:
            return
        for index, turn in enumerate(self._planned.turns):
            parent = None if turn.follows is None else self._answers[turn.follows]
            kind: Kind = "cold" if parent is None else "forked" if turn.is_fork else "warm"
            answer = await self._ask(turn, kind, parent)
            if answer is None:
                self._answers.clear()  # nothing follows, not behind a restart either
                return
            self._answers[index] = answer

    async def play_restored(self, client: ChatClient) -> None:
        """Send the turn that is planned for a server which was started again, if all went well."""
        self._client = client
        turn = self._planned.after_restart
        if turn is None or turn.follows is None or turn.follows not in self._answers:
            return
        self._ended_ns = time.perf_counter_ns()
        await self._ask(turn, "restored", self._answers[turn.follows], after_restart=True)

    async def delete(self, http: HttpRoutes) -> None:
        """Delete the conversation, if one was made.

        Raises:
            ChatrtError: The server is gone, or cannot forget.
        """
        if self._conversation_id is not None:
            await http.delete_conversation(self._conversation_id)

    async def _ask(
        self, turn: PlannedTurn, kind: Kind, parent: _Parent | None, *, after_restart: bool = False
    ) -> _Parent | None:
        """Send one turn when it is due; the answer to continue, None if nothing can follow."""
        due_ns = self._ended_ns + turn.think_ms * 1_000_000
        await asyncio.sleep(max(0.0, (due_ns - time.perf_counter_ns()) / 1e9))
        parts = half_typed(turn.text) if turn.typed_ahead and parent is not None else []
        due_ns += len(parts) * self._options.type_ms * 1_000_000
        asked = _Asked(turn, kind, parent, due_ns, after_restart)
        began_ns = time.perf_counter_ns()
        try:
            typed = None if not parts or parent is None else await self._type(parts, parent)
            began_ns = time.perf_counter_ns()
            heard = await self._send(asked, typed)
        except ChatrtError as error:
            self._on_sample(self._failed(asked, error, began_ns))
            self._num_sent += 1
            return None
        sample = self._sample(asked, heard)
        self._ended_ns = heard.ended_ns
        self._on_sample(sample)
        self._num_sent += 1
        if heard.left or sample.error is not None or heard.result.response_id is None:
            return None
        return _Parent(heard.result.response_id, sample.input_tokens + sample.output_tokens)

    async def _type(self, parts: list[str], parent: _Parent) -> TypedAhead | None:
        assert self._client is not None
        type_ms = self._options.type_ms
        return await type_message(self._client, parts, parent.response_id, type_ms=type_ms)

    async def _send(self, asked: _Asked, typed: TypedAhead | None) -> _Heard:
        assert self._client is not None
        start_ns = asked.due_ns if self._options.from_due else None
        answer = await self._client.send(self._request(asked), start_ns=start_ns, typed=typed)
        if asked.turn.leave_after is not None:
            return await _leave(self._client, answer, asked.turn.leave_after)
        return await _listen(answer, asked.turn.cancel_after)

    def _request(self, asked: _Asked) -> ResponseRequest:
        sampling = self._options.sampling(self._index, asked.turn.max_output_tokens)
        if asked.parent is not None:
            return ResponseRequest(
                input=asked.turn.text,
                previous_response_id=asked.parent.response_id,
                sampling=sampling,
            )
        items = [
            message_item("system", self._planned.system),
            message_item("user", asked.turn.text),
        ]
        return ResponseRequest(input=items, conversation=self._conversation_id, sampling=sampling)

    def _sample(self, asked: _Asked, heard: _Heard) -> TurnSample:
        result, figures = heard.result, TurnFigures.of(heard.result)
        kind = asked.kind
        if figures.restored_tokens and kind != "cold":
            kind = "restored"
        cancelled = result.status == CANCELLED
        too_short = cancelled and figures.output_tokens < LEAST_CANCELLED_TOKENS
        return replace(
            self._sent(asked, kind, heard.sent_ns, heard.ended_ns),
            status=ABANDONED if heard.left else result.status,
            input_tokens=figures.input_tokens,
            cached_tokens=figures.cached_tokens,
            typed_ahead_tokens=figures.typed_ahead_tokens,
            output_tokens=figures.output_tokens,
            ttft_ms=figures.ttft_ms,
            server_ttft_ms=figures.server_ttft_ms,
            stages_ms=figures.stages_ms,
            tpot_ms=None if too_short else figures.tpot_ms,
            gaps_ms=result.gaps_ms,
            error=_how_it_went_wrong(asked, heard),
            cancel_ms=heard.cancel_ms if cancelled else None,
            restored_tokens=figures.restored_tokens,
        )

    def _failed(self, asked: _Asked, error: ChatrtError, began_ns: int) -> TurnSample:
        """A turn that failed now, and was begun at `began_ns`."""
        sample = self._sent(asked, asked.kind, began_ns, time.perf_counter_ns())
        return replace(sample, error=f"{error.code}: {error.message}")

    def _sent(self, asked: _Asked, kind: Kind, sent_ns: int, ended_ns: int) -> TurnSample:
        """A sample that knows when its turn ran, and nothing of how it went."""
        return TurnSample(
            session_index=self._index,
            turn_index=self._num_sent,
            kind=kind,
            started_ms=(sent_ns - self._started_ns) / 1e6,
            status="failed",
            history_tokens=0 if asked.parent is None else asked.parent.num_tokens,
            ended_ms=(ended_ns - self._started_ns) / 1e6,
            late_ms=(sent_ns - asked.due_ns) / 1e6,
            from_due=self._options.from_due,
            after_restart=asked.after_restart,
        )


async def _listen(answer: Answer, cancel_after: int | None) -> _Heard:
    """Read an answer to its end; behind `cancel_after` deltas the server is asked to stop.

    Raises:
        ChatrtError: As reading does, and for a response that failed.
    """
    num_deltas, cancelled_ns, ended_ns = 0, None, 0
    async for event in answer:
        ended_ns = event.received_ns
        num_deltas += event.type == DELTA_TYPE
        if num_deltas == cancel_after and cancelled_ns is None:
            cancelled_ns = time.perf_counter_ns()
            await answer.cancel()
    cancel_ms = None if cancelled_ns is None else (ended_ns - cancelled_ns) / 1e6
    return _Heard(_result(answer), answer.sent_ns, ended_ns, cancel_ms)


async def _leave(client: ChatClient, answer: Answer, num_deltas: int) -> _Heard:
    """Read so many deltas, or all that there are, and close the connection.

    An answer that has no more deltas was not left: it ended, and its figures are those of any.

    Raises:
        ChatrtError: As `_listen`.
    """
    async for event in answer:
        num_deltas -= event.type == DELTA_TYPE
        if num_deltas <= 0:
            break
    left_ns = time.perf_counter_ns()
    result = _result(answer)
    await client.close()
    return _Heard(result, answer.sent_ns, left_ns, left=num_deltas <= 0)


def _result(answer: Answer) -> TurnResult:
    """What was read of an answer. Raises `ChatrtError` for a response that failed."""
    result = answer.recorder.result()
    if result.error is not None:
        raise result.error
    return result


def _how_it_went_wrong(asked: _Asked, heard: _Heard) -> str | None:
    """None for a turn that went as planned, a cancelled or left one among them."""
    status = heard.result.status
    wanted = status == CANCELLED and asked.turn.cancel_after is not None
    if heard.left or wanted or status in ("completed", "incomplete"):
        return None
    return f"the turn ended as {status}"
