"""How many drafts a target would accept on stored answers, without running it again.

Knows: chains of drafts over stored rows, walks along answers. Does not know: time, pages.
Invariant: while a chain is accepted its tokens are the stored ones, so forced tokens give exactly
the chain that would be drafted. What follows the first wrong draft is never counted.
Cost: `max_drafts` steps of the head over the rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from chatrt_drafts.training.store import ANSWER, GREEDY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from chatrt_drafts.training.module import DraftHead
    from chatrt_drafts.training.windows import WindowReader

_NGRAM = 4
_LOOPING_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Accepted:
    """Walks along some answers.

    `mean_length` counts tokens for each pass of the target, its own token included, by the most
    drafts of a pass (1, 2, …); `by_position` is the share of passes in which the draft at that
    place and all in front of it are right.
    """

    num_answers: int
    num_tokens: int
    mean_length: list[float]
    by_position: list[float]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """By kind of answer. Drafts are always the head's likeliest token.

    For `sampled` answers that makes a lower bound: the runtime draws drafts with the target's own
    noise, which agrees more often.
    """

    greedy: Accepted
    greedy_without_loops: Accepted
    sampled: Accepted

    def as_dict(self) -> dict[str, dict[str, object]]:
        """For a card."""
        return asdict(self)

    @property
    def score(self) -> float:
        """One number to choose between weights: greedy and sampled answers count alike."""
        return self.greedy.mean_length[-1] + self.sampled.mean_length[-1]


@torch.no_grad()
def measure_acceptance(
    head: DraftHead,
    reader: WindowReader,
    *,
    max_drafts: int,
    max_rows: int,
    rows_per_batch: int,
) -> Acceptance:
    """Acceptance on the reader's first `max_rows` rows, in batches of whole conversations."""
    ids = reader.rows.ids[:max_rows].cpu().numpy()
    starts = np.flatnonzero(ids[:, 2] == 0)
    bounds = np.append(starts, len(ids))
    hits = np.zeros((max_drafts, len(ids)), dtype=bool)
    for chosen in _batches(np.diff(bounds), rows_per_batch):
        _find_hits(head, reader, ids, bounds, chosen, hits)
    run = _leading_hits(hits)
    answers = list(_answers(ids))
    greedy = [one for one in answers if ids[one[0], 3] & GREEDY]
    sampled = [one for one in answers if not ids[one[0], 3] & GREEDY]
    no_loops = [one for one in greedy if not _loops(ids[one[0] : one[1], 1])]
    return Acceptance(*(_walk(group, run, max_drafts) for group in (greedy, no_loops, sampled)))


def _batches(lengths: NDArray[np.int64], rows_per_batch: int) -> Iterator[NDArray[np.int64]]:
    """Conversations of similar length, few enough that a batch has that many rows."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        count = max(1, rows_per_batch // max(1, int(lengths[order[start]])))
        yield order[start : start + count]
        start += count


def _find_hits(
    head: DraftHead,
    reader: WindowReader,
    ids: NDArray[np.int32],
    bounds: NDArray[np.int64],
    chosen: NDArray[np.int64],
    hits: NDArray[np.bool_],
) -> None:
    """Set hits[s - 1, row] where step s at that row of a chosen conversation is right."""
    starts = bounds[chosen]
    longest = int((bounds[chosen + 1] - starts).max())
    window, labels = reader.read(torch.from_numpy(starts), longest)
    places = labels.places.cpu().numpy()
    depth = labels.depth.cpu().numpy()
    conversation, offset = np.divmod(places, longest)
    rows = starts[conversation] + offset
    # a window of a short conversation goes on into the next one
    inside = rows < bounds[chosen + 1][conversation]
    rows, depth = rows[inside], depth[inside]
    for step, normed in enumerate(head.steps(window, len(hits)), start=1):
        logits = normed.flatten(0, 1)[labels.places].to(reader.kept.head_rows.dtype)
        best = (logits @ reader.kept.head_rows.T).argmax(-1)
        drafted = reader.kept.ids[best].cpu().numpy()[inside]
        hits[step - 1, rows] = (drafted == ids[rows, 1]) & (depth >= step - 1)


def _leading_hits(hits: NDArray[np.bool_]) -> NDArray[np.int64]:
    """int64 `[rows]`: how many drafts of the chain that begins at a row are right."""
    num_drafts, num_rows = hits.shape
    run = np.zeros(num_rows, dtype=np.int64)
    alive = np.ones(num_rows, dtype=bool)
    for step in range(num_drafts):
        shifted = np.zeros(num_rows, dtype=bool)
        shifted[: num_rows - step] = hits[step, step:]
        alive &= shifted
        run += alive
    return run


def _answers(ids: NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of rows that predict one answer's tokens."""
    inside = np.append((ids[:, 3] & ANSWER) != 0, False)
    edges = np.flatnonzero(np.diff(inside, prepend=False))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _loops(tokens: NDArray[np.int32]) -> bool:
    """Whether half of an answer's n-grams were there before."""
    if len(tokens) < _NGRAM:
        return False
    grams = np.lib.stride_tricks.sliding_window_view(tokens, _NGRAM)
    return 1 - len(np.unique(grams, axis=0)) / len(grams) >= _LOOPING_SHARE


def _walk(answers: list[tuple[int, int]], run: NDArray[np.int64], max_drafts: int) -> Accepted:
    means, shares, num_tokens = [], [0.0] * max_drafts, 0
    for most in range(1, max_drafts + 1):
        num_tokens = num_passes = 0
        reached = np.zeros(max_drafts + 1, dtype=np.int64)
        for start, end in answers:
            row = start + 1  # the answer's first token comes from the prompt's pass
            while row < end:
                accepted = min(int(run[row]), most, end - row)
                num_tokens += min(accepted + 1, end - row)
                num_passes += 1
                reached[accepted] += 1
                row += accepted + 1
        means.append(num_tokens / max(1, num_passes))
        if most == max_drafts:
            at_least = reached[::-1].cumsum()[::-1]
            shares = [float(one) / max(1, num_passes) for one in at_least[1:]]
    return Accepted(len(answers), num_tokens, means, shares)
