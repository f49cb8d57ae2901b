"""Tables of `bench speculation` for people, and those that hold two documents side by side.

Knows: rich, which figures stand where, the fields of the document.
Does not know: how they were measured.
Invariant: an estimate stands with its interval and the number of units that it is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from chatrt.bench.speculation_ngram import BAR_US
from chatrt.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from chatrt.bench.speculation_figures import Estimate, Identity, SpeculationBenchFigures
    from chatrt.bench.speculation_ngram import NgramCost
    from chatrt.depth import StepCosts

NO_VALUE = "-"
_DEFINITIONS = (
    "Times are those of decoding, from the first token to the last. Off is a runtime of its own "
    "without a drafter; off and on take turns, and the order changes from pair to pair.",
    "× by medians: ms per token off ÷ on, medians over prompts. × in all: tokens/s on ÷ off, over "
    "everything. × by pair: median of the pairs' own.",
    "Tokens/pass: tokens emitted per target pass, bonus token included, the first token left out. "
    "Looping: at least half of an answer's 4-grams were there before.",
    "In brackets: 95 % intervals, bootstrap over prompts (by pair: over pairs).",
)
_SEVERAL_ROWS = 5  # of a pass that verifies four drafts
# What is held side by side: the path to a number in the figures of a document, and its heading.
_COMPARED = {
    "speedup.ms_per_token_ratio.value": "× by medians",
    "speedup.tokens_per_s_ratio.value": "× in all",
    "speedup.pair_ratio.value": "× by pair",
    "speedup.ms_per_token.off": "off, ms/token",
    "speedup.ms_per_token.on": "on, ms/token",
    "mean_accepted_length.overall.value": "tokens/pass",
    "identical.num_identical": "identical answers",
    "identical.num_answers": "of",
}

FiguresByDrafter = dict[str, dict[float, "SpeculationBenchFigures"]]


def speculation_report(found: FiguresByDrafter, notes: Sequence[str]) -> RenderableType:
    """The tables, by drafter and temperature; `notes` are said below them."""
    rows = list(_rows(found))
    parts: list[RenderableType] = [
        _speed_table(rows),
        _speedup_table(rows),
        _acceptance_table(rows),
    ]
    if any(figures.mean_accepted_length.by_kind for _, figures in rows):
        parts.append(_kinds_table(rows))
    if any(figures.k_histogram for _, figures in rows):
        parts.append(_depth_table(rows))
    if any(figures.cost_ms_per_token for _, figures in rows):
        parts.append(_cost_table(rows))
    differing = [
        f"{name}: {what}"
        for name, figures in rows
        for what in (
            _difference(figures.identical, "the answer without speculation"),
            _difference(figures.identical_to_alone, "the answer given alone"),
        )
        if what
    ]
    parts.extend(Text(line, style="red") for line in differing)
    parts.extend(Text(line, style="dim") for line in (*notes, *_DEFINITIONS))
    return Group(*parts)


def step_costs_sentence(drafter: str, costs: StepCosts) -> str:
    """What a runtime went by at its start: its drafts by who makes them, its passes by rows."""
    drafts = (
        f"a draft of {source} takes {cost.fixed_ms:.2f} ms + {cost.step_ms:.2f} ms a step"
        for source, cost in costs.drafts.items()
    )
    one, several = (costs.pass_ms(num_rows) for num_rows in (1, _SEVERAL_ROWS))
    passes = f"a pass {one:.2f} ms for 1 row, {several:.2f} for {_SEVERAL_ROWS}"
    return f"Costs that {drafter} started from: {', '.join((*drafts, passes))}."


def ngram_sentence(cost: NgramCost) -> str:
    """What a proposal of the n-gram drafter takes."""
    return (
        f"An n-gram proposal takes {cost.propose_us:.1f} µs (held to {BAR_US:g}), where all caches "
        f"are cold {cost.cold_propose_us:.1f} µs: medians of {cost.num_proposals} in sessions of "
        f"{cost.num_history_tokens} tokens and more, of these prompts and answers."
    )


def comparison(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What two documents of `bench speculation` have for the same drafter and temperature.

    One entry for each: `drafter`, `temperature`, and by path in the figures the numbers of `a` and
    `b` and the `ratio` b ÷ a, None where there is none.

    Raises:
        InvalidValue: One of them is another document, or they have no drafter and temperature in
            common.
    """
    for document in (a, b):
        if document.get("benchmark") != "speculation":
            raise InvalidValue(
                f"--compare needs two documents of bench speculation, one is of "
                f"{document.get('benchmark')!r}"
            )
    entries = []
    for drafter, by_temperature in a["drafters"].items():
        others = b["drafters"].get(drafter, {})
        for temperature, figures in by_temperature.items():
            if temperature in others:
                numbers = {
                    path: _compared(_at(figures, path), _at(others[temperature], path))
                    for path in _COMPARED
                }
                entries.append({"drafter": drafter, "temperature": temperature, **numbers})
    if not entries:
        raise InvalidValue("the two documents have no drafter and temperature in common")
    return entries


def comparison_report(entries: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> RenderableType:
    """One table for each entry of `comparison`."""
    parts: list[RenderableType] = []
    for entry in entries:
        table = _table(f"{entry['drafter']}, temperature {entry['temperature']}")
        table.add_column("")
        for heading in ("a", "b", "b ÷ a"):
            table.add_column(heading, justify="right")
        for path, heading in _COMPARED.items():
            one = entry[path]
            table.add_row(heading, _plain(one["a"]), _plain(one["b"]), _number(one["ratio"]))
        parts.append(table)
    return Group(*parts, *(Text(line, style="dim") for line in notes))


def _compared(a: float | None, b: float | None) -> dict[str, float | None]:
    return {"a": a, "b": b, "ratio": b / a if a and b is not None else None}


def _at(figures: Any, path: str) -> float | None:
    """The number at a path; None where some part of it is null or missing."""
    for name in path.split("."):
        if not isinstance(figures, dict):
            return None
        figures = figures.get(name)
    return figures if isinstance(figures, int | float) else None


def _rows(found: FiguresByDrafter) -> Iterator[tuple[str, SpeculationBenchFigures]]:
    for drafter, by_temperature in found.items():
        for temperature, figures in by_temperature.items():
            yield f"{drafter}, T {temperature:g}", figures


def _speed_table(rows: Sequence[tuple[str, SpeculationBenchFigures]]) -> Table:
    table = _table("Speculation off against on")
    table.add_column("")
    for heading in ("pairs", "off, ms/token", "on", "off, tokens/s", "on", "identical"):
        table.add_column(heading, justify="right")
    if any(figures.identical_to_alone for _, figures in rows):
        table.add_column("as alone", justify="right")
    for name, figures in rows:
        speed, alone = figures.speedup, figures.identical_to_alone
        table.add_row(
            name,
            str(figures.num_pairs),
            _ms(speed.ms_per_token.off),
            _ms(speed.ms_per_token.on),
            _plain(speed.tokens_per_s.off),
            _plain(speed.tokens_per_s.on),
            _identity(figures.identical),
            *([_identity(alone)] if alone is not None else []),
        )
    return table


def _speedup_table(rows: Sequence[tuple[str, SpeculationBenchFigures]]) -> Table:
    table = _table("How many times as fast")
    table.add_column("")
    for heading in ("× by medians", "× in all", "× by pair"):
        table.add_column(heading, justify="right")
    for name, figures in rows:
        speed = figures.speedup
        ratios = (speed.ms_per_token_ratio, speed.tokens_per_s_ratio, speed.pair_ratio)
        table.add_row(name, *map(_estimate, ratios))
    return table


def _acceptance_table(rows: Sequence[tuple[str, SpeculationBenchFigures]]) -> Table:
    table = _table("Acceptance (share of passes, and of drafts at that place)")
    table.add_column("")
    for heading in ("tokens/pass", "n", "without looping", "looping"):
        table.add_column(heading, justify="right")
    most = max((len(figures.accepted_per_position.of_rounds) for _, figures in rows), default=0)
    for position in range(1, most + 1):
        table.add_column(f"draft {position}", justify="right")
    for name, figures in rows:
        length, positions = figures.mean_accepted_length, figures.accepted_per_position
        shares = [
            f"{of_rounds:.0%} {'' if of_drafted is None else f'({of_drafted:.0%})'}"
            for of_rounds, of_drafted in zip(
                positions.of_rounds, positions.of_drafted, strict=False
            )
        ]
        table.add_row(
            name,
            _estimate(length.overall),
            str(length.overall.num_units) if length.overall else NO_VALUE,
            _estimate(length.without_looping),
            str(length.num_looping),
            *shares,
        )
    return table


def _kinds_table(rows: Sequence[tuple[str, SpeculationBenchFigures]]) -> Table:
    table = _table("Tokens/pass by kind of prompt")
    table.add_column("")
    kinds = dict.fromkeys(k for _, figures in rows for k in figures.mean_accepted_length.by_kind)
    for kind in kinds:
        table.add_column(kind, justify="right")
    for name, figures in rows:
        by_kind = figures.mean_accepted_length.by_kind
        table.add_row(name, *(_number(by_kind.get(kind)) for kind in kinds))
    return table


def _depth_table(rows: Sequence[tuple[str, SpeculationBenchFigures]]) -> Table:
    table = _table("Share of passes by number of drafts")
    table.add_column("")
    depths = sorted({depth for _, figures in rows for depth in figures.k_histogram})
    for depth in depths:
        table.add_column(str(depth), justify="right")
    for name, figures in rows:
        total = sum(figures.k_histogram.values())
        shares = (figures.k_histogram.get(depth, 0) / total if total else 0 for depth in depths)
        table.add_row(name, *(f"{share:.0%}" for share in shares))
    return table


def _cost_table(rows: Sequence[tuple[str, SpeculationBenchFigures]]) -> Table:
    table = _table("Where the time goes (ms per token)")
    table.add_column("")
    for heading in ("on", "draft", "verify", "other", "off", "passes", "other"):
        table.add_column(heading, justify="right")
    for name, figures in rows:
        on, off = figures.cost_ms_per_token, figures.cost_off_ms_per_token
        split = (None,) * 4 if on is None else (on.total, on.draft, on.verify, on.other)
        plain = (None,) * 3 if off is None else (off.total, off.verify, off.other)
        table.add_row(name, *map(_ms, (*split, *plain)))
    return table


def _identity(identity: Identity) -> Text:
    text = f"{identity.num_identical} of {identity.num_answers}"
    return Text(text, style="" if identity.all_identical else "red")


def _difference(identity: Identity | None, expected: str) -> str | None:
    """The sentence about the first answer that differs."""
    if identity is None or identity.first_difference is None:
        return None
    first = identity.first_difference
    return f"the answer to {first.prompt_id} differs from {expected} at token {first.position}"


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        min_width=len(title),
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
    )


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return NO_VALUE
    return f"{estimate.value:.2f} [{estimate.low:.2f} to {estimate.high:.2f}]"


def _number(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.2f}"


def _ms(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.3f}"


def _plain(value: float | None) -> str:
    if value is None:
        return NO_VALUE
    return str(value) if isinstance(value, int) else f"{value:.2f}"
