"""One turn as the engine sees it: the request, its time stamps, and the events it gives back.

Knows: token ids, text pieces, nanoseconds. Does not know: tensors, the wire's messages, sockets.
Invariant: the stamps of a turn never decrease; the stages of TTFT are their differences, so they
add up to TTFT with nothing left over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from chatrt.errors import ChatrtError
    from chatrt.params import SamplingParams


LEAST_PRIORITY = -100


class TurnKind(Enum):
    """What a turn is for."""

    ANSWER = "answer"  # prefill, then decode
    PREFILL = "prefill"  # `generate: false`: the tip is wanted, no answer
    TYPED_AHEAD = "typed_ahead"  # the person is still typing: below all answers, no tip
    PREPARED = "prepared"  # nobody asked: what every turn behind `parent_id` begins with


class FinishReason(Enum):
    """Why a turn ended."""

    END_OF_TURN = "end_of_turn"  # the model's own end, a stop id or a stop string
    PREFILLED = "prefilled"
    MAX_OUTPUT_TOKENS = "max_output_tokens"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(slots=True)
class Stamps:
    """`perf_counter_ns` at each border between two stages of TTFT; 0 means not reached."""

    received_ns: int = 0  # the frame was read off the socket
    tokenized_ns: int = 0  # parsed, rendered, tokenised
    admitted_ns: int = 0  # left the queue
    matched_ns: int = 0  # the prefix tree answered
    restored_ns: int = 0  # pages brought back (copies included)
    prefilled_ns: int = 0  # the last prompt row was computed
    sampled_ns: int = 0  # the first token was chosen
    sent_ns: int = 0  # the first delta was handed to the transport

    def stages_ms(self) -> dict[str, float]:
        """Milliseconds of each stage, in order; their sum is TTFT once `sent_ns` is set."""
        borders = (
            ("tokenize_ms", self.received_ns, self.tokenized_ns),
            ("queue_ms", self.tokenized_ns, self.admitted_ns),
            ("match_ms", self.admitted_ns, self.matched_ns),
            ("restore_ms", self.matched_ns, self.restored_ns),
            ("prefill_ms", self.restored_ns, self.prefilled_ns),
            ("first_sample_ms", self.prefilled_ns, self.sampled_ns),
            ("send_ms", self.sampled_ns, self.sent_ns),
        )
        return {name: (end - start) / 1e6 if end else 0.0 for name, start, end in borders}


@dataclass(slots=True)
class TurnRequest:
    """A turn ready for the engine.

    `token_ids` are the whole sequence: the first `num_history` are shared with the parent's tip,
    all of it unless the template drifted. `salt` separates prefix sharing between keys, `owner` is
    whose turn it is. `typed_ahead_key` names the lane whose half-typed prompt this turn is (or
    supersedes). The pages of a turn that is not `archived` stay on the device. For `pin_ms` behind
    its end its pages are given up after those of turns without a pin, or of lower priority.
    """

    response_id: str
    kind: TurnKind
    token_ids: list[int]
    num_history: int
    sampling: SamplingParams
    parent_id: str | None = None
    salt: str = ""
    owner: str = ""
    priority: int = 0
    typed_ahead_key: str | None = None
    speculation_tokens: int | None = None  # None: the controller decides; 0: off
    archived: bool = False
    pin_ms: float = 0.0
    stamps: Stamps = field(default_factory=Stamps)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the model, and of the likeliest others."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where a prompt differs from what its parent's tip holds.

    `held` and `asked` are the token ids there, None where that sequence is at its end.
    """

    position: int
    held: int | None
    asked: int | None


@dataclass(frozen=True, slots=True)
class KVFigures:
    """What a turn found in, and cost, the KV cache.

    `prefix` names where its prefix came from: `cold` (nothing was known), `warm` (its parent's
    session, or pages of others), `forked` (a branch beside what others made of its parent),
    `restored` (`restored_tokens` of the reused ones came back from host memory or disk).
    """

    prefix: str = "cold"
    reused_tokens: int = 0
    restored_tokens: int = 0
    restored_from: str | None = None
    computed_tokens: int = 0
    typed_ahead_tokens: int = 0
    dropped_turns: int = 0
    resident_pages: int = 0
    shared_pages: int = 0
    miss_reason: str | None = None
    first_divergence: Divergence | None = None


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """What speculation did in one turn.

    `drafter` names who drafted, most drafts first, such as `head+ngram`. `depths[k]` counts the
    target's passes that verified k drafts. The times are those of the steps behind the first token,
    each step's whole also where several turns shared it.
    """

    drafter: str = "none"
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    draft_ms: float = 0.0
    verify_ms: float = 0.0

    @property
    def drafted_per_position(self) -> tuple[int, ...]:
        """How many passes verified a draft at each position."""
        return tuple(sum(self.depths[k:]) for k in range(1, len(self.depths)))

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per target pass, the bonus token included."""
        return self.emitted / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class StartedEvent:
    """The turn left the queue; `seed` is the one it samples with, drawn if none was asked for."""

    response_id: str
    seed: int


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """Tokens accepted together in one step; `text` may be empty while a character is incomplete."""

    response_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    time_ns: int


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """The turn ended. `output_ids` are exactly the ids that the tip holds behind the prompt.

    `num_generated` counts the emitted tokens (an end-of-turn token included); `text` is everything
    that the TokensEvents carried. Where a stop string ended the answer, `num_shown` counts the
    tokens of which at least a part was sent: only these have log-probabilities to show.
    """

    response_id: str
    reason: FinishReason
    output_ids: tuple[int, ...]
    num_generated: int
    text: str
    seed: int
    kv: KVFigures
    speculation: SpeculationFigures
    first_token_ns: int
    last_token_ns: int
    time_ns: int
    stop_string: str | None = None
    num_shown: int | None = None
    error: ChatrtError | None = None


EngineEvent: TypeAlias = StartedEvent | TokensEvent | FinishedEvent
