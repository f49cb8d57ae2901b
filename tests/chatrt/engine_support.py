"""A plain engine to compare with: every turn alone, cold, without drafts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from chatrt.testing.engine import Outcome, run_outcome, tiny_engine

if TYPE_CHECKING:
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import TurnRequest
    from chatrt_kernels.ops import Ops

# float32 sums depend on their order in the last bits; closer logits than this may swap.
MARGIN = 1e-3


class ColdRuns:
    """Runs requests on an engine that never reuses anything: each under a salt of its own.

    `ops` executes them, by default the reference; where its numerics are row-invariant no `margin`
    is needed, and text has to be equal to the last token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_context: int = 256,
        ops: Ops | None = None,
        margin: float = MARGIN,
    ) -> None:
        self._engine = tiny_engine(tokenizer, max_context=max_context, ops=ops)
        self._margin = margin
        self._salts = itertools.count()
        self._known: dict[tuple[object, ...], Outcome] = {}

    def run(self, request: TurnRequest) -> Outcome:
        """What the turn gives by itself; with log-probabilities of the two likeliest tokens."""
        sampling = replace(request.sampling, top_logprobs=2)
        key = (tuple(request.token_ids), repr(sampling))
        if key not in self._known:
            salt = f"cold {next(self._salts)}"
            alone = replace(
                request,
                response_id=salt,
                salt=salt,
                parent_id=None,
                sampling=sampling,
                typed_ahead_key=None,
                speculation_tokens=0,
            )
            self._known[key] = run_outcome(self._engine, alone)
            self._engine.forget([salt])
        return self._known[key]

    def assert_equal(self, request: TurnRequest, outcome: Outcome, *, whole: bool = True) -> None:
        """The outcome's tokens are the plain run's, or the first of them if it was not `whole`.

        From a near tie on (two likeliest tokens within the margin) greedy runs may differ.
        """
        cold = self.run(request)
        for index, (found, expected) in enumerate(
            zip(outcome.token_ids, cold.token_ids, strict=False)
        ):
            if found != expected:
                (_, first), (_, second) = cold.logprobs[index].top
                assert request.sampling.greedy, (index, found, expected)
                assert first - second < self._margin, (index, found, expected)
                return
        if whole:
            assert outcome.token_ids == cold.token_ids
            assert outcome.text == cold.text
            assert outcome.end.reason is cold.end.reason
            assert outcome.end.output_ids == cold.end.output_ids
            assert outcome.end.stop_string == cold.end.stop_string
        else:
            assert cold.token_ids[: len(outcome.token_ids)] == outcome.token_ids
            assert cold.text.startswith(outcome.text)
