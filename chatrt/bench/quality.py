"""How close the executor that serves comes to the float32 reference, on an English text.

Knows: two targets over the same weights, windows of a text, log-probabilities.
Does not know: how the targets were loaded, which executors they are, tables.
Invariant: both targets see the same tokens in the same chunks, and all sums are in float64.
Cost: one prefill of the text on each target, and for each row three passes over the vocabulary.
Source: the bundled text is chapters I and II of Lewis Carroll's "Alice's Adventures in Wonderland"
(1865), which is in the public domain: 5,490 tokens of the default model, ASCII, a line for each
paragraph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import torch

from chatrt.batch import BatchRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from chatrt.engine.forward import Target

MAX_PERPLEXITY_CHANGE = 0.005  # of the reference's, up or down
MAX_MEAN_KL = 0.005  # nats
_CHUNK_ROWS = 128  # logits of so many rows in float64, a few times over, stay below 300 MB


@dataclass(frozen=True, slots=True)
class WindowSums:
    """Sums over the scored tokens of one window; losses and divergences in nats.

    `served_loss` and `reference_loss` are negative log-probabilities of the text's own tokens,
    `kl` is KL(reference || served) of the next-token distributions, `num_agreed` counts the rows
    whose likeliest token is the same.
    """

    num_tokens: int
    served_loss: float
    reference_loss: float
    kl: float
    num_agreed: int
    max_logit_difference: float


@dataclass(frozen=True, slots=True)
class Perplexities:
    """exp of the mean loss by executor."""

    served: float
    reference: float


@dataclass(frozen=True, slots=True)
class QualityFigures:
    """What the serving executor loses against the reference; means are over `num_tokens`."""

    perplexity: Perplexities
    perplexity_ratio: float  # served / reference
    mean_kl: float  # nats
    top1_agreement: float
    max_logit_difference: float
    num_tokens: int

    @property
    def within(self) -> bool:
        """Whether both bars are met."""
        change = abs(self.perplexity_ratio - 1)
        return change <= MAX_PERPLEXITY_CHANGE and self.mean_kl <= MAX_MEAN_KL


def bundled_text() -> str:
    """The English text that comes with the package."""
    return (resources.files("chatrt.bench") / "data" / "english.txt").read_text(encoding="ascii")


def num_windows(num_tokens: int, window: int) -> int:
    """In how many windows a text of `num_tokens` tokens is measured."""
    return -(-(num_tokens - 1) // window)


def measure(
    served: Target, reference: Target, token_ids: Sequence[int], window: int
) -> QualityFigures:
    """The figures of a text of at least two tokens; windows as in `measure_windows`."""
    return combine(measure_windows(served, reference, token_ids, window))


def measure_windows(
    served: Target, reference: Target, token_ids: Sequence[int], window: int
) -> Iterator[WindowSums]:
    """The sums of each window of `window` tokens, which begins with no context at all.

    Every token but the first is scored, by the row of the token before it. Both caches must have
    pages for `window` tokens: the first ones are overwritten.
    """
    assert len(token_ids) > 1, f"{len(token_ids)} tokens score none"
    for first in range(0, len(token_ids) - 1, window):
        rows = token_ids[first : first + window]
        wanted = token_ids[first + 1 : first + 1 + window]
        yield _window(served, reference, rows[: len(wanted)], wanted)


def combine(windows: Iterable[WindowSums]) -> QualityFigures:
    """The figures over all windows, each token with the same weight."""
    total = _added(list(windows))
    served_loss = total.served_loss / total.num_tokens
    reference_loss = total.reference_loss / total.num_tokens
    return QualityFigures(
        perplexity=Perplexities(math.exp(served_loss), math.exp(reference_loss)),
        perplexity_ratio=math.exp(served_loss - reference_loss),
        mean_kl=total.kl / total.num_tokens,
        top1_agreement=total.num_agreed / total.num_tokens,
        max_logit_difference=total.max_logit_difference,
        num_tokens=total.num_tokens,
    )


def sequence_logits(target: Target, token_ids: Sequence[int], start: int) -> Tensor:
    """Logits `[tokens, vocab]` of every token, the first at position `start` of one sequence.

    What is before `start` must be computed already; the sequence owns the pages from 0 on. The
    result is valid until the target's next forward.
    """
    num_pages = -(-(start + len(token_ids)) // target.kv.page_size)
    rows = BatchRows(token_ids, start, range(num_pages), range(len(token_ids)))
    logits = target.decoder.forward(target.batches.build([rows]), target.kv)
    return logits.values[:, : target.vocab_size].cpu()


def _window(
    served: Target, reference: Target, token_ids: Sequence[int], wanted: Sequence[int]
) -> WindowSums:
    num_rows = min(_CHUNK_ROWS, served.batches.max_rows, reference.batches.max_rows)
    chunks = []
    for start in range(0, len(token_ids), num_rows):
        rows = token_ids[start : start + num_rows]
        chunks.append(
            _compare(
                sequence_logits(served, rows, start),
                sequence_logits(reference, rows, start),
                torch.tensor(wanted[start : start + num_rows]),
            )
        )
    return _added(chunks)


def _added(parts: Sequence[WindowSums]) -> WindowSums:
    return WindowSums(
        num_tokens=sum(one.num_tokens for one in parts),
        served_loss=math.fsum(one.served_loss for one in parts),
        reference_loss=math.fsum(one.reference_loss for one in parts),
        kl=math.fsum(one.kl for one in parts),
        num_agreed=sum(one.num_agreed for one in parts),
        max_logit_difference=max(one.max_logit_difference for one in parts),
    )


def _compare(served: Tensor, reference: Tensor, wanted: Tensor) -> WindowSums:
    """Sums over rows: logits `[rows, vocab]` of both, and the tokens `[rows]` that follow."""
    difference = (served.float() - reference.float()).abs().max().item()
    num_agreed = int((served.argmax(-1) == reference.argmax(-1)).sum())
    served_logprobs = torch.log_softmax(served, -1, dtype=torch.float64)
    logprobs = torch.log_softmax(reference, -1, dtype=torch.float64)
    scored = wanted[:, None]
    return WindowSums(
        num_tokens=len(wanted),
        served_loss=-served_logprobs.gather(-1, scored).sum().item(),
        reference_loss=-logprobs.gather(-1, scored).sum().item(),
        kl=(logprobs.exp() * (logprobs - served_logprobs)).sum().item(),
        num_agreed=num_agreed,
        max_logit_difference=difference,
    )
