"""The measurements that README's figures come from, and what of each is told.

Knows: the commands of `chatrt bench`, where a figure lies in their documents, the bar that it is
held to. Does not know: how anything is measured, what a page looks like.
Invariant: a figure comes out of a document of the run beside it; nothing is typed in by hand.
Source: the bars are the design's numbers.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Document: TypeAlias = "Mapping[str, Any]"
Names: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One command; `name` is its document's, `plots` are those of its plots that are shown.

    `with_llama` are further arguments where llama.cpp is installed.
    """

    name: str
    arguments: tuple[str, ...]
    plots: tuple[str, ...] = ()
    with_llama: tuple[str, ...] = ()

    def command_line(self, *, llama: bool) -> tuple[str, ...]:
        """What stands behind `chatrt bench`."""
        return (*self.arguments, *(self.with_llama if llama else ()))

    @property
    def command(self) -> str:
        """The command as a person types it."""
        return shlex.join(("chatrt", "bench", *self.arguments))


@dataclass(frozen=True, slots=True)
class Told:
    """A figure in words, its bar in words (empty without one), and whether the bar is kept."""

    text: str
    bar: str
    within: bool


@dataclass(frozen=True, slots=True)
class Figure:
    """Numbers of a document in words; the first of them is held to the bar.

    `form` has a `{}` for each of `paths`, whose numbers are in units of `unit`. With `whole`, the
    first number must be the second one.
    """

    form: str
    paths: tuple[Names, ...]
    unit: float = 1.0
    at_least: float | None = None
    at_most: float | None = None
    whole: bool = False

    def values(self, document: Document) -> list[float] | None:
        """The numbers, None if the document lacks one of them."""
        found = [number_at(document, path) for path in self.paths]
        known = [value / self.unit for value in found if value is not None]
        return known if len(known) == len(found) else None

    def is_within(self, values: list[float]) -> bool:
        """Whether the bar is kept; without a bar it is."""
        first = values[0]
        return not (
            (self.at_least is not None and first < self.at_least)
            or (self.at_most is not None and first > self.at_most)
            or (self.whole and first != values[1])
        )

    def told(self, document: Document) -> Told | None:
        """The figure of a document, None if the document lacks a number of it."""
        values = self.values(document)
        if values is None:
            return None
        return Told(self.form.format(*values), self.bar, self.is_within(values))

    @property
    def bar(self) -> str:
        """The bar in words, empty without one."""
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return "all" if self.whole else ""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: what it says, from which run, in which figures."""

    run: str
    what: str
    figures: tuple[Figure, ...]

    def told(self, document: Document) -> list[Told]:
        """Its figures that the document has."""
        found = (figure.told(document) for figure in self.figures)
        return [one for one in found if one is not None]


def number_at(document: Document, path: Names) -> float | None:
    """The number at a path of names, None if there is none."""
    value: Any = document
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


RUNS = (
    Run("step", ("step", "--contention"), ("decode-by-rows",)),
    Run("quality", ("quality",)),
    Run("bookkeeping", ("bookkeeping",)),
    Run("one-session", ("sessions", "--sessions", "1")),
    Run("sessions", ("sessions",), ("ttft-by-turn",)),
    Run("terminal", ("terminal",)),
    Run(
        "histories",
        ("histories", "--repetitions", "3"),
        ("ttft-by-history", "ttft-distribution"),
        with_llama=("--peer",),
    ),
    Run("stall", ("stall",), ("gaps",)),
    Run(
        "stall-budgets",
        ("stall", "--budgets", "10,20,30,50,none", "--prompts", "1"),
        ("delay-by-budget",),
    ),
    Run("speculation", ("speculation", "--per-kind", "8")),
    Run(
        "speculation-depth-4",
        ("speculation", "--depth", "4"),
        ("acceptance-by-position",),
    ),
    Run("speculation-random", ("speculation", "--random")),
    Run("speculation-at-once", ("speculation", "--at-once", "8", "--temperature", "0")),
    Run("peers", ("peers",)),
)


def _ms(*path: str, at_most: float | None = None, words: str = "") -> Figure:
    return Figure(f"{words}{{:.1f}} ms", (path,), at_most=at_most)


def _p50(*path: str, at_most: float | None = None) -> Figure:
    paths = ((*path, "p50"), (*path, "n"))
    return Figure("{:.1f} ms (n = {:.0f})", paths, at_most=at_most)


def _megabytes(name: str, at_most: float | None = None) -> Figure:
    return Figure("{:.0f} MB", (("memory", name),), unit=1e6, at_most=at_most)


def _speedup(temperature: str, at_least: float, words: str = "") -> Figure:
    ratio = ("drafters", "auto", temperature, "speedup", "ms_per_token_ratio")
    paths = tuple((*ratio, name) for name in ("value", "low", "high"))
    return Figure(f"{words}{{:.2f}} ({{:.2f}} to {{:.2f}})", paths, at_least=at_least)


def _identical(temperature: str, words: str) -> Figure:
    same = ("drafters", "auto", temperature, "identical")
    paths = ((*same, "num_identical"), (*same, "num_answers"))
    return Figure(f"{words}{{:.0f}} of {{:.0f}}", paths, whole=True)


def _accepted(temperature: str, which: str, at_least: float, words: str) -> Figure:
    path = ("drafters", "auto", temperature, "mean_accepted_length", which, "value")
    return Figure(f"{words}{{:.2f}}", (path,), at_least=at_least)


_STEP = (
    Row(
        "step",
        "decode, 1 row: share of the read bandwidth over the weights",
        (
            Figure("{:.2f}", (("roofline_fraction",),), at_least=0.80),
            Figure("{:.1f} ms at {:.0f} GB/s", (("decode_ms",), ("read_bandwidth_gbs",))),
        ),
    ),
    Row(
        "step",
        "5, 8, 16 rows ÷ 1 row",
        (
            Figure("{:.2f}", (("rows_ratio", "5"),), at_most=1.3),
            Figure("{:.2f}", (("rows_ratio", "8"),), at_most=1.8),
            Figure("{:.2f}", (("rows_ratio", "16"),), at_most=3.5),
        ),
    ),
    Row(
        "step",
        "time that 4,096 tokens of context add ÷ reading their KV",
        (Figure("{:.2f}", (("kv_added_ratio",),), at_most=1.5),),
    ),
    Row("step", "prefill of 512 tokens", (_ms("prefill_ms", "512"),)),
    Row(
        "step",
        "engine around the forward, greedy; sampled",
        (
            Figure("{:.2f} ms", (("overhead_ms", "greedy"),), at_most=0.25),
            Figure("{:.2f} ms", (("overhead_ms", "sampled"),), at_most=0.25),
        ),
    ),
    Row(
        "step",
        "beside a busy process, share of quiet speed",
        (Figure("{:.2f}", (("contended_ratio",),), at_least=0.40),),
    ),
    Row("step", "loading the model from a warm disk", (Figure("{:.1f} s", (("load_s",),)),)),
    Row(
        "step",
        "memory of the process: weights; KV that was written; all the rest",
        (
            _megabytes("weight_bytes"),
            _megabytes("kv_touched_bytes"),
            _megabytes("other_bytes", at_most=400),
        ),
    ),
    Row(
        "quality",
        "perplexity ÷ the float32 reference's; mean KL",
        (
            Figure("{:.4f}", (("perplexity_ratio",),), at_most=1.005),
            Figure("{:.4f}", (("mean_kl",),), at_most=0.005),
        ),
    ),
    Row(
        "bookkeeping",
        "bookkeeping of one step, model stubbed: 1 session; 64",
        (
            Figure("{:.0f} µs", (("sessions", "1", "total_us"),), at_most=100),
            Figure("{:.0f} µs", (("sessions", "64", "total_us"),), at_most=1000),
        ),
    ),
    Row(
        "bookkeeping",
        "what metrics add to a step of 8 streams, model stubbed",
        (Figure("{:.1f} µs", (("metrics", "total_us"),), at_most=20),),
    ),
)
_SPECULATION = (
    Row(
        "speculation",
        "decode with speculation, times as fast as without, 64 chat prompts (95 % interval)",
        (_speedup("0", 1.45, "greedy "), _speedup("0.8", 1.2, "temperature 0.8 ")),
    ),
    Row(
        "speculation",
        "the same text with and without, bit for bit",
        (_identical("0", "greedy "), _identical("0.8", "temperature 0.8 ")),
    ),
    Row(
        "speculation-depth-4",
        "tokens for each pass of the model, 128 chat prompts, 4 drafts",
        (
            _accepted("0", "overall", 2.4, "greedy "),
            _accepted("0", "without_looping", 2.2, "without answers that loop "),
            _accepted("0.8", "overall", 1.85, "temperature 0.8 "),
        ),
    ),
    Row(
        "speculation-random",
        "text that nobody can predict, times as fast as without (15 pairs)",
        (_speedup("2", 0.97),),
    ),
    Row(
        "speculation-at-once",
        "eight conversations at once, times as fast as without (15 pairs)",
        (_speedup("0", 0.97),),
    ),
)
_TURNS = (
    Row(
        "one-session",
        "one conversation: TTFT cold; follow-up of 48 words; fork; time per output token; p50",
        (*(_p50("ttft_ms", kind) for kind in ("cold", "warm", "forked")), _p50("tpot_ms")),
    ),
    Row(
        "sessions",
        "8 conversations at once: TTFT of follow-ups; time per output token; turns within 200 and "
        "50 ms",
        (
            _p50("ttft_ms", "warm"),
            _p50("tpot_ms"),
            Figure("{:.0%}", (("goodput", "turns_share"),)),
        ),
    ),
    Row("sessions", "all of these 40 turns", (Figure("{:.0f} s", (("duration_s",),), at_most=60),)),
    Row(
        "one-session",
        "client's TTFT − server's, on loopback, p50",
        (_p50("client_minus_server_ms", at_most=2.0),),
    ),
    Row(
        "terminal",
        "`chatrt chat`: command to prompt",
        (Figure("{:.0f} ms", (("prompt_ms", "p50"),), at_most=1000),),
    ),
    Row(
        "terminal",
        "Enter to the first painted character: first turn; follow-up; typed ahead",
        tuple(
            Figure("{:.0f} ms", (("painted_ttft_ms", case, "p50"),))
            for case in ("cold", "follow_up", "typed_ahead")
        ),
    ),
    Row(
        "stall",
        "two streams beside 4k prompts, `--max-gap-ms 20`: gap p99; p95; p99 in quiet",
        (
            _ms("gap_ms_busy", "p99", at_most=20),
            _ms("gap_ms_busy", "p95"),
            _ms("gap_ms_quiet", "p99"),
        ),
    ),
    Row(
        "stall",
        "a long prompt beside them, times its time alone",
        (Figure("{:.2f}", (("prompt_delay_ratio",),), at_most=2.0),),
    ),
)


def _peer_row(what: str, name: str, bar: float | None) -> Row:
    figures = [
        Figure(
            f"{peer} {{:.1f}} ({{:.1f}} to {{:.1f}})",
            tuple(("ratio", name, key, part) for part in ("median", "min", "max")),
            at_least=bar if key == "llama_cpp" else None,
        )
        for key, peer in (("llama_cpp", "llama.cpp"), ("transformers", "transformers"))
    ]
    return Row("peers", what, tuple(figures))


_PEERS = (
    _peer_row("decode, the peer's time ÷ ours, no drafts", "decode", 2.5),
    _peer_row("the same with our drafts", "decode_speculation", 3.6),
    _peer_row("prefill of 512 tokens, the peer's time ÷ ours", "prefill_512", 5.0),
    _peer_row("TTFT of follow-ups, all histories, the peer's ÷ ours", "ttft_warm", 5.0),
)
ROWS = (*_STEP, *_SPECULATION, *_TURNS, *_PEERS)
