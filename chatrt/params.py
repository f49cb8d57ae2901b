"""What a turn may ask for: sampling parameters with their ranges.

Knows: names, defaults, ranges. Does not know: tensors, the wire, the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when the answer ends.

    Defaults mean "off" for every filter; `temperature` 0 is greedy. `seed` None draws one, which is
    reported. `top_logprobs` None reports no logprobs, 0 only those of the emitted tokens.

    Raises:
        InvalidValue: A number is out of range; the message names it, the value and the range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_output_tokens: int | None = None
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 2.0)
        _check("top_k", self.top_k, 0, 2**31 - 1)
        _check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for bias in self.logit_bias.values():
            _check("logit_bias", bias, -100.0, 100.0)
        if self.seed is not None:
            _check("seed", self.seed, 0, 2**63 - 1)
        if self.max_output_tokens is not None:
            _check("max_output_tokens", self.max_output_tokens, 1, 2**31 - 1)
        if self.top_logprobs is not None:
            _check("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidValue(
                f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed",
                param="stop",
            )
        if any(not stop for stop in self.stop):
            raise InvalidValue("stop contains an empty string", param="stop")
        # The engine prepares stops between two steps: long ones would hold up every stream.
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARS:
            raise InvalidValue(
                f"stop has a string of {longest} characters, at most {MAX_STOP_CHARS} are allowed",
                param="stop",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidValue(
                f"stop_token_ids has {len(self.stop_token_ids)} ids, "
                f"at most {MAX_STOP_TOKEN_IDS} are allowed",
                param="stop_token_ids",
            )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0.0


def _check(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside or math.isnan(value):
        left = "(" if open_low else "["
        raise InvalidValue(f"{name} is {value}, it must be in {left}{low}, {high}]", param=name)
