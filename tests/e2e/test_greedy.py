"""Greedy text of the real server: in float32 that of transformers, natively the same in company.

How far native text may part from float32's is `test_quality`'s.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from chatrt.text.tokenizer import Tokenizer
from tests.e2e.process import ServerProcess, turn
from tests.support import time_scale

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from chatrt.models.files import ModelFiles
    from tests.conftest import ModelCache

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_TOKENS = 48
MIN_IDENTICAL = 18
PARITY_MARGIN = 0.05  # top-2 margin of log-probabilities below which two floats may disagree
END_OF_TURN = "<|im_end|>"

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three primary colours.",
    "Explain photosynthesis in one sentence.",
    "def fibonacci(n):",
    "Translate to Spanish: good morning, my friend.",
    "What is 17 + 25?",
    "Tell me a joke about a cat.",
    "Who wrote Romeo and Juliet?",
    "Summarise: The quick brown fox jumps over the lazy dog while the farmer sleeps.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Wie heißt die Hauptstadt von Österreich?",
    "日本の首都はどこですか?",
    "Rewrite in upper case: hello world",
    "Name a planet with rings. 🪐",
    "Write an SQL query that counts the users.",
    "   leading and trailing spaces   ",
    "What comes after Monday?\n\nAnd before Friday?",
    "Continue the story: Once upon a time, a dragon lived in a library.",
)

Tokens = list[dict[str, Any]]
"""The answer's log-probability entries: each token with its likeliest alternatives."""


async def answer(server: ServerProcess, text: str) -> Tokens:
    """The tokens of a greedy answer, on a connection of its own."""
    async with server.caller() as caller:
        ended = await turn(
            caller,
            text,
            max_output_tokens=NUM_TOKENS,
            top_logprobs=2,
            include=["message.output_text.logprobs"],
            chatrt={"repetition_penalty": 1},  # the model's own default is not plain greedy
        )
    tokens: Tokens = ended["response"]["output"][0]["content"][0]["logprobs"]
    assert len(tokens) == ended["response"]["usage"]["output_tokens"]
    return tokens


def margin(token: dict[str, Any]) -> float:
    """How far the likeliest token is ahead of the second, in log-probability."""
    best, second = (one["logprob"] for one in token["top_logprobs"])
    return float(best - second)


def token_bytes(tokens: Tokens) -> list[bytes]:
    return [bytes(token["bytes"]) for token in tokens]


def first_difference(a: list[bytes], b: list[bytes]) -> int | None:
    """Where two answers part; None if they are equal. A shorter one parts at its end."""
    if a == b:
        return None
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(map(len, (a, b)))
    )


def reference_answers(files: ModelFiles) -> list[list[bytes]]:
    """Greedy tokens of transformers' own model, dequantised by its own reader."""
    import torch

    from chatrt.text.messages import Message
    from chatrt.text.prompt import PromptBuilder
    from tests.chatrt.test_models_parity import dequantised_by_transformers

    tokenizer = Tokenizer.load(files.tokenizer_dir)
    builder = PromptBuilder(tokenizer)
    model = dequantised_by_transformers(files.path)
    (end_id,) = tokenizer.encode(END_OF_TURN)
    prompts = [builder.first_prompt([Message("user", text)]) for text in PROMPTS]
    longest = max(map(len, prompts))
    # One batch, padded on the left: twenty times as fast as one after the other.
    padded = [[end_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=end_id,
            pad_token_id=end_id,
        )
    return [_until_end(tokenizer, new, end_id) for new in ids[:, longest:].tolist()]


def _until_end(tokenizer: Tokenizer, ids: list[int], end_id: int) -> list[bytes]:
    """The tokens up to and with the end of the turn; what follows is the batch's padding."""
    num_tokens = ids.index(end_id) + 1 if end_id in ids else len(ids)
    return [tokenizer.token_bytes(one, skip_special=False) for one in ids[:num_tokens]]


async def one_after_the_other(server: ServerProcess, texts: Sequence[str]) -> list[Tokens]:
    """Each prompt's answer while nothing else runs."""
    return [await answer(server, text) for text in texts]


@pytest.fixture
def reference_server(
    model_cache: ModelCache, default_model_files: ModelFiles, tmp_path: Path
) -> Iterator[ServerProcess]:
    """The default model in float32, served by PyTorch's own operations."""
    del default_model_files  # its tokenizer is there
    home = model_cache.share_with(tmp_path / "reference")
    flags = ("--kernels", "reference", "--kv-memory-bytes", "64MiB", "--max-context", "1024")
    running = ServerProcess.start(home, None, *flags)
    yield running
    running.kill()


@pytest.mark.timeout(240)
async def test_greedy_text_in_float32_is_that_of_transformers(
    reference_server: ServerProcess, default_model_files: ModelFiles
) -> None:
    answers = await one_after_the_other(reference_server, PROMPTS)
    expected = reference_answers(default_model_files)
    different: dict[str, float] = {}
    for text, tokens, reference in zip(PROMPTS, answers, expected, strict=True):
        where = first_difference(token_bytes(tokens), reference)
        if where is not None:
            different[text] = margin(tokens[min(where, len(tokens) - 1)])
    assert len(PROMPTS) - len(different) >= MIN_IDENTICAL, different
    assert all(one < PARITY_MARGIN for one in different.values()), different


async def test_eight_conversations_at_once_each_say_what_they_say_alone(
    server: ServerProcess,
) -> None:
    texts = PROMPTS[:8]
    alone = await one_after_the_other(server, texts)
    async with asyncio.timeout(100 * time_scale()):
        together = await asyncio.gather(*(answer(server, text) for text in texts))
    for text, one, other in zip(texts, alone, together, strict=True):
        assert token_bytes(one) == token_bytes(other), text
        # Not only the text: every bit, whoever stood beside it.
        assert [token["logprob"] for token in one] == [token["logprob"] for token in other], text
