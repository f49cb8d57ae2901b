"""The last event of a turn, made from what the turn counted.

Knows: live turns, requests, figures. Does not know: pages' bookkeeping, tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatrt.turn import FinishedEvent, FinishReason, KVFigures, SpeculationFigures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.engine.live import LiveTurn
    from chatrt.errors import ChatrtError
    from chatrt.turn import TurnRequest


def finished(
    turn: LiveTurn,
    output_ids: Sequence[int],
    *,
    kv: KVFigures,
    error: ChatrtError | None,
    time_ns: int,
) -> FinishedEvent:
    """The last event of a turn that ran."""
    assert turn.finish is not None
    return FinishedEvent(
        response_id=turn.request.response_id,
        reason=turn.finish,
        output_ids=tuple(output_ids),
        num_generated=len(turn.token_ids),
        text=turn.text,
        seed=turn.sampler.seed,
        kv=kv,
        speculation=turn.counter.figures(),
        first_token_ns=turn.first_token_ns,
        last_token_ns=turn.last_token_ns,
        time_ns=time_ns,
        stop_string=turn.stop_string,
        num_shown=None if turn.stop_string is None else turn.cut().num_shown,
        error=error,
    )


def refused(
    request: TurnRequest, reason: FinishReason, *, error: ChatrtError | None, time_ns: int
) -> FinishedEvent:
    """The only event of a turn that never ran."""
    return FinishedEvent(
        response_id=request.response_id,
        reason=reason,
        output_ids=(),
        num_generated=0,
        text="",
        seed=request.sampling.seed or 0,
        kv=KVFigures(),
        speculation=SpeculationFigures(),
        first_token_ns=0,
        last_token_ns=0,
        time_ns=time_ns,
        error=error,
    )
