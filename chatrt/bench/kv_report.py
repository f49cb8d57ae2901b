"""What each type of KV pages saves and costs: figures out of other measurements, and their table.

Knows: where documents of `bench quality` and `bench speculation` have their figures.
Does not know: how they were measured. Invariant: what was not measured is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from rich.console import Group
from rich.text import Text

from chatrt.bench.report import NO_VALUE, new_table
from chatrt.bench.suite import number_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

_ACCEPTED = ("mean_accepted_length", "overall", "value")


@dataclass(frozen=True, slots=True)
class KVFigures:
    """One type of pages.

    `perplexity` is the served model's, `reference_perplexity` that of float32 pages and weights as
    they are; `tokens_per_pass` are those of a pass with four drafts, by temperature.
    """

    bytes_per_token: int
    perplexity: float | None
    reference_perplexity: float | None
    mean_kl: float | None
    tokens_per_pass: dict[str, float | None]

    @classmethod
    def of(
        cls,
        bytes_per_token: int,
        quality: Mapping[str, Any],
        speculation: Mapping[str, Any] | None,
    ) -> Self:
        """The figures of the documents of one type; `speculation` None was not measured."""
        found = speculation or {}
        return cls(
            bytes_per_token,
            number_at(quality, ("perplexity", "served")),
            number_at(quality, ("perplexity", "reference")),
            number_at(quality, ("mean_kl",)),
            {
                temperature: number_at(found, ("drafters", "auto", temperature, *_ACCEPTED))
                for temperature in ("0", "0.8")
            },
        )


def kv_report(figures: Mapping[str, KVFigures]) -> RenderableType:
    """The table; the first type is what the others are compared with."""
    table = new_table("KV pages by type")
    for name in (
        *("type", "bytes a token", "÷ first", "perplexity", "change", "mean KL"),
        *("tokens a pass, greedy", "at 0.8"),
    ):
        table.add_column(name, justify="left" if name == "type" else "right")
    first = next(iter(figures.values()), None)
    for name, one in figures.items():
        assert first is not None
        table.add_row(
            name,
            str(one.bytes_per_token),
            f"{one.bytes_per_token / first.bytes_per_token:.2f}",
            _number(one.perplexity, ".2f"),
            _change(one.perplexity, first.perplexity),
            _number(one.mean_kl, ".4f"),
            *(_number(value, ".2f") for value in one.tokens_per_pass.values()),
        )
    note = (
        "Perplexity of the bundled text; its change is against the first type. Mean KL is against "
        "the float32 reference. Four drafts a pass; drafts keep at least 8 bits."
    )
    return Group(table, Text(note, style="dim"))


def _number(value: float | None, form: str) -> str:
    return NO_VALUE if value is None else format(value, form)


def _change(value: float | None, first: float | None) -> str:
    return NO_VALUE if value is None or first is None else f"{value / first - 1:+.2%}"
