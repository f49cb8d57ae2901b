"""Running streams beside long prompts: when each delta arrived, and what each prompt waited.

    # a round     [a long prompt alone] [streams start] [quiet] [another long prompt] [streams end]

Knows: the client, questions that look real, long texts that share no prefix.
Does not know: where the server is from, which gap counts as what, tables. Never imports torch.
Invariant: a delta is stamped at the socket, before parsing, and every gap lies within one answer: a
stream that starts its next answer leaves none. Prompts alone and beside streams take turns.
Cost: this process shares the machine with the server, and its share of the cores is in the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from chatrt.bench.prompts import bundled_prompts
from chatrt.bench.stall_figures import sorted_gaps
from chatrt.bench.text_scale import measure_scale, numbered
from chatrt.bench.turn_figures import TurnFigures
from chatrt.bench.workload import sentence
from chatrt.client import ChatClient, ResponseRequest
from chatrt.errors import ChatrtError, InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from chatrt.bench.text_scale import TextScale
    from chatrt.client import Answer
    from chatrt.launch import Endpoint

# Kinds of prompts whose answers run on; short facts and extractions repeat themselves instead.
_LONG_KINDS = ("writing", "explain", "code", "casual")
_PROMPT_OUTPUT_TOKENS = 4
_ROUNDS_OF_EACH = 20  # rounds at most, for each prompt that was asked for
_TITLE = "chatrt bench stall"


@dataclass(frozen=True, slots=True)
class StallOptions:
    """How it is measured.

    `num_prompts` long prompts are sent beside the streams at least, and more until there are
    `min_gaps` gaps beside them. A round is quiet until every stream has had `quiet_chunks` deltas.
    A stream's answer ends with `stream_tokens` tokens, then it starts the next one.
    """

    num_streams: int = 2
    prompt_tokens: int = 4096
    num_prompts: int = 4
    min_gaps: int = 300
    quiet_chunks: int = 100
    stream_tokens: int = 1024
    seed: int = 0


@dataclass(slots=True)
class StreamSample:
    """One answer of a stream: when it was asked for, and each delta with its tokens.

    Times are in milliseconds from the start of the run.
    """

    round_index: int
    stream_index: int
    sent_ms: float
    delta_ms: list[float] = field(default_factory=list)
    delta_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PromptSample:
    """One long prompt, from its sending to its first delta; `error` is None if it ended well."""

    round_index: int
    beside_streams: bool
    sent_ms: float
    first_ms: float | None
    figures: TurnFigures
    error: str | None = None


class StallBench:
    """The rounds of a run; `streams` and `prompts` are its samples, also of a run cut short.

    Args:
        options: How it is measured.
        advance: Called behind each round.
    """

    def __init__(self, options: StallOptions, advance: Callable[[], None]) -> None:
        self.streams: list[StreamSample] = []
        self.prompts: list[PromptSample] = []
        self._options = options
        self._advance = advance
        self._started_ns = time.perf_counter_ns()
        self._conversations: list[str] = []
        self._random = Random(f"{options.seed}/stall")
        self._numbers = itertools.count()
        texts = [prompt.text for prompt in bundled_prompts(_LONG_KINDS)]
        self._random.shuffle(texts)
        self._questions: Iterator[str] = itertools.cycle(texts)

    async def run(self, endpoint: Endpoint) -> None:
        """Take all samples.

        Raises:
            ChatrtError: The server cannot be reached, or a stream failed.
            InvalidValue: A prompt or a stream is longer than the model's context.
        """
        options = self._options
        async with AsyncExitStack() as stack:
            clients = []
            for _ in range(options.num_streams + 1):
                client = await ChatClient.connect(endpoint.url, api_key=endpoint.api_key)
                clients.append(await stack.enter_async_context(client))
            await _check_room(clients[-1], options)
            scale = await measure_scale(clients[-1], seed=options.seed)
            try:
                for index in range(options.num_prompts * _ROUNDS_OF_EACH):
                    if index >= options.num_prompts and self._num_busy_gaps() >= options.min_gaps:
                        break
                    await self._round(index, clients, scale)
                    self._advance()
            finally:
                await self._delete(clients[-1])

    async def _round(self, index: int, clients: list[ChatClient], scale: TextScale) -> None:
        await self._prompt(index, clients[-1], scale, beside_streams=False)
        streams = [
            _Stream(self, client, index, stream_index)
            for stream_index, client in enumerate(clients[:-1])
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for stream in streams:
                    group.create_task(stream.run())
                try:
                    for stream in streams:
                        await stream.quiet.wait()
                    await self._prompt(index, clients[-1], scale, beside_streams=True)
                finally:
                    for stream in streams:
                        await stream.stop()
        except ExceptionGroup as failures:
            # One sentence says more than a group: where a server is gone, all streams say the same.
            raise failures.exceptions[0] from failures

    async def _prompt(
        self, index: int, client: ChatClient, scale: TextScale, *, beside_streams: bool
    ) -> None:
        num_words = scale.num_words(self._options.prompt_tokens)
        text = numbered(str(next(self._numbers)), sentence(self._random, num_words))
        sampling = {"max_output_tokens": _PROMPT_OUTPUT_TOKENS, "ignore_eos": True}
        answer = await self._ask(client, text, sampling)
        sent_ms, first_ms, error = self._since_start_ms(answer.sent_ns), None, None
        try:
            async for event in answer:
                if event.delta and first_ms is None:
                    first_ms = self._since_start_ms(event.received_ns)
        except ChatrtError as failure:
            error = f"{failure.code}: {failure.message}"
        result = answer.recorder.result()
        if error is None and result.status not in ("completed", "incomplete"):
            error = f"the turn ended as {result.status}"
        figures = TurnFigures.of(result)
        self.prompts.append(PromptSample(index, beside_streams, sent_ms, first_ms, figures, error))

    async def _ask(
        self,
        client: ChatClient,
        text: str,
        sampling: dict[str, Any],
        **ours: object,
    ) -> Answer:
        conversation_id = await client.create_conversation(_TITLE)
        self._conversations.append(conversation_id)
        sampling = {**sampling, "seed": self._options.seed}
        request = ResponseRequest(
            input=text, conversation=conversation_id, sampling=sampling, chatrt=ours
        )
        return await client.send(request)

    def _since_start_ms(self, time_ns: int) -> float:
        return (time_ns - self._started_ns) / 1e6

    def _num_busy_gaps(self) -> int:
        return len(sorted_gaps(self.streams, self.prompts).busy_ms)

    async def _delete(self, client: ChatClient) -> None:
        # A server that is gone is no reason to hide what was measured.
        with contextlib.suppress(ChatrtError):
            while self._conversations:
                await client.http.delete_conversation(self._conversations.pop())


class _Stream:
    """One answer after the other, until it is told to stop.

    `quiet` is set when as many deltas have arrived as the round's quiet part takes.
    """

    def __init__(
        self, bench: StallBench, client: ChatClient, round_index: int, stream_index: int
    ) -> None:
        self.quiet = asyncio.Event()
        self._bench = bench
        self._client = client
        self._round_index = round_index
        self._stream_index = stream_index
        self._answer: Answer | None = None
        self._stopped = False
        self._num_deltas = 0

    async def run(self) -> None:
        """Ask and read.

        Raises:
            ChatrtError: An answer was refused or failed.
        """
        try:
            while not self._stopped:
                await self._one_answer()
        finally:
            self.quiet.set()

    async def stop(self) -> None:
        """Cancel the running answer; `run` ends behind it."""
        self._stopped = True
        if self._answer is not None:
            await self._answer.cancel()

    async def _one_answer(self) -> None:
        bench = self._bench
        sampling = {"max_output_tokens": bench._options.stream_tokens, "ignore_eos": True}
        answer = await bench._ask(self._client, next(bench._questions), sampling, timing="token")
        sample = StreamSample(
            self._round_index, self._stream_index, bench._since_start_ms(answer.sent_ns)
        )
        bench.streams.append(sample)
        self._answer = answer
        if self._stopped:  # it was told so while it asked
            await answer.cancel()
        async for event in answer:
            if event.delta:
                sample.delta_ms.append(bench._since_start_ms(event.received_ns))
                sample.delta_tokens.append(int((event.data.get("chatrt") or {}).get("n", 1)))
                self._num_deltas += 1
                if self._num_deltas >= bench._options.quiet_chunks:
                    self.quiet.set()
        failure = answer.recorder.result().error
        if failure is not None:
            raise failure


async def _check_room(client: ChatClient, options: StallOptions) -> None:
    models = await client.http.models()
    max_context = models[0].get("max_context") if models else None
    if not isinstance(max_context, int):
        return
    for name, num_tokens in (
        ("--prompt-tokens", options.prompt_tokens + _PROMPT_OUTPUT_TOKENS),
        ("--stream-tokens", options.stream_tokens),
    ):
        if num_tokens >= max_context:
            raise InvalidValue(
                f"{name} needs {num_tokens} tokens, the context holds {max_context}", param=name
            )
