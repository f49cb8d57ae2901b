"""The options of `chatrt bench sessions`, as the command line shows them.

Knows: names, ranges, help texts. Does not know: what an option does, defaults that the command has.
Invariant: a rate is a share from 0 to 1; `--rate`, which is none, counts sessions a second.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

BUNDLED = "bundled"
DEFAULT_INPUT = "48"

SessionsOption: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Conversations, all at once unless --rate says when.")
]
TurnsOption: TypeAlias = Annotated[
    str, typer.Option(help="Turns of each, forks not counted: 4, 2-6 or 4~0.5.")
]
InputOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Length of a message in words, about a token each: 48, 32-128 (evenly) or 48~0.5 "
        f"(lognormal: median~sigma).  [default: {DEFAULT_INPUT}]",
        show_default=False,
    ),
]
SystemOption: TypeAlias = Annotated[
    str, typer.Option(help="Length of each session's own system message, likewise.")
]
PrefixOption: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Words before it that all sessions share.")
]
OutputOption: TypeAlias = Annotated[
    str, typer.Option("--max-output-tokens", "-n", help="Length of every answer, likewise.")
]
ThinkOption: TypeAlias = Annotated[
    str, typer.Option(help="Pause before each follow-up: 0, 500, 200-800 or 500~1.")
]
PromptsOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar=f"{BUNDLED}|FILE",
        help="Real messages: ours, or those of an MT-Bench (JSON Lines) or ShareGPT file.",
    ),
]
ForkOption: TypeAlias = Annotated[
    bool, typer.Option("--fork/--no-fork", help="One more turn behind each first answer.")
]
ForkRateOption: TypeAlias = Annotated[
    float, typer.Option(min=0, max=1, help="Share of turns with one more behind an earlier.")
]
CancelRateOption: TypeAlias = Annotated[
    float, typer.Option(min=0, max=1, help="Share of turns cancelled in mid-answer.")
]
AbandonRateOption: TypeAlias = Annotated[
    float, typer.Option(min=0, max=1, help="Share of sessions left in mid-answer, for good.")
]
TypedAheadRateOption: TypeAlias = Annotated[
    float, typer.Option(min=0, max=1, help="Share of follow-ups sent while they are typed.")
]
TypeOption: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Pause behind each word that is typed ahead.")
]
ArrivalsOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Sessions that arrive a second, as a Poisson process; TTFT counts from when a "
        "turn was due. Default: all are there at once.",
    ),
]
TtftTargetOption: TypeAlias = Annotated[
    float, typer.Option(min=0, help="Goodput counts turns within this TTFT.")
]
TpotTargetOption: TypeAlias = Annotated[
    float, typer.Option(min=0, help="Goodput counts turns within this TPOT.")
]
RestartOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--restart", help="One more follow-up each, behind a kill of a server of its own."
    ),
]
SettleOption: TypeAlias = Annotated[
    float, typer.Option(min=0, help="Pause before that kill, for what is written behind.")
]
SeedOption: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Seed of the texts and of sampling.")
]
WarmUpOption: TypeAlias = Annotated[
    bool, typer.Option("--warm-up/--no-warm-up", help="One unmeasured conversation first.")
]
PerSessionOption: TypeAlias = Annotated[
    bool, typer.Option("--per-session", help="List every turn, and every session.")
]
