"""The last event of a turn, and its figures of the KV cache, made from what was counted.

Knows: live turns, requests, figures. Does not know: pages' bookkeeping, tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from chatrt.turn import FinishedEvent, FinishReason, KVFigures, SpeculationFigures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.engine.archiving import Restored
    from chatrt.engine.live import LiveTurn
    from chatrt.engine.residency import Placement
    from chatrt.errors import ChatrtError
    from chatrt.turn import TurnRequest


def placed(placement: Placement, *, has_parent: bool) -> KVFigures:
    """The figures of a turn that was attached to a session."""
    prefix = "cold"
    if placement.num_reused:
        prefix = "forked" if has_parent and not placement.in_place else "warm"
    return KVFigures(
        prefix=prefix,
        reused_tokens=placement.num_reused,
        typed_ahead_tokens=placement.num_typed_ahead,
        miss_reason=placement.miss_reason,
    )


def with_restored(kv: KVFigures, restored: Restored, *, num_history: int) -> KVFigures:
    """The figures of a turn whose pages came back.

    Nothing was missed if they are all full pages of its history: only those are kept elsewhere.
    """
    num_reused = kv.reused_tokens + restored.num_tokens
    is_whole = num_history - num_reused < restored.page_size
    return replace(
        kv,
        prefix="restored",
        reused_tokens=num_reused,
        restored_tokens=restored.num_tokens,
        restored_from=restored.tier,
        miss_reason=None if is_whole else kv.miss_reason,
    )


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
