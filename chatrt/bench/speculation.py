"""The same answers without speculation and with it, in turns: how long they take, which tokens.

    # timed       [every answer's first token is out, the last answer has ended)
    # alike       each run is cold: a salt of its own, forgotten as soon as it has ended

Knows: the engine's calls, the template that makes a question of a prompt, a clock.
Does not know: who drafts, what the figures are, tables.
Invariant: the two runs of a pair differ in nothing but the engine that gives them, and which of
them comes first changes from pair to pair.
Cost: two prefills and two answers a pair; with several conversations at once each question is
answered once more, alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from chatrt.params import SamplingParams
from chatrt.text.messages import Message
from chatrt.text.prompt import PromptBuilder
from chatrt.turn import (
    FinishedEvent,
    SpeculationFigures,
    TokensEvent,
    TurnKind,
    TurnRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from chatrt.bench.prompts import Prompt
    from chatrt.engine import Engine
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import EngineEvent

RANDOM_KIND = "random"
RANDOM_TEMPERATURE = 2.0
NUM_WARM_UP_PAIRS = 1
_WARM_UP_TOKENS = 16
_RANDOM_PROMPT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as the model reads it, and the seed that its answers are sampled with."""

    prompt_id: str
    kind: str
    token_ids: tuple[int, ...]
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """How the questions are answered.

    `depth` is how many tokens every step drafts, None leaves it to the controller. With `at_once`
    conversations a pair is a group of so many questions and `num_pairs` counts groups; otherwise
    each question has `num_pairs` pairs.
    """

    num_tokens: int = 200
    temperatures: tuple[float, ...] = (0.0, 0.8)
    depth: int | None = None
    at_once: int = 1
    num_pairs: int = 1
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class AnswerSample:
    """One answer; `num_passes` counts the target's passes behind the one that gave token 1."""

    prompt_id: str
    kind: str
    token_ids: tuple[int, ...]
    num_passes: int
    speculation: SpeculationFigures


@dataclass(frozen=True, slots=True)
class RunSample:
    """Answers that were given together: `num_tokens` came out in the `decode_ms` that count.

    None came out in no time where every answer had ended with its first token.
    """

    answers: tuple[AnswerSample, ...]
    num_tokens: int
    decode_ms: float

    @property
    def ms_per_token(self) -> float:
        """Of decoding; there must be a token that was timed."""
        return self.decode_ms / self.num_tokens


@dataclass(frozen=True, slots=True)
class PairSample:
    """The same questions without and with speculation.

    `unit` names what is drawn when intervals are made: the prompt, or the group. `alone` are the
    answers that each question had by itself, without speculation; None where they were not asked
    for.
    """

    unit: str
    temperature: float
    off: RunSample
    on: RunSample
    alone: tuple[tuple[int, ...], ...] | None = None


def chat_questions(prompts: Sequence[Prompt], tokenizer: Tokenizer, *, seed: int) -> list[Question]:
    """Prompts as the model's template renders them; each has a seed of its own, from `seed` on.

    Raises:
        UnsupportedModel: The model has no chat template.
        InvalidValue: The template refuses a prompt's messages.
    """
    builder = PromptBuilder(tokenizer)
    questions = []
    for index, prompt in enumerate(prompts):
        token_ids = builder.first_prompt([*prompt.history, Message("user", prompt.text)])
        questions.append(Question(prompt.id, prompt.kind, tuple(token_ids), seed + index))
    return questions


def random_questions(
    ordinary_ids: Sequence[int], count: int, *, max_tokens: int, seed: int
) -> list[Question]:
    """Prompts that no text looks like: tokens drawn from `ordinary_ids`, 64 or `max_tokens`."""
    generator = Random(seed)
    length = min(_RANDOM_PROMPT_TOKENS, max_tokens)
    return [
        Question(
            f"{RANDOM_KIND}-{index + 1}",
            RANDOM_KIND,
            tuple(generator.choices(ordinary_ids, k=length)),
            seed + index,
        )
        for index in range(count)
    ]


class SpeculationBench:
    """Answers questions in pairs, on two engines of one model that nobody else uses.

    "Off" is an engine without a drafter: one that has a head writes the head's rows behind every
    pass, whether or not it drafts.

    Args:
        on_engine: With the drafter that is measured.
        off_engine: Without any, and with the same longest context.
        questions: At least one; each fits the context.
        options: How they are answered.
        clock: Nanoseconds, monotonic.
    """

    def __init__(
        self,
        on_engine: Engine,
        off_engine: Engine,
        questions: Sequence[Question],
        options: SpeculationOptions,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.pairs: list[PairSample] = []
        self._on = on_engine
        self._off = off_engine
        self._questions = list(questions)
        self._options = options
        self._clock = clock
        self._num_runs = 0
        self._alone: dict[tuple[str, float], tuple[int, ...]] = {}

    @property
    def num_pairs(self) -> int:
        """Pairs that `run` measures, each of which it counts with one call of `advance`."""
        num_units = 1 if self._options.at_once > 1 else len(self._questions)
        return num_units * self._options.num_pairs * len(self._options.temperatures)

    def run(self, advance: Callable[[], None]) -> None:
        """Take all samples; `advance` is called behind each pair.

        Raises:
            ChatrtError: A turn failed.
        """
        self._warm_up()
        for index, (unit, group) in enumerate(self._groups()):
            for temperature in self._options.temperatures:
                self.pairs.append(self._pair(unit, group, temperature, off_first=index % 2 == 0))
                advance()

    def _warm_up(self) -> None:
        few = replace(self._options, num_tokens=min(_WARM_UP_TOKENS, self._options.num_tokens))
        _, group = next(self._groups())
        for _ in range(NUM_WARM_UP_PAIRS):
            for engine in (self._off, self._on):
                self._run(engine, group, few, few.temperatures[0])

    def _groups(self) -> Iterator[tuple[str, list[Question]]]:
        """What is asked together, with the name of the unit that it is."""
        questions, size = self._questions, self._options.at_once
        if size == 1:
            for _ in range(self._options.num_pairs):
                for question in questions:
                    yield question.prompt_id, [question]
            return
        for index in range(self._options.num_pairs):
            positions = range(index * size, (index + 1) * size)
            yield f"group-{index + 1}", [questions[i % len(questions)] for i in positions]

    def _pair(
        self, unit: str, group: list[Question], temperature: float, *, off_first: bool
    ) -> PairSample:
        options = self._options
        order = (self._off, self._on) if off_first else (self._on, self._off)
        first, second = (self._run(engine, group, options, temperature) for engine in order)
        off, on = (first, second) if off_first else (second, first)
        alone = None
        if options.at_once > 1:
            alone = tuple(self._answer_alone(question, temperature) for question in group)
        return PairSample(unit, temperature, off, on, alone)

    def _answer_alone(self, question: Question, temperature: float) -> tuple[int, ...]:
        key = (question.prompt_id, temperature)
        if key not in self._alone:
            run = self._run(self._off, [question], self._options, temperature)
            self._alone[key] = run.answers[0].token_ids
        return self._alone[key]

    def _run(
        self,
        engine: Engine,
        group: Sequence[Question],
        options: SpeculationOptions,
        temperature: float,
    ) -> RunSample:
        """One answer to each question, all at once."""
        self._num_runs += 1
        turns: dict[str, _Turn] = {}
        for index, question in enumerate(group):
            response_id = f"bench-speculation-{self._num_runs}-{index}"
            turns[response_id] = _Turn(question)
            engine.submit(_request(response_id, question, options, temperature))
        num_tokens, decode_ms = self._decode(engine, turns)
        engine.forget(turns)
        return RunSample(tuple(turn.sample() for turn in turns.values()), num_tokens, decode_ms)

    def _decode(self, engine: Engine, turns: dict[str, _Turn]) -> tuple[int, float]:
        """Step until all turns have ended; the tokens and milliseconds that count."""
        num_untimed: int | None = None
        started_ns = now_ns = 0
        while any(turn.finished is None for turn in turns.values()):
            worked = engine.step()
            now_ns = self._clock()
            assert worked, "the turns wait for something that no step brings"
            for event in engine.take_events():
                turns[event.response_id].add(event)
            if num_untimed is None and all(turn.num_events for turn in turns.values()):
                started_ns = now_ns
                num_untimed = sum(len(turn.token_ids) for turn in turns.values())
        num_tokens = sum(len(turn.token_ids) for turn in turns.values())
        return num_tokens - (num_untimed or 0), (now_ns - started_ns) / 1e6


class _Turn:
    """What the events have told of one turn."""

    def __init__(self, question: Question) -> None:
        self.token_ids: list[int] = []
        self.num_events = 0
        self.finished: FinishedEvent | None = None
        self._question = question

    def add(self, event: EngineEvent) -> None:
        """Take one more event.

        Raises:
            ChatrtError: It says that the turn failed.
        """
        if isinstance(event, TokensEvent):
            self.token_ids += event.token_ids
            self.num_events += 1
        elif isinstance(event, FinishedEvent):
            if event.error is not None:
                raise event.error
            self.finished = event

    def sample(self) -> AnswerSample:
        """The answer, once it has ended."""
        assert self.finished is not None
        question = self._question
        return AnswerSample(
            question.prompt_id,
            question.kind,
            tuple(self.token_ids),
            num_passes=self.num_events - 1,
            speculation=self.finished.speculation,
        )


def _request(
    response_id: str, question: Question, options: SpeculationOptions, temperature: float
) -> TurnRequest:
    return TurnRequest(
        response_id=response_id,
        kind=TurnKind.ANSWER,
        token_ids=list(question.token_ids),
        num_history=0,
        sampling=SamplingParams(
            temperature=temperature,
            seed=question.seed,
            max_output_tokens=options.num_tokens,
            ignore_eos=options.ignore_eos,
        ),
        salt=response_id,
        speculation_tokens=options.depth,  # an engine without a drafter drafts nothing
    )
