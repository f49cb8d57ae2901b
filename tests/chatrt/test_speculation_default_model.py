"""The default model says the same, to the bit, with every drafter as with none.

Each drafter has a runtime of its own, put together as the server's is, and so has plain decoding.
`make check-speculation` asks all bundled prompts for long answers; otherwise a few are asked.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from chatrt.bench.prompts import Prompt, bundled_prompts
from chatrt.cli.build import Runtime, build_runtime
from chatrt.params import SamplingParams
from chatrt.paths import Paths
from chatrt.settings import DEFAULT_MODEL, load
from chatrt.testing.engine import Outcome, outcomes, run_outcome, run_until_idle, turn_request
from chatrt.text.messages import Message
from chatrt.text.prompt import PromptBuilder
from chatrt.turn import FinishReason
from tests.chatrt_kernels.cpu_support import NATIVE_PATH, compiled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chatrt.models.files import ModelFiles
    from chatrt.turn import TurnRequest
    from tests.conftest import ModelCache

# Read when the tests are collected: within a test settings of the environment do not count.
ALL_PROMPTS = os.environ.get("CHATRT_ALL_PROMPTS") == "1"
NUM_TOKENS = 200 if ALL_PROMPTS else 32
PER_KIND = None if ALL_PROMPTS else 1
DRAFTERS = ("ngram", "head", "model", "auto")
WAYS = ("greedy", "seeded", "penalised")
MAX_DRAFT = 8
# What turns ask for, one after the other: None leaves it to depth control.
DEPTHS = (None, 4, 1, None, MAX_DRAFT)
LOOP = Prompt("loop", "loop", "Repeat five times: The cat sat on the mat, and the dog ran.")

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.timeout(3600 if ALL_PROMPTS else 120),
]


@dataclass(frozen=True)
class Asker:
    """Asks one runtime; nothing of an answer is left for the next one to reuse."""

    runtime: Runtime
    known: dict[tuple[object, ...], Outcome] = field(default_factory=dict)
    names: Iterator[int] = field(default_factory=itertools.count)

    def request(
        self, prompt: Prompt, sampling: SamplingParams, num_drafts: int | None = None
    ) -> TurnRequest:
        builder = PromptBuilder(self.runtime.tokenizer)
        token_ids = builder.first_prompt([*prompt.history, Message("user", prompt.text)])
        name = f"turn {next(self.names)}"
        request = turn_request(name, token_ids, sampling=sampling, salt=name)
        return replace(request, speculation_tokens=num_drafts)

    def answer(
        self, prompt: Prompt, sampling: SamplingParams, num_drafts: int | None = None
    ) -> Outcome:
        """The answer by itself."""
        request = self.request(prompt, sampling, num_drafts)
        found = run_outcome(self.runtime.engine, request)
        self.runtime.engine.forget([request.response_id])
        return found

    def known_answer(self, prompt: Prompt, sampling: SamplingParams) -> Outcome:
        """The same, worked out once for each question."""
        key = (prompt.id, repr(sampling))
        if key not in self.known:
            self.known[key] = self.answer(prompt, sampling)
        return self.known[key]

    def together(self, requests: list[TurnRequest]) -> list[Outcome]:
        """The answers of turns that run all at once."""
        for request in requests:
            self.runtime.engine.submit(request)
        found = outcomes(run_until_idle(self.runtime.engine))
        self.runtime.engine.forget(found)
        return [found[request.response_id] for request in requests]


@dataclass(frozen=True)
class Builder:
    """Makes runtimes of the default model."""

    files: ModelFiles
    cache: ModelCache

    def runtime(self, drafter: str) -> Runtime:
        paths = Paths.find({"CHATRT_HOME": str(self.cache.folder.parent)})
        flags = {
            "speculation": drafter,
            "draft": DEFAULT_MODEL if drafter == "model" else None,
            "max_draft": MAX_DRAFT,
            "kernels": "native",
            "kv_memory_bytes": "256MiB",
            "max_context": 2048 if ALL_PROMPTS else 1024,
        }
        resolved = load(flags, {}, paths.config_file)
        return build_runtime(self.files, resolved, paths, lambda _: None)


@pytest.fixture(scope="module")
def builder(default_model_files: ModelFiles, model_cache: ModelCache) -> Builder:
    compiled(NATIVE_PATH)  # or there is nothing to test
    return Builder(default_model_files, model_cache)


@pytest.fixture(scope="module")
def plain(builder: Builder) -> Asker:
    return Asker(builder.runtime("off"))


@pytest.fixture(scope="module", params=DRAFTERS)
def drafting(request: pytest.FixtureRequest, builder: Builder) -> Asker:
    return Asker(builder.runtime(request.param))


@pytest.fixture(scope="module")
def prompts() -> tuple[Prompt, ...]:
    return (LOOP, *bundled_prompts(per_kind=PER_KIND))


def samplings(runtime: Runtime, num_tokens: int = NUM_TOKENS) -> dict[str, SamplingParams]:
    """The three ways to choose tokens that every prompt is answered in."""
    encode = runtime.tokenizer.encode
    biases = {encode(word, behind=True)[0]: bias for word, bias in ((" the", -1.5), (" very", 3.0))}
    return {
        "greedy": SamplingParams(temperature=0.0, max_output_tokens=num_tokens),
        "seeded": SamplingParams(temperature=0.8, seed=17, max_output_tokens=num_tokens),
        "penalised": SamplingParams(
            temperature=0.9,
            seed=23,
            min_p=0.05,
            repetition_penalty=1.1,
            frequency_penalty=0.3,
            presence_penalty=0.2,
            logit_bias=biases,
            max_output_tokens=num_tokens,
        ),
    }


def assert_same(found: Outcome, plain: Outcome) -> None:
    """Tokens, text, ending and log-probabilities, bit for bit."""
    assert found.token_ids == plain.token_ids
    assert found.text == plain.text
    assert found.end.reason is plain.end.reason
    assert found.end.output_ids == plain.end.output_ids
    assert found.end.stop_string == plain.end.stop_string
    assert found.logprobs == plain.logprobs


@pytest.mark.parametrize("name", WAYS)
def test_every_answer_is_that_of_plain_decoding(
    plain: Asker, drafting: Asker, prompts: tuple[Prompt, ...], name: str
) -> None:
    sampling = samplings(plain.runtime)[name]
    # of a few prompts each way is asked a third, so that all of them are asked
    asked = prompts if ALL_PROMPTS else prompts[WAYS.index(name) :: len(WAYS)]
    num_accepted = 0
    for index, prompt in enumerate(asked):
        # log-probabilities of some: they are taken from rows in another way
        one = replace(sampling, top_logprobs=2 if index % 3 == 0 else None)
        depth = DEPTHS[index % len(DEPTHS)]
        found = drafting.answer(prompt, one, depth)
        assert_same(found, plain.known_answer(prompt, one))
        num_accepted += found.end.speculation.accepted
    assert num_accepted > 0


def test_an_answer_that_repeats_itself_stays_as_it_is(plain: Asker, drafting: Asker) -> None:
    # what was said before is likelier to be said again
    sampling = SamplingParams(temperature=0.0, repetition_penalty=0.6, max_output_tokens=80)
    found = drafting.answer(LOOP, sampling, MAX_DRAFT)
    assert_same(found, plain.known_answer(LOOP, sampling))
    assert found.end.speculation.mean_accepted_length > 1.5


def test_an_answer_ends_at_the_same_place_within_an_accepted_run(
    plain: Asker, drafting: Asker
) -> None:
    whole = SamplingParams(temperature=0.0, ignore_eos=True, max_output_tokens=40)
    answer = plain.known_answer(LOOP, whole)
    middle = len(answer.text) // 2
    endings: list[dict[str, object]] = [
        {"stop": (answer.text[middle : middle + 9],)},
        {"stop": (answer.text[middle - 9 : middle - 6], "never said")},
        {"stop_token_ids": (answer.token_ids[17],)},
        {"max_output_tokens": 1},
        {"max_output_tokens": 3},
        {"max_output_tokens": 8},
    ]
    for ending in endings:
        sampling = replace(whole, **ending)  # type: ignore[arg-type]  # names of its own fields
        expected = plain.known_answer(LOOP, sampling)
        assert len(expected.token_ids) < 40
        assert_same(drafting.answer(LOOP, sampling, MAX_DRAFT), expected)


def test_eight_conversations_at_once_each_say_what_they_say_alone(
    plain: Asker, drafting: Asker, prompts: tuple[Prompt, ...]
) -> None:
    ways = itertools.cycle(samplings(plain.runtime, 32).values())
    asked = list(zip(prompts[:8], ways, strict=False))
    depths = itertools.cycle(DEPTHS)
    requests = [drafting.request(prompt, way, next(depths)) for prompt, way in asked]
    for found, (prompt, way) in zip(drafting.together(requests), asked, strict=True):
        assert_same(found, plain.known_answer(prompt, way))


@pytest.mark.parametrize("drafting", ["model"], indirect=True)
def test_all_that_a_copy_of_the_model_drafts_is_accepted(plain: Asker, drafting: Asker) -> None:
    for sampling in samplings(plain.runtime, 40).values():
        for depth in (1, 2, 3, MAX_DRAFT):
            found = drafting.answer(LOOP, replace(sampling, ignore_eos=True), depth)
            assert found.end.reason is FinishReason.MAX_OUTPUT_TOKENS
            assert found.end.speculation.accepted == found.end.speculation.drafted > 15
