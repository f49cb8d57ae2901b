"""The same conversations in chatrt and in its peers, in turns.

    # a round      decode            chatrt   llama.cpp   transformers    a question, a long answer
    #              prefill           llama.cpp   transformers   chatrt    one prompt
    #              each history      …           first turn as long as it, then a follow-up

Knows: the client, the peers' processes, what is asked and in which order.
Does not know: where the server is from, ratios, tables. Never imports torch.
Invariant: what one round asks, it asks all of them in the same words, one at a time, each from its
own best side: chatrt behind its socket, a peer from within its process. No two conversations begin
alike. All answers are greedy and end where the model ends them. Who comes first changes from round
to round. A peer that fails takes no further part, and what it had done counts.
Cost: a round prefills every history once in each of them; who waits computes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from chatrt.bench.prompts import bundled_prompts
from chatrt.bench.text_scale import measure_scale, numbered
from chatrt.bench.workload import sentence
from chatrt.client import ChatClient, ResponseRequest
from chatrt.errors import InvalidValue, PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatrt.bench.peers_process import PeerAnswer, PeerProcess
    from chatrt.bench.text_scale import TextScale
    from chatrt.launch import Endpoint

OURS = "chatrt"
Measure: TypeAlias = Literal["decode", "decode_speculation", "prefill", "ttft_cold", "ttft_warm"]
# Questions whose answers run on; short facts and extractions end at once.
_LONG_KINDS = ("writing", "explain", "code", "casual")
_FIRST_TOKENS = 8  # of an answer whose beginning is all that matters


@dataclass(frozen=True, slots=True)
class PeersOptions:
    """What is asked: lengths are in tokens, `histories` each once a round.

    `think_ms` is a person's pause before each turn, in which nobody computes but who has work left.
    """

    histories: tuple[int, ...] = (260, 920, 3600)
    repetitions: int = 5
    prefill_tokens: int = 512
    decode_tokens: int = 128
    message_words: int = 15
    think_ms: int = 300
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest first prompt, an answer to a question included."""
        return max(*self.histories, self.prefill_tokens, 2 * self.decode_tokens)

    @property
    def room(self) -> int:
        """Tokens of context that the longest conversation needs, with as much again for words."""
        return self.longest + 4 * self.message_words + self.decode_tokens + 256


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """One turn: milliseconds to its first text, and for each token behind it.

    A model may end its answer with the first token: then `ttft_ms` runs until the answer ended, and
    that token had been decided. `tpot_ms` is None for fewer than two tokens, `cached_tokens` None
    where it is not told.
    """

    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    ttft_ms: float
    tpot_ms: float | None

    @classmethod
    def of_pieces(
        cls,
        prompt_tokens: int,
        cached_tokens: int | None,
        output_tokens: int,
        pieces_ms: Sequence[float],
        ended_ms: float,
    ) -> TurnTimes:
        """The times of a turn whose pieces of text came `pieces_ms` after it began."""
        several = output_tokens > 1 and len(pieces_ms) > 1
        return cls(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            ttft_ms=pieces_ms[0] if pieces_ms else ended_ms,
            tpot_ms=(pieces_ms[-1] - pieces_ms[0]) / (output_tokens - 1) if several else None,
        )


@dataclass(frozen=True, slots=True)
class PeersSample:
    """One turn of `engine` (`chatrt` or one of `PEERS`) in one round; `history` None: has none."""

    engine: str
    measure: Measure
    history: int | None
    round_index: int
    times: TurnTimes


class Contestant(Protocol):
    """What takes part."""

    @property
    def engine(self) -> str:
        """`chatrt`, or one of `PEERS`."""
        ...

    def converse(
        self, texts: Sequence[str], *, max_tokens: int, speculation: bool
    ) -> list[TurnTimes]:
        """The turns of one new conversation; `speculation` False forbids drafts.

        Raises:
            ChatrtError: A turn failed.
        """
        ...


class OurServer:
    """chatrt as people use it: over the socket, on a connection for each conversation."""

    engine = OURS

    def __init__(self, endpoint: Endpoint, *, think_ms: int) -> None:
        self._endpoint = endpoint
        self._think_ms = think_ms

    def converse(
        self, texts: Sequence[str], *, max_tokens: int, speculation: bool
    ) -> list[TurnTimes]:
        """As `Contestant` says."""
        return asyncio.run(self._converse(texts, max_tokens, speculation))

    async def _converse(
        self, texts: Sequence[str], max_tokens: int, speculation: bool
    ) -> list[TurnTimes]:
        turns: list[TurnTimes] = []
        parent = None
        own = {} if speculation else {"speculation": {"enabled": False}}
        endpoint = self._endpoint
        async with await ChatClient.connect(endpoint.url, api_key=endpoint.api_key) as client:
            for text in texts:
                await asyncio.sleep(self._think_ms / 1e3)
                request = ResponseRequest(
                    input=text,
                    previous_response_id=parent,
                    sampling={"max_output_tokens": max_tokens, "temperature": 0.0},
                    chatrt=own,
                )
                times, parent = await _timed_turn(client, request)
                turns.append(times)
        return turns


class Peer:
    """A loaded peer, asked from within its process. It drafts nothing."""

    def __init__(self, process: PeerProcess, *, think_ms: int) -> None:
        self.engine = process.engine
        self._process = process
        self._think_ms = think_ms

    def converse(
        self, texts: Sequence[str], *, max_tokens: int, speculation: bool
    ) -> list[TurnTimes]:
        """As `Contestant` says."""
        del speculation
        turns: list[TurnTimes] = []
        messages: list[dict[str, str]] = []
        for text in texts:
            time.sleep(self._think_ms / 1e3)
            messages.append({"role": "user", "content": text})
            answer = self._process.chat(messages, max_tokens=max_tokens)
            messages.append({"role": "assistant", "content": answer.text})
            turns.append(times_of(answer))
        return turns


def times_of(answer: PeerAnswer) -> TurnTimes:
    """The times of a peer's answer."""
    return TurnTimes.of_pieces(
        answer.prompt_tokens,
        answer.cached_tokens,
        answer.output_tokens,
        answer.pieces_ms,
        answer.ended_ms,
    )


@dataclass(frozen=True, slots=True)
class _Task:
    """One conversation that everybody has in a round: what its turns are samples of."""

    measures: tuple[Measure, ...]
    history: int | None
    texts: tuple[str, ...]
    max_tokens: int


class PeersBench:
    """The rounds of a run; `samples`, and `failures` by engine, outlive whatever ends it.

    Args:
        options: What is asked.
        endpoint: Our server, ready.
        peers: Loaded.
    """

    def __init__(
        self, options: PeersOptions, endpoint: Endpoint, peers: Sequence[PeerProcess]
    ) -> None:
        self.samples: list[PeersSample] = []
        self.failures: dict[str, str] = {}
        self._options = options
        self._endpoint = endpoint
        self._contestants: list[Contestant] = [
            OurServer(endpoint, think_ms=options.think_ms),
            *(Peer(process, think_ms=options.think_ms) for process in peers),
        ]
        self._num_contestants = len(self._contestants)
        texts = [prompt.text for prompt in bundled_prompts(_LONG_KINDS)]
        Random(f"{options.seed}/questions").shuffle(texts)
        self._questions = itertools.cycle(texts)

    @property
    def num_planned(self) -> int:
        """Conversations of a run in which none fails, the warm-up included."""
        options = self._options
        # Warm-up; question and prefill, each history, and our question once more with drafts.
        each_round = (2 + len(options.histories)) * self._num_contestants + 1
        return self._num_contestants + options.repetitions * each_round

    def run(self, advance: Callable[[], None]) -> None:
        """Take all samples; `advance` is called behind each conversation.

        Raises:
            ChatrtError: Our server cannot be reached, or a turn on it failed.
            InvalidValue: A history is longer than the model's context.
        """
        options = self._options
        scale = asyncio.run(_scale(self._endpoint, options))
        random = Random(f"{options.seed}/peers")
        for contestant in self._rotated(0):
            self._converse(contestant, _warm_up(random), -1, advance)
        for index in range(options.repetitions):
            for turn, task in enumerate(self._tasks(index, random, scale)):
                for contestant in self._rotated(index + turn):
                    self._converse(contestant, task, index, advance)

    def _tasks(self, index: int, random: Random, scale: TextScale) -> list[_Task]:
        options = self._options

        def first(num_tokens: int) -> str:
            words = sentence(random, scale.num_words(num_tokens))
            return numbered(f"{index}.{num_tokens}", words)

        tasks = [
            _Task(("decode",), None, (next(self._questions),), options.decode_tokens),
            _Task(("prefill",), None, (first(options.prefill_tokens),), _FIRST_TOKENS),
        ]
        for history in options.histories:
            texts = (first(history), sentence(random, options.message_words))
            tasks.append(_Task(("ttft_cold", "ttft_warm"), history, texts, _FIRST_TOKENS))
        return tasks

    def _converse(
        self, contestant: Contestant, task: _Task, index: int, advance: Callable[[], None]
    ) -> None:
        self._play(contestant, task, index)
        advance()
        if contestant.engine == OURS and task.measures == ("decode",):
            self._play(
                contestant, dataclasses.replace(task, measures=("decode_speculation",)), index
            )
            advance()

    def _play(self, contestant: Contestant, task: _Task, index: int) -> None:
        engine = contestant.engine
        try:
            turns = contestant.converse(
                task.texts, max_tokens=task.max_tokens, speculation=task.measures != ("decode",)
            )
        except PeerFailed as error:
            self.failures[engine] = error.message
            self._contestants = [one for one in self._contestants if one.engine != engine]
            return
        self.samples += [
            PeersSample(engine, measure, task.history, index, times)
            for measure, times in zip(task.measures, turns, strict=False)
        ]

    def _rotated(self, by: int) -> list[Contestant]:
        start = by % len(self._contestants)
        return self._contestants[start:] + self._contestants[:start]


def _warm_up(random: Random) -> _Task:
    """A conversation without measures."""
    return _Task((), None, (sentence(random, 8), sentence(random, 4)), _FIRST_TOKENS)


async def _timed_turn(client: ChatClient, request: ResponseRequest) -> tuple[TurnTimes, str | None]:
    """One answer's times, and the id that a follow-up names."""
    answer = await client.send(request)
    pieces_ms: list[float] = []
    ended_ms = 0.0
    async for event in answer:
        ended_ms = (event.received_ns - answer.sent_ns) / 1e6
        if event.delta:
            pieces_ms.append(ended_ms)
    result = answer.recorder.result()
    if result.error is not None:
        raise result.error
    details = result.usage.get("input_tokens_details") or {}
    times = TurnTimes.of_pieces(
        int(result.usage.get("input_tokens", 0)),
        int(details.get("cached_tokens", 0)),
        int(result.usage.get("output_tokens", 0)),
        pieces_ms,
        ended_ms,
    )
    return times, result.response_id


async def _scale(endpoint: Endpoint, options: PeersOptions) -> TextScale:
    async with await ChatClient.connect(endpoint.url, api_key=endpoint.api_key) as client:
        models = await client.http.models()
        max_context = models[0].get("max_context") if models else None
        if isinstance(max_context, int) and options.room > max_context:
            raise InvalidValue(
                f"a prompt of {options.longest} tokens and what follows it need {options.room} "
                f"tokens: the context holds {max_context}",
                param="--histories",
            )
        return await measure_scale(client, seed=options.seed)
