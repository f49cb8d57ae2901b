"""What one answer tells of its turn: the client's times and the server's figures.

Knows: the names in `usage` and `response.chatrt`. Does not know: sockets, what is measured.
Invariant: what the server did not tell is zero tokens or no time, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from chatrt.client import TurnResult


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """One turn. `ttft_ms` is the client's, the other times are the server's.

    `pass_ms` is what one pass of the target took behind the first token, drafts left out.
    """

    input_tokens: int = 0
    cached_tokens: int = 0
    typed_ahead_tokens: int = 0
    restored_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: float | None = None
    server_ttft_ms: float | None = None
    stages_ms: dict[str, float] = field(default_factory=dict)
    tpot_ms: float | None = None
    pass_ms: float | None = None

    @classmethod
    def of(cls, result: TurnResult) -> Self:
        """The figures of an answer that has ended."""
        usage, timing = result.usage, result.timing
        details = usage.get("input_tokens_details") or {}
        kv, speculation = timing.get("kv") or {}, timing.get("speculation") or {}
        steps = speculation.get("steps") or 0
        return cls(
            input_tokens=int(usage.get("input_tokens", 0)),
            cached_tokens=int(details.get("cached_tokens", 0)),
            typed_ahead_tokens=int(kv.get("typed_ahead_tokens", 0)),
            restored_tokens=int(kv.get("restored_tokens", 0)),
            output_tokens=int(usage.get("output_tokens", 0)),
            ttft_ms=result.ttft_ms,
            server_ttft_ms=timing.get("ttft_ms"),
            stages_ms={
                name: ms for name, ms in (timing.get("stages") or {}).items() if ms is not None
            },
            tpot_ms=timing.get("tpot_ms"),
            pass_ms=speculation.get("verify_ms", 0.0) / steps if steps else None,
        )

    @property
    def num_tokens(self) -> int:
        """Of the whole sequence, the answer included: what a follow-up continues."""
        return self.input_tokens + self.output_tokens

    @property
    def computed_tokens(self) -> int:
        """Of the prompt, those that had to be computed."""
        return self.input_tokens - self.cached_tokens
