"""Puts a turn's figures into words.

Knows: which figures people look at, and their units.
Does not know: widgets, how the figures were measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chatrt.errors import ContextLengthExceeded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from chatrt.client import TurnResult

_STAGES = ("tokenize", "queue", "match", "restore", "prefill", "first_sample", "send")
_TOO_LONG = "Shorten the message, or begin a new chat with Ctrl+N."
_MISSES = {
    "evicted": "the server had given some of these pages away",
    "instructions_changed": "the instructions are not those of the turn before",
    "model_changed": "another model answered before",
    "truncated": "the oldest turns were left out",
    "template_drift": "the template writes an earlier answer differently now",
}


def summary(result: TurnResult) -> str:
    """One line: `TTFT 8 ms · 243 tok/s · 96 % cached · 2.9 tokens/step`, of what is known."""
    parts = []
    if result.ttft_ms is not None:
        parts.append(f"TTFT {_short(result.ttft_ms)} ms")
    speed = result.timing.get("decode_tps")
    if isinstance(speed, int | float) and speed > 0:
        parts.append(f"{speed:.0f} tok/s")
    num_input = result.usage.get("input_tokens")
    if num_input:
        cached = _dict(result.usage, "input_tokens_details").get("cached_tokens", 0)
        parts.append(f"{100 * cached / num_input:.0f} % cached")
    speculation = _dict(result.timing, "speculation")
    if speculation.get("drafted") and speculation.get("mean_accepted_length"):
        parts.append(f"{speculation['mean_accepted_length']:.1f} tokens/step")
    return " · ".join(parts)


def status(result: TurnResult, num_context: int | None) -> str:
    """The summary, how full the context is, and whether turns were left out of it."""
    total, num_left_out = result.usage.get("total_tokens"), _num_left_out(result)
    parts = [
        summary(result),
        context_use(total, num_context) if total else "",
        f"{num_left_out} turn{_s(num_left_out)} left out" if num_left_out else "",
    ]
    return " · ".join(part for part in parts if part)


def context_use(num_tokens: int, num_context: int | None) -> str:
    """How full the context is: `812/8192 tokens`, or `812 tokens` where its size is not known."""
    return f"{num_tokens}/{num_context} tokens" if num_context else f"{num_tokens} tokens"


def ending(result: TurnResult) -> str:
    """Why an answer is not whole, and what helps; empty for one that is."""
    if isinstance(result.error, ContextLengthExceeded):
        return f"{result.error.message.rstrip('.')}. {_TOO_LONG}"
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
    computed = _dict(result.timing, "kv").get("computed_tokens")
    return f"{told} {computed} token{_s(computed)} had to be computed." if computed else told


def details(result: TurnResult) -> str:
    """Some lines: TTFT by stage, tokens by origin, gaps, accepted drafts; nothing that is 0."""
    timing = result.timing
    lines = []
    if result.ttft_ms is not None:
        server = timing.get("ttft_ms")
        told = ""
        if isinstance(server, int | float):
            told = f", {_short(server)} ms of it in the server"
        lines.append(f"TTFT  {_short(result.ttft_ms)} ms{told}")
    stages = _dict(timing, "stages")
    shown = [(name, stages[f"{name}_ms"]) for name in _STAGES if _shows(stages.get(f"{name}_ms"))]
    if shown:
        lines.append(
            "stages  "
            + " · ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in shown)
            + " ms"
        )
    lines += _token_lines(result)
    gaps = _dict(timing, "gap_ms")
    named = [
        f"{name} {_short(gaps[name])}"
        for name in ("p50", "p95", "p99", "max")
        if _shows(gaps.get(name))
    ]
    if named:
        lines.append("gaps  " + " · ".join(named) + " ms")
    lines += _draft_line(_dict(timing, "speculation"))
    return "\n".join(lines)


def _token_lines(result: TurnResult) -> list[str]:
    lines = []
    kv = _dict(result.timing, "kv")
    tokens = []
    if kv.get("reused_tokens"):
        num_ahead = kv.get("typed_ahead_tokens")
        ahead = f", {num_ahead} of them typed ahead" if num_ahead else ""
        tokens.append(f"{kv['reused_tokens']} cached{ahead}")
    if kv.get("computed_tokens"):
        tokens.append(f"{kv['computed_tokens']} computed")
    if result.usage.get("output_tokens"):
        tokens.append(f"{result.usage['output_tokens']} written")
    if tokens:
        lines.append("tokens  " + " · ".join(tokens))
    if kv.get("miss_reason"):
        reason = str(kv["miss_reason"])
        divergence = _divergence(_dict(kv, "first_divergence"))
        lines.append(f"cache miss  {_MISSES.get(reason, reason.replace('_', ' '))}{divergence}")
    return lines


def _divergence(first: Mapping[str, Any]) -> str:
    """From where on a prompt differs from what was cached, with both tokens."""
    if "position" not in first:
        return ""
    held, asked = _token(_dict(first, "held")), _token(_dict(first, "asked"))
    return f", from token {first['position']} on: {held} was cached, {asked} is asked for"


def _token(token: Mapping[str, Any]) -> str:
    """A token for people, its line ends and control characters spelled out."""
    if token.get("text"):
        return repr(token["text"])
    return f"token {token['id']}" if token.get("id") is not None else "the end"


def _num_left_out(result: TurnResult) -> int:
    return int(_dict(result.timing, "kv").get("dropped_turns") or 0)


def _s(number: int) -> str:
    return "" if number == 1 else "s"


def _draft_line(speculation: Mapping[str, Any]) -> list[str]:
    if not speculation.get("drafted"):
        return []
    accepted, drafted = speculation.get("accepted", 0), speculation["drafted"]
    return [f"drafts  {accepted} of {drafted} accepted ({speculation.get('drafter', 'draft')})"]


def _dict(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def _shows(value_ms: object) -> bool:
    """Whether `value_ms` is a number that would not be painted as 0."""
    return isinstance(value_ms, int | float) and float(_short(value_ms)) > 0


def _short(value_ms: float) -> str:
    return f"{value_ms:.1f}" if value_ms < 9.95 and value_ms else f"{value_ms:.0f}"
