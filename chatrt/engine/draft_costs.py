"""What drafts cost on this machine, measured: depth control weighs them against passes.

Knows: the drafter protocol, the target's forward, a clock. Does not know: how a draft is made.
Invariant: nothing that is measured stays: the session is nobody's and closed again.
Cost: a dozen passes of the target, with as many proposals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt.batch import BatchRows
from chatrt.depth import DraftCost
from chatrt.drafter import DraftRequest, TargetPass
from chatrt.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatrt.drafter import Drafter
    from chatrt.engine.forward import Target

_NUM_REPEATS = 5
_NUM_TOKENS = 24
_NOBODY = (-1, -2)
# A look-up in tables that are at hand anyway: 10 µs, whatever it finds.
_NGRAM = DraftCost(fixed_ms=0.02, step_ms=0.0, row_ms=0.0)


def measure_drafts(
    target: Target,
    drafter: Drafter,
    *,
    page_size: int,
    max_context: int,
    clock: Callable[[], int],
) -> dict[str, DraftCost]:
    """Costs by source of drafts, from the quickest of a few proposals of 1 and of 3 tokens.

    Each follows a pass of the target, as in service. Call it before any session exists: it writes
    to the first pages of the caches. A context too small to measure in costs nothing, nor does a
    second session where a pass has room for one only.
    """
    bench, batches = _Bench(target, drafter, page_size, clock), target.batches
    most = min(len(_NOBODY), batches.max_sequences, batches.max_rows)
    length = min(_NUM_TOKENS, max_context - 4, batches.max_rows // most + 1)
    num_pages = -(-(length + 4) // page_size)
    costs = {"ngram": _NGRAM}
    source = drafter.source(_NOBODY[0], range(max(length, 0)))
    if source == "ngram" or length < 1 or most * num_pages > target.kv.num_pages:
        return costs
    one_ms = bench.least_ms(length, num_pages, num_tokens=1, num_sessions=1)
    three_ms = bench.least_ms(length, num_pages, num_tokens=3, num_sessions=1)
    both_ms = three_ms
    if most > 1:
        both_ms = bench.least_ms(length, num_pages, num_tokens=3, num_sessions=most)
    step_ms = max(0.0, three_ms - one_ms) / 2
    costs[source] = DraftCost(
        fixed_ms=max(0.0, one_ms - step_ms),
        step_ms=step_ms,
        row_ms=max(0.0, both_ms - three_ms) / 3,
        ends_early=True,
    )
    return costs


class _Bench:
    def __init__(
        self, target: Target, drafter: Drafter, page_size: int, clock: Callable[[], int]
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._page_size = page_size
        self._clock = clock

    def least_ms(self, length: int, num_pages: int, *, num_tokens: int, num_sessions: int) -> float:
        """Other processes only ever add to a time: the least of several is the proposal's own."""
        sessions = _NOBODY[:num_sessions]
        pages = [range(i * num_pages, (i + 1) * num_pages) for i in range(num_sessions)]
        token_ids = list(range(length))
        sampler = self._target.make_sampler(
            SamplingParams(temperature=0.0),
            seed=0,
            vocab_size=self._target.vocab_size,
            prompt_ids=(),
        )
        requests = [
            DraftRequest(session, token_ids, list(own), num_tokens, sampler)
            for session, own in zip(sessions, pages, strict=True)
        ]
        self._compute(sessions, pages, token_ids[:-1])
        times_ms: list[float] = []
        for _ in range(1 + _NUM_REPEATS):
            self._compute(sessions, pages, token_ids[:-1])
            started_ns = self._clock()
            self._drafter.propose(requests)
            times_ms.append((self._clock() - started_ns) / 1e6)
        for session in sessions:
            self._drafter.close(session)
        return min(times_ms[1:])  # the first one warms up

    def _compute(self, sessions: tuple[int, ...], pages: list[range], token_ids: list[int]) -> None:
        """A pass of the target over all tokens but the last, told to the drafter."""
        rows = [BatchRows(token_ids, 0, own) for own in pages]
        self._target.forward(rows, self._drafter.observe(TargetPass(sessions, rows)))
        for session in sessions:
            self._drafter.commit(session, len(token_ids))
