"""The default model as it is served, against the float32 reference with the same weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chatrt.bench.quality import (
    MAX_MEAN_KL,
    MAX_PERPLEXITY_CHANGE,
    bundled_text,
    measure,
    sequence_logits,
)
from chatrt.cli.bench_quality import TargetPair, load_pair
from chatrt.settings import Settings
from chatrt.text.messages import Message
from chatrt.text.prompt import PromptBuilder
from tests.e2e.test_greedy import NUM_TOKENS, PROMPTS
from tests.support import KERNEL_CACHE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.engine import Target
    from chatrt.models.files import ModelFiles

pytestmark = [pytest.mark.model, pytest.mark.slow]

WINDOW = 512
NUM_SCORED = 4096
NUM_PROMPTS = 10
MARGIN = 0.1  # top-2 margin of the reference below which the two may choose differently


@pytest.fixture(scope="module")
def pair(default_model_files: ModelFiles) -> TargetPair:
    return load_pair(default_model_files, Settings(), KERNEL_CACHE, WINDOW, print)


@pytest.mark.timeout(240)
def test_the_text_is_as_likely_as_it_is_to_the_reference(pair: TargetPair) -> None:
    token_ids = pair.reference.tokenizer.encode(bundled_text())[: NUM_SCORED + 1]
    figures = measure(pair.served, pair.reference, token_ids, WINDOW)
    assert figures.num_tokens == NUM_SCORED
    assert 15 < figures.perplexity.reference < 35
    assert abs(figures.perplexity_ratio - 1) <= MAX_PERPLEXITY_CHANGE, figures
    assert figures.mean_kl <= MAX_MEAN_KL, figures


@pytest.mark.timeout(240)
def test_greedy_text_is_the_reference_s_until_two_tokens_are_nearly_as_likely(
    pair: TargetPair,
) -> None:
    builder = PromptBuilder(pair.served.tokenizer)
    margins: dict[str, float] = {}
    for text in PROMPTS[:NUM_PROMPTS]:
        prompt = builder.first_prompt([Message("user", text)])
        answer = greedy_answer(pair.served, prompt)
        margin = parting_margin(pair.reference, prompt, answer)
        if margin is not None:
            margins[text] = margin
    assert all(margin < MARGIN for margin in margins.values()), margins


def greedy_answer(target: Target, prompt: Sequence[int]) -> list[int]:
    """The likeliest next token, again and again, up to the end of the turn."""
    answer: list[int] = []
    rows, start = list(prompt), 0
    while len(answer) < NUM_TOKENS and not target.tokenizer.eos_token_ids.intersection(answer):
        answer.append(int(sequence_logits(target, rows, start)[-1].argmax()))
        start += len(rows)
        rows = answer[-1:]
    return answer


def parting_margin(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> float | None:
    """How far the target's own first token that is not the answer's is ahead of its second.

    None if the answer is the target's own greedy text. One pass tells: up to the first difference
    both have the same tokens in front.
    """
    logits = sequence_logits(target, [*prompt, *answer[:-1]], 0)[len(prompt) - 1 :]
    for token_id, row in zip(answer, logits, strict=True):
        best, second = row.topk(2).values.tolist()
        if int(row.argmax()) != token_id:
            return float(best - second)
    return None
