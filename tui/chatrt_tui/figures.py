"""Puts a turn's figures into words.

Knows: which figures people look at, and their units.
Does not know: widgets, how the figures were measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chatrt.errors import ContextLengthExceeded, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from chatrt.client import TurnResult

_TOO_LONG = "Shorten the message (Ctrl+L empties the prompt), or begin a new chat with Ctrl+N."
_NOT_KEPT = "This message is no part of the conversation: ↑ in an empty prompt brings it back."


def summary(result: TurnResult) -> str:
    """One line: `TTFT 8 ms · 243 tok/s · 96 % cached · 2.9 tokens/step`, of what is known."""
    parts = []
    if result.ttft_ms is not None:
        parts.append(f"TTFT {short_ms(result.ttft_ms)} ms")
    speed = result.timing.get("decode_tps")
    if isinstance(speed, int | float) and speed > 0:
        parts.append(f"{speed:.0f} tok/s")
    num_input = result.usage.get("input_tokens")
    if num_input:
        cached = dict_of(result.usage, "input_tokens_details").get("cached_tokens", 0)
        parts.append(f"{100 * cached / num_input:.0f} % cached")
    speculation = dict_of(result.timing, "speculation")
    if speculation.get("drafted") and speculation.get("mean_accepted_length"):
        parts.append(f"{speculation['mean_accepted_length']:.1f} tokens/step")
    return " · ".join(parts)


def status(result: TurnResult, num_context: int | None) -> str:
    """The summary, how full the context is, and whether turns were left out of it."""
    total, num_left_out = result.usage.get("total_tokens"), _num_left_out(result)
    parts = [
        summary(result),
        context_use(total, num_context) if total else "",
        f"{num_left_out} turn{plural(num_left_out)} left out" if num_left_out else "",
    ]
    return " · ".join(part for part in parts if part)


def context_use(num_tokens: int, num_context: int | None) -> str:
    """How full the context is: `812/8192 tokens`, or `812 tokens` where its size is not known."""
    return f"{num_tokens}/{num_context} tokens" if num_context else f"{num_tokens} tokens"


def ending(result: TurnResult) -> str:
    """Why an answer is not whole, and what helps; empty for one that is."""
    if isinstance(result.error, ContextLengthExceeded):
        return f"{result.error.message.rstrip('.')}. {_TOO_LONG}"
    if isinstance(result.error, ServerUnavailable) and not result.usable_as_parent:
        return f"{result.error.message.rstrip('.')}. {_NOT_KEPT}"
    if result.error is not None:
        return result.error.message
    match result.reason:
        case "cancelled":
            return "stopped"
        case "max_output_tokens":
            return "cut off at the longest answer allowed"
        case None:
            return ""
        case other:
            return str(other)


def left_out(result: TurnResult) -> str:
    """What the answer does not know because the context is full; empty where nothing is missing."""
    number = _num_left_out(result)
    if not number:
        return ""
    turns = "oldest turn was" if number == 1 else f"{number} oldest turns were"
    told = f"The context is full: the {turns} left out of this answer."
    computed = dict_of(result.timing, "kv").get("computed_tokens")
    return f"{told} {computed} token{plural(computed)} had to be computed." if computed else told


def _num_left_out(result: TurnResult) -> int:
    return int(dict_of(result.timing, "kv").get("dropped_turns") or 0)


def plural(number: int) -> str:
    """The ending of a word for so many."""
    return "" if number == 1 else "s"


def dict_of(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the figures, empty where it is missing."""
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def short_ms(value_ms: float) -> str:
    """A time with as many digits as one can use."""
    return f"{value_ms:.1f}" if value_ms < 9.95 and value_ms else f"{value_ms:.0f}"
