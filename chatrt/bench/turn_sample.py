"""One turn of `bench sessions` as it was measured.

Knows: which figures make a sample, the words for how a turn begins.
Does not know: sockets, percentiles. Invariant: a sample is never changed; a turn without an error
is one that went as it was planned to go, cancelled and left ones among them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["cold", "warm", "forked", "restored"]
KINDS: tuple[Kind, ...] = ("cold", "warm", "forked", "restored")

CANCELLED = "cancelled"
ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class TurnSample:
    """One turn.

    `kind` is `cold` for a session's first turn, `warm` for a follow-up on its tip, `forked` for one
    behind an earlier answer, `restored` for a follow-up for which the server says that it brought
    pages back, or that was sent `after_restart`.

    `started_ms` (handed to the socket) and `ended_ms` count from the start of the run. `late_ms`
    says how much later than due it was sent; where `from_due`, `ttft_ms` counts from when it was
    due. `history_tokens` are those of the parent's whole sequence. `ttft_ms`, `gaps_ms` and
    `cancel_ms` (cancel handed to the socket → terminal event read) are the client's,
    `server_ttft_ms`, `stages_ms` and `tpot_ms` the server's. `status` is the response's, or
    `abandoned` where the person left in mid-answer: such a turn has no figures of the server.
    `error` is None for a turn that went as planned.
    """

    session_index: int
    turn_index: int
    kind: Kind
    started_ms: float
    status: str
    history_tokens: int
    input_tokens: int = 0
    cached_tokens: int = 0
    typed_ahead_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: float | None = None
    server_ttft_ms: float | None = None
    stages_ms: dict[str, float] = field(default_factory=dict)
    tpot_ms: float | None = None
    gaps_ms: tuple[float, ...] = ()
    error: str | None = None
    ended_ms: float = 0.0
    late_ms: float = 0.0
    from_due: bool = False
    cancel_ms: float | None = None
    restored_tokens: int = 0
    after_restart: bool = False

    @property
    def client_minus_server_ms(self) -> float | None:
        """What the way to the server and back takes; None if either time is not known."""
        if self.ttft_ms is None or self.server_ttft_ms is None:
            return None
        return self.ttft_ms - (self.late_ms if self.from_due else 0.0) - self.server_ttft_ms
