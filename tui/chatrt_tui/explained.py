"""Explains how a turn was answered: where its time went, what was cached, which drafts held.

Knows: which figures belong together, what each means in words.
Does not know: widgets, how the figures were measured.
Invariant: what is unknown or 0 is left out, never shown as a figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatrt_tui.figures import dict_of, plural, short_ms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from chatrt.client import TurnResult

_STAGES = ("tokenize", "queue", "match", "restore", "prefill", "first_sample", "send")
_MISSES = {
    "evicted": "the server had given some of these pages away",
    "instructions_changed": "the instructions are not those of the turn before",
    "model_changed": "another model answered before",
    "truncated": "the oldest turns were left out",
    "template_drift": "the template writes an earlier answer differently now",
}
_PREFIXES = {
    "cold": "nothing of it was there",
    "warm": "it was there, in memory",
    "forked": "it is shared with another branch",
    "restored": "it came back from",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One value beside others: `share` of the longest, from 0 to 1."""

    label: str
    share: float
    text: str


@dataclass(frozen=True, slots=True)
class Section:
    """Figures that belong together."""

    title: str
    lines: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()


def ttft(result: TurnResult) -> Section | None:
    """Time to first token, what it was spent on, and what did not have to be computed."""
    if result.ttft_ms is None:
        return None
    server = result.timing.get("ttft_ms")
    told = ""
    if isinstance(server, int | float):
        told = f", {short_ms(server)} ms in the server"
    title = f"TTFT {short_ms(result.ttft_ms)} ms{told}"
    return Section(title, bars=tuple(_stages(result)))


def _stages(result: TurnResult) -> list[Bar]:
    stages = dict_of(result.timing, "stages")
    shown = {name: stages[f"{name}_ms"] for name in _STAGES if _shows(stages.get(f"{name}_ms"))}
    longest = max(shown.values(), default=1.0)
    return [
        Bar(name.replace("_", " "), value / longest, f"{short_ms(value)} ms")
        for name, value in shown.items()
    ]


def tokens(result: TurnResult) -> Section | None:
    """Tokens by where they came from, and why some had to be computed again."""
    kv = dict_of(result.timing, "kv")
    parts = []
    if kv.get("reused_tokens"):
        num_ahead = kv.get("typed_ahead_tokens")
        ahead = f", {num_ahead} of them typed ahead" if num_ahead else ""
        parts.append(f"{kv['reused_tokens']} cached{ahead}")
    if kv.get("computed_tokens"):
        parts.append(f"{kv['computed_tokens']} computed")
    if result.usage.get("output_tokens"):
        parts.append(f"{result.usage['output_tokens']} written")
    if not parts:
        return None
    return Section("Tokens", (" · ".join(parts), *_cache(kv)))


def _cache(kv: Mapping[str, Any]) -> list[str]:
    lines = []
    prefix = kv.get("prefix")
    if prefix in _PREFIXES:
        source = f" {kv.get('restored_from')}" if prefix == "restored" else ""
        lines.append(f"{prefix}: {_PREFIXES[prefix]}{source}")
    if kv.get("miss_reason"):
        reason = str(kv["miss_reason"])
        divergence = _divergence(dict_of(kv, "first_divergence"))
        lines.append(f"cache miss: {_MISSES.get(reason, reason.replace('_', ' '))}{divergence}")
    if kv.get("resident_pages"):
        shared = f", {kv['shared_pages']} of them shared" if kv.get("shared_pages") else ""
        number = kv["resident_pages"]
        lines.append(f"{number} page{plural(number)} resident{shared}")
    return lines


def drafts(result: TurnResult) -> Section | None:
    """Accepted drafts, and how often each place of a chain of drafts held."""
    figures = dict_of(result.timing, "speculation")
    if not figures.get("drafted"):
        return None
    told = f"{figures.get('accepted', 0)} of {figures['drafted']} accepted"
    length = figures.get("mean_accepted_length")
    lines = [f"{told} ({figures.get('drafter', 'draft')})"]
    lines += [f"{length:.1f} tokens for each pass"] if length else []
    return Section("Drafts", tuple(lines), tuple(_positions(figures)))


def _positions(figures: Mapping[str, Any]) -> list[Bar]:
    accepted: Sequence[int] = figures.get("accepted_per_position") or ()
    depths: Sequence[int] = figures.get("depths") or ()
    bars = []
    for index, number in enumerate(accepted):
        tried = sum(depths[index + 1 :])
        if tried:
            share = number / tried
            bars.append(Bar(f"place {index + 1}", share, f"{100 * share:.0f} % of {tried}"))
    return bars


def stream(result: TurnResult) -> Section | None:
    """How evenly the answer came, and with which seed."""
    gaps = dict_of(result.timing, "gap_ms")
    named = [
        f"{name} {short_ms(gaps[name])}"
        for name in ("p50", "p95", "p99", "max")
        if _shows(gaps.get(name))
    ]
    speed = result.timing.get("decode_tps")
    lines = [f"{speed:.0f} tokens a second"] if isinstance(speed, int | float) and speed else []
    lines += ["gaps " + " · ".join(named) + " ms"] if named else []
    if result.timing.get("seed") is not None:
        lines.append(f"seed {result.timing['seed']}")
    return Section("Stream", tuple(lines)) if lines else None


def _divergence(first: Mapping[str, Any]) -> str:
    """From where on a prompt differs from what was cached, with both tokens."""
    if "position" not in first:
        return ""
    held, asked = _token(dict_of(first, "held")), _token(dict_of(first, "asked"))
    return f", from token {first['position']} on: {held} was cached, {asked} is asked for"


def _token(token: Mapping[str, Any]) -> str:
    """A token for people, its line ends and control characters spelled out."""
    if token.get("text"):
        return repr(token["text"])
    return f"token {token['id']}" if token.get("id") is not None else "the end"


def _shows(value_ms: object) -> bool:
    """Whether `value_ms` is a number that would not be painted as 0."""
    return isinstance(value_ms, int | float) and float(short_ms(value_ms)) > 0
