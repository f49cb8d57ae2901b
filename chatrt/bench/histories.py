"""Plays one conversation for each length of history: what a follow-up costs, and how it begins.

    cold ── first ──┬── second          follow_up and typed_ahead, in turns the first and the second
                    ├── regenerate      the second's own words once more
                    └── fork            other words
                        second ── branch_switch ── plain (without drafts) ── restart ── restored

Knows: the client, the cases, the order in which they are asked.
Does not know: where the server is from, percentiles, how a report looks. Never imports torch.
Invariant: each turn that was sent gives one sample, failed ones too; a conversation ends with its
first failure. No two conversations begin alike, so a first turn finds nothing but the template's
start. Which of follow-up and typed ahead comes first changes from repetition to repetition.
Cost: a repetition prefills every history once; this process shares the machine with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from chatrt.bench.text_scale import measure_scale, numbered
from chatrt.bench.turn_figures import TurnFigures
from chatrt.bench.typist import half_typed, type_message
from chatrt.bench.workload import sentence
from chatrt.client import ChatClient, ResponseRequest
from chatrt.errors import ChatrtError, InvalidValue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from chatrt.bench.text_scale import TextScale
    from chatrt.client import TypedAhead
    from chatrt.launch import Endpoint

Case: TypeAlias = Literal[
    "cold",
    "follow_up",
    "typed_ahead",
    "regenerate",
    "fork",
    "branch_switch",
    "plain",
    "restored",
]
CASES: tuple[Case, ...] = (
    *("cold", "follow_up", "typed_ahead", "regenerate", "fork", "branch_switch"),
    *("restored", "plain"),
)
# MEASURING's words for how a turn begins; what is typed ahead has a figure of its own.
KINDS: dict[str, tuple[Case, ...]] = {
    "cold": ("cold",),
    "warm": ("follow_up", "branch_switch"),
    "forked": ("regenerate", "fork"),
    "restored": ("restored",),
}
_TITLE = "chatrt bench histories"
_NUM_TURNS = 7  # of a conversation, its cold one included


@dataclass(frozen=True, slots=True)
class HistoriesOptions:
    """`histories` are lengths in tokens, each played `repetitions` times; times are in ms.

    `think_ms` is a person's pause before each turn, `type_ms` the pause behind each word.
    """

    histories: tuple[int, ...] = (260, 920, 3600, 7000)
    repetitions: int = 5
    message_words: int = 15
    max_output_tokens: int = 16
    think_ms: int = 300
    type_ms: int = 100
    seed: int = 0


@dataclass(frozen=True, slots=True)
class HistorySample:
    """One turn. `history` is the length that was wanted, `history_tokens` the parent's own.

    A cold turn has no parent: its own prompt is the history, and its length stands there.
    """

    case: Case
    history: int
    repetition: int
    history_tokens: int
    figures: TurnFigures
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Parent:
    response_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """A conversation's last tip, to be continued after the server was started again."""

    history: int
    repetition: int
    parent: _Parent


class HistoriesBench:
    """The conversations of a run.

    Args:
        options: What is played.
        on_sample: Hears of each turn as it ends.
        beside: Called before every conversation with its history and repetition, in a thread of its
            own: what is measured beside this server, in turns with it.
    """

    def __init__(
        self,
        options: HistoriesOptions,
        on_sample: Callable[[HistorySample], None],
        *,
        beside: Callable[[int, int], None] | None = None,
    ) -> None:
        self._options = options
        self._on_sample = on_sample
        self._beside = beside
        self._kept: list[_Kept] = []
        self._conversations: list[str] = []

    async def run(self, endpoint: Endpoint) -> None:
        """Play everything but the restored turns.

        Raises:
            ChatrtError: The server cannot be reached.
            InvalidValue: A history and what follows it are longer than the model's context.
        """
        options = self._options
        async with _connected(endpoint) as client:
            scale = await measure_scale(client, seed=options.seed)
            await _check_room(client, options, scale)
            for repetition in range(options.repetitions):
                for history in _rotated(options.histories, repetition):
                    if self._beside is not None:
                        await asyncio.to_thread(self._beside, history, repetition)
                    await self._conversation(client, scale, history, repetition)

    async def run_restored(self, endpoint: Endpoint) -> None:
        """Continue every conversation on a server that was started again on the same folders.

        Raises:
            ChatrtError: The server cannot be reached.
        """
        async with _connected(endpoint) as client:
            for kept in self._kept:
                player = self._player(client, kept.history, kept.repetition)
                await player.follow_up("restored", kept.parent)

    async def delete(self, endpoint: Endpoint) -> None:
        """Delete the conversations, for a server that is not this run's own."""
        async with _connected(endpoint) as client:
            while self._conversations:
                with contextlib.suppress(ChatrtError):
                    await client.http.delete_conversation(self._conversations.pop())

    async def _conversation(
        self, client: ChatClient, scale: TextScale, history: int, repetition: int
    ) -> None:
        player = self._player(client, history, repetition)
        conversation_id = await client.create_conversation(_TITLE)
        self._conversations.append(conversation_id)
        base = await player.cold(conversation_id, scale.num_words(history))
        if base is None:
            return
        orders: tuple[tuple[Case, Case], ...] = (
            ("follow_up", "typed_ahead"),
            ("typed_ahead", "follow_up"),
        )
        tip = await player.branches(base, orders[repetition % 2])
        if tip is not None:
            self._kept.append(_Kept(history, repetition, tip))

    def _player(self, client: ChatClient, history: int, repetition: int) -> _Player:
        return _Player(client, self._options, self._on_sample, history, repetition)


class _Player:
    """Sends the turns of one conversation, one after the other."""

    def __init__(
        self,
        client: ChatClient,
        options: HistoriesOptions,
        on_sample: Callable[[HistorySample], None],
        history: int,
        repetition: int,
    ) -> None:
        self._client = client
        self._options = options
        self._on_sample = on_sample
        self._history = history
        self._repetition = repetition
        self._random = Random(f"{options.seed}/{history}/{repetition}")
        self._sampling = {
            "max_output_tokens": options.max_output_tokens,
            "ignore_eos": True,
            "seed": options.seed + repetition,
        }

    async def cold(self, conversation_id: str, num_words: int) -> _Parent | None:
        """The first turn, which is the history; None after a failure."""
        await asyncio.sleep(self._options.think_ms / 1e3)
        number = f"{self._repetition}.{self._history}"
        text = numbered(number, sentence(self._random, num_words))
        request = ResponseRequest(input=text, conversation=conversation_id, sampling=self._sampling)
        return await self._turn("cold", request, None)

    async def branches(self, base: _Parent, order: tuple[Case, Case]) -> _Parent | None:
        """All that is asked behind the history; the tip that is left, None after a failure."""
        first = await self.follow_up(order[0], base)
        if first is None:
            return None
        text = self._message()
        second = await self.follow_up(order[1], first, text)
        if second is None:
            return None
        beside: tuple[tuple[Case, str], ...] = (("regenerate", text), ("fork", self._message()))
        for case, its_text in beside:
            if await self.follow_up(case, first, its_text) is None:
                return None
        switched = await self.follow_up("branch_switch", second)
        return None if switched is None else await self.follow_up("plain", switched)

    async def follow_up(
        self, case: Case, parent: _Parent, text: str | None = None
    ) -> _Parent | None:
        """One turn behind `parent`, after a pause; `text` None is a message of its own."""
        await asyncio.sleep(self._options.think_ms / 1e3)
        message = text or self._message()
        typed = None
        if case == "typed_ahead":
            try:
                typed = await type_message(
                    self._client,
                    half_typed(message),
                    parent.response_id,
                    type_ms=self._options.type_ms,
                )
            except ChatrtError as error:
                self._failed(case, parent, error)
                return None
        own: dict[str, Any] = {"speculation": {"enabled": False}} if case == "plain" else {}
        request = ResponseRequest(
            input=message,
            previous_response_id=parent.response_id,
            sampling=self._sampling,
            chatrt=own,
        )
        return await self._turn(case, request, parent, typed)

    async def _turn(
        self,
        case: Case,
        request: ResponseRequest,
        parent: _Parent | None,
        typed: TypedAhead | None = None,
    ) -> _Parent | None:
        try:
            answer = await self._client.send(request, typed=typed)
            result = await answer.collect()
        except ChatrtError as error:
            self._failed(case, parent, error)
            return None
        figures = TurnFigures.of(result)
        ended_well = result.status in ("completed", "incomplete")
        length = figures.input_tokens if parent is None else parent.num_tokens
        error_text = None if ended_well else f"the turn ended as {result.status}"
        self._on_sample(self._sample(case, length, figures, error_text))
        if not ended_well or result.response_id is None:
            return None
        return _Parent(result.response_id, figures.num_tokens)

    def _failed(self, case: Case, parent: _Parent | None, error: ChatrtError) -> None:
        length = self._history if parent is None else parent.num_tokens
        text = f"{error.code}: {error.message}"
        self._on_sample(self._sample(case, length, TurnFigures(), text))

    def _sample(
        self, case: Case, history_tokens: int, figures: TurnFigures, error: str | None
    ) -> HistorySample:
        return HistorySample(case, self._history, self._repetition, history_tokens, figures, error)

    def _message(self) -> str:
        return sentence(self._random, self._options.message_words)


def num_planned(options: HistoriesOptions, *, restored: bool) -> int:
    """Turns of a run in which none fails."""
    return len(options.histories) * options.repetitions * (_NUM_TURNS + restored)


async def _check_room(client: ChatClient, options: HistoriesOptions, scale: TextScale) -> None:
    models = await client.http.models()
    max_context = models[0].get("max_context") if models else None
    message = options.message_words * scale.tokens_per_word + max(scale.overhead_tokens, 0)
    # The longest chain: follow-up, typed ahead, branch switch, plain and restored.
    behind = round(5 * (message + options.max_output_tokens)) + options.max_output_tokens
    longest = max(options.histories)
    if isinstance(max_context, int) and longest + behind > max_context:
        raise InvalidValue(
            f"a history of {longest} tokens and about {behind} that follow it do not fit: the "
            f"context holds {max_context}",
            param="--histories",
        )


def _rotated(histories: tuple[int, ...], by: int) -> tuple[int, ...]:
    start = by % len(histories)
    return histories[start:] + histories[:start]


@contextlib.asynccontextmanager
async def _connected(endpoint: Endpoint) -> AsyncIterator[ChatClient]:
    async with await ChatClient.connect(endpoint.url, api_key=endpoint.api_key) as client:
        yield client
