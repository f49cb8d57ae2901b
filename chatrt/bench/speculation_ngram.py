"""How long an n-gram proposal takes, in sessions made of what was asked and answered.

Knows: the n-gram drafter, questions and their answers, a clock.
Does not know: models, pages, who else drafts.
Invariant: what is timed is a proposal behind one new token, whose indexing is a part of it.
Cost: two proposals for each of at most 128 tokens, each with a read of 96 MB before it: 2 s.
Source: `BAR_US` is what a proposal is held to, beside a decode step of some milliseconds.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chatrt.drafter import DraftRequest
from chatrt.params import SamplingParams
from chatrt.sampling import Sampler
from chatrt_drafts.ngram import NgramDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatrt.bench.speculation import PairSample, Question

BAR_US = 20.0
NUM_HISTORY_TOKENS = 1000
NUM_PROPOSALS = 64  # of each session
_MOST_SESSIONS = 2
_NUM_DRAFTS = 4
_STREAMED_BYTES = 96_000_000  # what a pass of the default model reads


@dataclass(frozen=True, slots=True)
class NgramCost:
    """Medians over `num_proposals`, in microseconds, behind `num_history_tokens` or more.

    `propose_us` is of proposals that follow each other at once, `cold_propose_us` of those that
    follow a read of as much memory as a pass of the target reads.
    """

    propose_us: float
    cold_propose_us: float
    num_proposals: int
    num_history_tokens: int


def sessions_of(questions: Sequence[Question], pairs: Sequence[PairSample]) -> list[list[int]]:
    """Questions and answers, one behind the other, as sessions that `measure_ngram` takes.

    As many as they fill, two at most; the answers are those with speculation.
    """
    length = NUM_HISTORY_TOKENS + NUM_PROPOSALS
    asked = {question.prompt_id: question.token_ids for question in questions}
    token_ids: list[int] = []
    for pair in pairs:
        for answer in pair.on.answers:
            token_ids += asked[answer.prompt_id]
            token_ids += answer.token_ids
        if len(token_ids) >= _MOST_SESSIONS * length:
            break
    num_sessions = min(len(token_ids) // length, _MOST_SESSIONS)
    return [token_ids[i * length : (i + 1) * length] for i in range(num_sessions)]


def measure_ngram(
    sessions: Sequence[Sequence[int]], *, clock: Callable[[], int] = time.perf_counter_ns
) -> NgramCost | None:
    """The cost of a proposal of up to 4 tokens; None without sessions. `clock` gives nanoseconds.

    Each session has more than `NUM_HISTORY_TOKENS` tokens: it grows by one for each proposal.
    """
    streamed = np.ones(_STREAMED_BYTES // 8)
    times_us: dict[bool, list[float]] = {False: [], True: []}
    for token_ids in sessions:
        for cold, times in times_us.items():
            proposing = _Proposing(token_ids[:NUM_HISTORY_TOKENS])
            for token_id in token_ids[NUM_HISTORY_TOKENS:]:
                if cold:
                    streamed.sum()
                times.append(proposing.append(token_id, clock) / 1e3)
    if not times_us[False]:
        return None
    return NgramCost(
        propose_us=statistics.median(times_us[False]),
        cold_propose_us=statistics.median(times_us[True]),
        num_proposals=len(times_us[False]),
        num_history_tokens=NUM_HISTORY_TOKENS,
    )


class _Proposing:
    """A drafter that has indexed the history of one session."""

    def __init__(self, history: Sequence[int]) -> None:
        self._drafter = NgramDrafter()
        self._token_ids = list(history)
        sampler = Sampler(SamplingParams(temperature=0.0), seed=0, vocab_size=1, prompt_ids=())
        self._requests = [DraftRequest(0, self._token_ids, (), _NUM_DRAFTS, sampler)]
        # It takes a history in parts, so that no step is held up, and one part for each length.
        for length in range(len(history) + 1):
            self._drafter.find(0, self._token_ids[:length])

    def append(self, token_id: int, clock: Callable[[], int]) -> int:
        """The session has one more token; the nanoseconds of the proposal behind it."""
        self._token_ids.append(token_id)
        started_ns = clock()
        self._drafter.propose(self._requests)
        return clock() - started_ns
