"""One running turn: its tokens become text here, and here it is decided when it ends.

Knows: sampled tokens, the detokenizer, the stop scanner, the caps. Does not know: pages, tensors.
Invariant: `token_ids` are the answer's ids so far; `sent_chars` characters of its text were given
out; after an end, ids behind the kept text are cut (CORRECTNESS 1.7).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chatrt.engine.admission import Running
from chatrt.speculative import SpeculationCounter
from chatrt.text.detokenizer import IncrementalDetokenizer
from chatrt.text.stop import StopScanner
from chatrt.turn import FinishReason, KVFigures, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatrt.sampling import RowSampler
    from chatrt.scheduler import Entry
    from chatrt.text.tokenizer import Tokenizer
    from chatrt.turn import TurnRequest


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a step added to the answer: text to send now, and the tokens that were kept."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Ids that the tip keeps behind the prompt: `num_kept` of its own, then a new tokenisation."""

    num_kept: int
    remainder_ids: list[int]

    @property
    def num_shown(self) -> int:
        """Tokens of which at least a part was sent."""
        return self.num_kept + bool(self.remainder_ids)


@dataclass(slots=True)
class LiveTurn:
    """A turn that the engine has attached to a session.

    `max_tokens` is the number of tokens that it may emit at most, context limit included,
    `max_drafts` how many may be drafted for it in one step.
    """

    request: TurnRequest
    entry: Entry
    sampler: RowSampler
    tokenizer: Tokenizer
    max_tokens: int
    kv: KVFigures
    max_drafts: int = 0
    counter: SpeculationCounter = field(default_factory=SpeculationCounter)
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_string: str | None = None
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_computed_tokens: int = 0
    _text: list[str] = field(default_factory=list)
    _detokenizer: IncrementalDetokenizer = field(init=False)
    _stops: StopScanner = field(init=False)
    _ends: list[int] = field(default_factory=list)  # detokenized characters after each token
    _num_chars: int = 0
    _sent_chars: int = 0

    def __post_init__(self) -> None:
        self._detokenizer = IncrementalDetokenizer(self.tokenizer)
        self._stops = StopScanner(self.request.sampling.stop)

    @property
    def prompt_length(self) -> int:
        """Tokens before the answer."""
        return len(self.request.token_ids)

    @property
    def running(self) -> Running:
        """What admission wants to know."""
        num_left = max(0, self.max_tokens - len(self.token_ids))
        return Running(self.entry.session, num_left, self.request.owner)

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._text)

    @property
    def room(self) -> int:
        """Drafts that could still be emitted behind the next token."""
        return max(0, self.max_tokens - len(self.token_ids) - 1)

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], *, time_ns: int
    ) -> Emitted:
        """Take the tokens of one target pass in order, up to the first end among them."""
        pieces: list[str] = []
        num_taken = 0
        for token_id in token_ids:
            num_taken += 1
            self.token_ids.append(token_id)
            pieces.append(self._push_token(token_id))
            if self.finish is not None:
                break
        self.first_token_ns = self.first_token_ns or time_ns
        self.last_token_ns = time_ns
        if self.finish in (FinishReason.MAX_OUTPUT_TOKENS, FinishReason.END_OF_TURN):
            pieces.append(self._release())
        text = self._give_out("".join(pieces))
        num_before = len(self.token_ids) - num_taken
        num_shown = num_taken
        if self.stop_string is not None:
            num_shown = max(0, self.cut().num_shown - num_before)
        return Emitted(text, tuple(token_ids[:num_taken]), tuple(logprobs[:num_shown]))

    def cut(self) -> Cut:
        """Which ids stay when the answer ends at what was sent (stop string, cancel)."""
        kept = self._sent_chars
        if self.stop_string is None and self.finish is not FinishReason.CANCELLED:
            return Cut(len(self.token_ids), [])
        best = max((end for end in self._ends if end <= kept), default=0)
        # Tokens that end at the same character hold bytes of the next one: take the first only.
        num_kept = self._ends.index(best) + 1 if best else 0
        # Behind other text, such as a token that was kept, or else at the start of the answer.
        return Cut(num_kept, self.tokenizer.encode(self.text[best:kept], behind=best > 0))

    def _push_token(self, token_id: int) -> str:
        sampling = self.request.sampling
        is_eos = token_id in self.tokenizer.eos_token_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            self._ends.append(self._num_chars)
            self.finish = FinishReason.END_OF_TURN
            return ""
        text = self._detokenizer.push((token_id,))
        self._num_chars += len(text)
        self._ends.append(self._num_chars)
        found = self._stops.push(text)
        if found.stop is not None:
            self.stop_string = found.stop
            self.finish = FinishReason.END_OF_TURN
        elif len(self.token_ids) >= self.max_tokens:
            self.finish = FinishReason.MAX_OUTPUT_TOKENS
        return found.text

    def _release(self) -> str:
        """Text still held back when the answer ends without a stop string."""
        if self.stop_string is not None:
            return ""
        # Cut by the cap inside a character, its bytes are not text that the model meant.
        cut_short = self.finish is FinishReason.MAX_OUTPUT_TOKENS
        found = self._stops.push("" if cut_short else self._detokenizer.flush())
        if found.stop is None:
            return found.text + self._stops.flush()
        self.stop_string = found.stop
        self.finish = FinishReason.END_OF_TURN
        return found.text

    def _give_out(self, text: str) -> str:
        if text:
            self._text.append(text)
            self._sent_chars += len(text)
        return text
